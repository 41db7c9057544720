"""PoolBackend over LMCache's multi-process server, on the same host. The only importer of lmcache.

Speaks the "engine-driven" protocol itself (tried with 0.5.6): the server reserves or locks buffers of a shared memory
and names them, we copy, we commit. So the server never touches our memory, and LMCache's own gather and scatter, which
want to know the layout of a pool, are not needed: a chunk is registered as one opaque row of bytes.

What was found about that server, and what is done about it:

- A request it cannot serve (a registration it does not know, say after a restart) is not answered at all; a lookup of
  an unknown layout finds nothing, for ever. So its connection is watched: when it breaks the `_Registration` ends, all
  waits in it with it, and a new one registers anew. Instance ids are never used twice: with the offsets of a new
  server we would else write into the mapping of the old one.
- A lookup locks what it finds until it is read or freed (300 s), and each request id has a session (600 s). `_Talk`
  owes and pays both; when an answer is late, `_ServerConnection` pays afterwards.
- Unregistering an instance, or its end by silence, *commits* what it had reserved and not written. So we unregister
  only when nothing is reserved, and the seals of `chunks.py` tell such chunks.
"""

import itertools
import logging
import mmap
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from prometheus_client import CollectorRegistry
from zmq.utils.monitor import recv_monitor_message

from pdserve.background.threads import KeptThread
from pdserve.configs.transfer import PoolConfig
from pdserve.kvtransfer.connector import KVCacheMemory, Wake
from pdserve.kvtransfer.metrics import PoolMetrics
from pdserve.kvtransfer.pool.backend import PoolError
from pdserve.kvtransfer.pool.chunks import BlockCopier, Chunks, Prefix, Shard
from pdserve.kvtransfer.pool.lmcache_server import SHARED_MEMORY
from pdserve.kvtransfer.pool.operations import ThreadedKVPool

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 5.0
UNREGISTER_TIMEOUT_S = 0.5
REOPEN_S = 1.0
"""Between attempts to begin a session with a server that answers wrongly."""
REFRESH_S = 60.0
"""A registration ends after an hour of silence; registering again is silent no more."""
TIDY_MS = 20
"""Between looks at late answers, while some are awaited."""
PAY_TIMEOUT_S = 0.1
TIDY_LIMIT_S = 300.0
"""After so long what the server held for a late answer has ended by itself."""
PREFETCH_MARGIN = 0.8
"""Share of our deadline that the server may spend on loading chunks from its disk."""
LATE_PREFETCH_S = 5.0
IDLE_MS = 1000


class _SharedMemory:
    """The server's chunk memory mapped here; page-locked when the blocks are on a CUDA device."""

    def __init__(self, name: str, num_bytes: int, device: torch.device) -> None:
        """OSError when there is none of that name on this host."""
        file = os.open(SHARED_MEMORY / name.lstrip("/"), os.O_RDWR)
        try:
            self._map = mmap.mmap(file, num_bytes)
        finally:
            os.close(file)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = device.type == "cuda" and self._page_lock(device)

    def _page_lock(self, device: torch.device) -> bool:
        with torch.cuda.device(device):  # or the call would make a context on the first device
            error = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0)
        if int(error) != 0:
            logger.warning("KV pool: cudaHostRegister failed (%s): copies will be slow", error)
        return int(error) == 0

    def buffer(self, descriptor: dict[str, Any], num_bytes: int) -> torch.Tensor:
        offset, length = int(descriptor["offset"]), int(descriptor["length"])
        if offset < 0 or length < num_bytes or offset + length > self.bytes.numel():
            raise PoolError("error", f"the server names a buffer outside its memory: {descriptor}")
        return self.bytes[offset : offset + num_bytes]

    def __del__(self) -> None:
        """Unmapped with the last buffer that is in use; page-locks must go before."""
        if getattr(self, "_pinned", False):
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


