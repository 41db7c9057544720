"""Our registration with one living LMCache server process, and the server's chunk memory, mapped
here.

Sends requests and waits for answers; all waits end when the server goes. Knows no names of chunks,
no locks and no debts. `lmcache_connection.py` makes and ends registrations, `lmcache_talk.py` sends
its requests through them.
"""

import logging
import mmap
import os
import secrets
import threading
import time
from typing import Any

import torch
import zmq
from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from pdserve.kvtransfer.pool.backend import PoolError
from pdserve.kvtransfer.pool.chunks import Chunks
from pdserve.kvtransfer.pool.lmcache_server import SHARED_MEMORY

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 5.0
UNREGISTER_TIMEOUT_S = 0.5


class SharedMemory:
    """The server's chunk memory, mapped here. It is page-locked if the blocks are on a CUDA
    device."""

    def __init__(self, name: str, num_bytes: int, device: torch.device) -> None:
        """OSError if there is no memory of that name on this host."""
        file = os.open(SHARED_MEMORY / name.lstrip("/"), os.O_RDWR)
        try:
            self._map = mmap.mmap(file, num_bytes)
        finally:
            os.close(file)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = device.type == "cuda" and self._page_lock(device)

    def _page_lock(self, device: torch.device) -> bool:
        with torch.cuda.device(device):  # else the call would make a context on the first device
            error = torch.cuda.cudart().cudaHostRegister(
                self.bytes.data_ptr(), self.bytes.numel(), 0
            )
        if int(error) != 0:
            logger.warning("KV pool: cudaHostRegister failed (%s): copies will be slow", error)
        return int(error) == 0

    def buffer(self, descriptor: dict[str, Any], num_bytes: int) -> torch.Tensor:
        offset = int(descriptor["offset"])
        length = int(descriptor["length"])
        if offset < 0 or length < num_bytes or offset + length > self.bytes.numel():
            raise PoolError("error", f"the server names a buffer outside its memory: {descriptor}")
        return self.bytes[offset : offset + num_bytes]

    def __del__(self) -> None:
        """Release the page-lock. It must go before the memory, which is unmapped with the last
        buffer in use."""
        if getattr(self, "_pinned", False):
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


def close_client(client: Any) -> None:
    """Close a client of LMCache's, in another order than its own (0.5.6).

    By itself it closes the monitor of its socket before that socket. ZeroMQ's I/O thread waits for
    ever when it reports an event to a closed monitor. Then no socket of the context connects any
    more. So we first end the reports, after the client's own thread has left the socket.
    """
    messages = client._message_queue_client
    messages._polling_loop.unregister(messages)
    messages._polling_loop.release_instance()
    messages.socket.disable_monitor()
    messages.monitor.close(linger=0)
    messages.socket.close()


class Registration:
    """Our registration with one living server process."""

    def __init__(
        self, url: str, context: zmq.Context, chunks: Chunks, device: torch.device
    ) -> None:
        """PoolError if the server does not answer or does not fit."""
        self.chunks = chunks
        self.dead = False
        self.left_reserved = False
        """True if a reservation was left uncommitted. Then the instance must not be
        unregistered."""
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
                    f"the pool server at {url} has no shared memory: start it with --shm-name NAME "
                    "--no-l1-use-lazy "
                    "--supported-transfer-mode engine_driven, and enough of /dev/shm",
                )
            try:
                self.memory = SharedMemory(answer.shm_name, answer.pool_size, device)
            except OSError as error:
                raise PoolError("error", f"cannot map the pool server's memory: {error}") from error
        except BaseException:
            self.end()
            raise

    def call(self, name: str, *arguments: Any) -> MessagingFuture[Any]:
        """Send a request. PoolError "not-connected" after the session has ended, because a closed
        client must not be used."""
        with self._lock:
            if self.dead:
                raise PoolError("not-connected", "the pool server is gone")
            return getattr(self._client, name)(*arguments)

    def register(self) -> MessagingFuture[Any]:
        """Register, or refresh an existing registration."""
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
        """Wait for an answer. PoolError "timeout", or "not-connected" as soon as the session
        ends."""
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
        """End every wait now, because the server is gone or we leave."""
        with self._lock:
            self.dead = True
            waiting = list(self._waiting)
            close_client(self._client)
        for answer in waiting:
            answer.set_exception(PoolError("not-connected", "the pool server is gone"))

    def unregister(self) -> None:
        """Unregister the instance; best effort."""
        if not self.left_reserved:
            self.call("unregister_kv_cache_engine_driven_context", self.instance_id).wait(
                UNREGISTER_TIMEOUT_S
            )