class _Registration:
    """Our registration with one living server process."""

    def __init__(self, url: str, context: zmq.Context, chunks: Chunks, device: torch.device) -> None:
        """PoolError when the server does not answer or does not fit."""
        self.chunks = chunks
        self.dead = False
        self.left_reserved = False
        """Whether a reservation was left uncommitted: then the instance must not be unregistered."""
        self._lock = threading.Lock()
        self._waiting: set[MessagingFuture[Any]] = set()
        self.instance_id = secrets.randbits(62)
        self._client = RequestClientFactory.create(url, context=context)
        try:
            until = time.monotonic() + OPEN_TIMEOUT_S
            size = self.wait(self.call("get_chunk_size"), until)
            if size != chunks.chunk_tokens:
                raise PoolError(
                    "error",
                    f"the pool server at {url} has chunks of {size} tokens, pool.chunk_tokens is "
                    f"{chunks.chunk_tokens}: make them equal (--chunk-size)",
                )
            answer = self.wait(self.register(), until)
            if not answer.shm_name:
                raise PoolError(
                    "error",
                    f"the pool server at {url} has no shared memory: start it with --shm-name NAME --no-l1-use-lazy "
                    "--supported-transfer-mode engine_driven, and enough of /dev/shm",
                )
            try:
                self.memory = _SharedMemory(answer.shm_name, answer.pool_size, device)
            except OSError as error:
                raise PoolError("error", f"cannot map the pool server's memory: {error}") from error
        except BaseException:
            self.end()
            raise

    def call(self, name: str, *arguments: Any) -> MessagingFuture[Any]:
        """Send a request; PoolError "not-connected" once the session has ended (a closed client must not be used)."""
        with self._lock:
            if self.dead:
                raise PoolError("not-connected", "the pool server is gone")
            return getattr(self._client, name)(*arguments)

    def register(self) -> MessagingFuture[Any]:
        """Also refreshes a registration that exists."""
        payload = RegisterEngineDrivenContextPayload(
            instance_id=self.instance_id,
            model_name=self.chunks.model_name,
            world_size=self.chunks.shard.world_size,
            block_size=1,
            num_layers=1,
            hidden_dim_size=self.chunks.num_bytes,
            dtype_str="uint8",
            use_mla=True,  # one plane: a chunk is a row of bytes
            num_physical_slots=1,
        )
        return self.call("register_kv_cache_engine_driven_context", payload)

    def wait(self, answer: MessagingFuture[Any], until: float) -> Any:
        """PoolError "timeout", or "not-connected" as soon as the session ends."""
        with self._lock:
            if self.dead:
                raise PoolError("not-connected", "the pool server is gone")
            self._waiting.add(answer)
        try:
            if not answer.wait(max(0.0, until - time.monotonic())):
                raise PoolError("timeout", "the pool server does not answer")
            return answer.result()
        except PoolError:
            raise
        except Exception as error:
            raise PoolError("error", f"the pool server: {error!r}") from error
        finally:
            with self._lock:
                self._waiting.discard(answer)

    def end(self) -> None:
        """The server is gone, or we go: every wait ends now."""
        with self._lock:
            self.dead = True
            waiting = list(self._waiting)
            self._client.close()
        for answer in waiting:
            answer.set_exception(PoolError("not-connected", "the pool server is gone"))

    def unregister(self) -> None:
        """Best effort."""
        if not self.left_reserved:
            self.call("unregister_kv_cache_engine_driven_context", self.instance_id).wait(UNREGISTER_TIMEOUT_S)


Step = Callable[[], MessagingFuture[Any]]


@dataclass(eq=False)
class _Debt:
    """What the server still holds for a request id: `steps` to do, in order, once `answer` has come."""

    session: _Registration
    answer: MessagingFuture[Any] | None
    steps: list[Step]
    since: float = field(default_factory=time.monotonic)

    def pay(self, until: float = 0.0) -> bool:
        """Go on as far as answers come by `until`; True when nothing is left to do."""
        try:
            while time.monotonic() - self.since < TIDY_LIMIT_S:
                if self.answer is not None and not self.answer.wait(max(0.0, until - time.monotonic())):
                    return self.session.dead
                if not self.steps:
                    return True
                self.answer = self.steps.pop(0)()
        except PoolError:
            pass  # the server is gone, and all that it held
        return True


class _Talk:
    """One request id with the server, and what is owed for it."""

    def __init__(self, session: _Registration, prefix: Prefix, request_id: str, until: float) -> None:
        self._session, self._prefix, self._id, self._until = session, prefix, request_id, until
        self._call, self._chunks = session.call, session.chunks
        self._unanswered: MessagingFuture[Any] | None = None
        self._owed: list[Step] = []

    def key(self, first: int, last: int) -> IPCCacheServerKey:
        """Names the chunks [first, last) of the prefix."""
        size = self._chunks.chunk_tokens
        return IPCCacheServerKey(
            model_name=self._chunks.model_name,
            world_size=self._chunks.shard.world_size,
            worker_id=self._chunks.shard.worker_id,
            token_ids=self._prefix.tokens[: last * size],
            start=first * size,
            end=last * size,
            request_id=self._id,
            cache_salt=self._prefix.salt,
            num_kv_readers=1,
        )

    def _ask(self, answer: MessagingFuture[Any]) -> Any:
        self._unanswered = answer
        result = self._session.wait(answer, self._until)
        self._unanswered = None
        return result

    def _free(self, first: int, last: int) -> list[Step]:
        return [lambda: self._call("free_lookup_locks", self.key(first, last), 1)] if last > first else []

    def _end(self) -> MessagingFuture[Any]:
        return self._call("end_session", self._id)

    def find(self) -> int:
        """Chunks found in a row, and locked."""
        count = self._prefix.num_chunks
        late: list[Step] = [lambda: self._call("wait_prefetch_status", self._id, LATE_PREFETCH_S)]
        self._owed = [*late, *self._free(0, count), self._end]
        self._ask(self._call("lookup", self.key(0, count), 1))
        patience = PREFETCH_MARGIN * max(0.0, self._until - time.monotonic())
        found = self._ask(self._call("wait_prefetch_status", self._id, patience))
        if found is None:
            raise PoolError("loading", "the pool server still loads the chunks")
        self._owed = [*self._free(0, found), self._end]
        return int(found)

    def read(self, first: int, last: int) -> list[torch.Tensor]:
        """Buffers of the chunks [first, last), which `find` has found."""
        commit: list[Step] = [lambda: self._call("commit_retrieve", self.key(first, last), self._session.instance_id)]
        self._owed = [*commit, *self._free(0, first), self._end]  # commit first: the next read may be of the same key
        answer = self._ask(self._call("prepare_retrieve", self.key(first, last), self._session.instance_id))
        if not answer.success:
            self._owed = [*self._free(0, first), self._end]
            return []
        return [self._buffer(descriptor) for descriptor in answer.context["slots"]]

    def reserve(self, first: int, last: int) -> dict[int, torch.Tensor]:
        self._owed = [self._end]
        answer = self._ask(self._call("prepare_store", self.key(first, last), self._session.instance_id))
        buffers, indices = answer.context["slots"], answer.context["chunk_indices"]
        return {first + index: self._buffer(buffer) for index, buffer in zip(indices, buffers, strict=True)}

    def commit(self, first: int, last: int, until: float) -> None:
        self._until = until
        if not self._ask(self._call("commit_store", self.key(first, last), self._session.instance_id, b"")):
            raise PoolError("error", "the pool server did not take the chunks")

    def _buffer(self, descriptor: dict[str, Any]) -> torch.Tensor:
        return self._session.memory.buffer(descriptor, self._chunks.num_bytes)

    def debt(self) -> _Debt:
        return _Debt(self._session, self._unanswered, self._owed)


class _ServerConnection:
    """Watches the connection to the server, begins and ends sessions, pays what late answers owe."""

    def __init__(self, address: str, chunks: Chunks, device: torch.device) -> None:
        self._url, self._chunks, self._device = f"tcp://{address}", chunks, device
        self.session: _Registration | None = None
        self._owed: queue.SimpleQueue[_Debt] = queue.SimpleQueue()
        self._closing = False
        self._context = zmq.Context()
        self._context.linger = 0
        self._watch = self._context.socket(zmq.DEALER)
        self._events = self._watch.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._bell, self._bell_end = os.pipe()
        self._complaint = ""
        self._is_serving, self._next_try, self._next_refresh = False, 0.0, 0.0
        self._debts: deque[_Debt] = deque()
        self._watch.connect(self._url)
        self._thread = KeptThread("kv pool connection", self._run)

    def owe(self, debt: _Debt) -> None:
        """Pay now if the server answers, else when it does."""
        if not debt.pay(time.monotonic() + PAY_TIMEOUT_S):
            self._owed.put(debt)
            os.write(self._bell_end, b"x")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(TIDY_MS if self._debts else IDLE_MS))
            if self._bell in ready:
                os.read(self._bell, 1024)
            while self._events.poll(0):
                self._is_serving = recv_monitor_message(self._events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                self._drop()  # a connection made anew may lead to another server
            now = time.monotonic()
            if self._is_serving and self.session is None and now >= self._next_try:
                self._next_try, self._next_refresh = now + REOPEN_S, now + REFRESH_S
                self._open()
            if self.session is not None and now >= self._next_refresh:
                self._next_refresh = now + REFRESH_S
                self.session.register()
            while not self._owed.empty():
                self._debts.append(self._owed.get())
            for _ in range(len(self._debts)):
                debt = self._debts.popleft()
                if not debt.pay():
                    self._debts.append(debt)

    def _open(self) -> None:
        try:
            self.session = _Registration(self._url, self._context, self._chunks, self._device)
            self._complaint = ""
            logger.info("KV pool: connected to %s", self._url)
        except (PoolError, RuntimeError) as error:  # RuntimeError: of CUDA
            if str(error) != self._complaint:
                logger.warning("KV pool: %s", error)
            self._complaint = str(error)

    def _drop(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            logger.warning("KV pool: the connection to %s broke", self._url)
            session.end()

    def close(self) -> None:
        self._closing = True
        os.write(self._bell_end, b"x")
        self._thread.finish(OPEN_TIMEOUT_S)
        session, self.session = self.session, None
        if session is not None:
            session.unregister()
            session.end()
        self._context.destroy(linger=0)
        os.close(self._bell)
        os.close(self._bell_end)


class _LMCacheWriting:
    """See `pool.Writing`."""

    def __init__(self, talk: _Talk, first: int, last: int, patience_s: float) -> None:
        self._talk, self._first, self._last, self._patience_s = talk, first, last, patience_s
        self.buffers = talk.reserve(first, last)
        self.committed = not self.buffers

    def commit(self) -> None:
        self._talk.commit(self._first, self._last, time.monotonic() + self._patience_s)
        self.committed = True


class LMCacheBackend:
    """See `pool.PoolBackend`. Connects, and connects again, in the background."""

    def __init__(self, address: str, chunks: Chunks, request_deadline_s: float, device: torch.device) -> None:
        self.chunks, self._patience_s = chunks, request_deadline_s
        self._link = _ServerConnection(address, chunks, device)
        self._name = secrets.token_hex(8)
        self._counter = itertools.count()

    @property
    def connected(self) -> bool:
        return self._link.session is not None

    @contextmanager
    def reading(self, prefix: Prefix, first: int, until: float) -> Iterator[list[torch.Tensor]]:
        with self._talking(self._session(), prefix, until) as talk:
            found = talk.find()
            yield talk.read(first, found) if found > first else []

    @contextmanager
    def writing(self, prefix: Prefix, first: int, last: int, until: float) -> Iterator[_LMCacheWriting]:
        session = self._session()
        committed = False
        try:
            with self._talking(session, prefix, until) as talk:
                writing = _LMCacheWriting(talk, first, last, self._patience_s)
                yield writing
                committed = writing.committed
        finally:
            session.left_reserved |= not committed

    def probe(self, until: float) -> None:
        session = self._session()
        session.wait(session.call("ping", None), until)
        session.wait(session.register(), until)

    def close(self) -> None:
        self._link.close()

    def _session(self) -> _Registration:
        session = self._link.session
        if session is None:
            raise PoolError("not-connected", "no pool server answers")
        return session

    @contextmanager
    def _talking(self, session: _Registration, prefix: Prefix, until: float) -> Iterator[_Talk]:
        talk = _Talk(session, prefix, f"{self._name}-{next(self._counter)}", until)
        try:
            yield talk
        finally:
            self._link.owe(talk.debt())


def lmcache_pool(
    address: str,
    config: PoolConfig,
    memory: KVCacheMemory,
    wake: Wake,
    *,
    shard: Shard | None = None,
    registry: CollectorRegistry | None = None,
) -> ThreadedKVPool:
    """A KVPool over the server at `address` (host:port, this host). shard: which part of the rows this rank stores.
    ValueError when config does not fit the memory."""
    chunks = Chunks(memory, config.blocks_per_chunk(memory.layout.block_size), shard or Shard())
    backend = LMCacheBackend(address, chunks, config.request_deadline_s, memory.kv_cache.device)
    metrics = PoolMetrics(registry or CollectorRegistry())
    return ThreadedKVPool(backend, BlockCopier(memory), config, wake, metrics)
