"""The NIXL transport: one agent per process, with the UCX backend. Turns NIXL's API, names and
exceptions into `agent.TransferAgent`.

Knows nothing of tickets and blocks. The only importer of nixl; made by `build.py`. Findings about
NIXL 1.5.1 (tried):
- Its Python class sets pthrDelay=0. Then every agent's progress thread spins on a whole core, so
  `_create` sets it. It is the timeout of a poll(2) over UCX's event files: the thread is awake as
  soon as bytes come, whatever the delay. Our own checks progress a read as well. Beside a spinning
  thread they wait for its lock (1 GB over NVLink: 3.9 to 4.9 ms, against 3.4 to 3.8).
- A post over CMA (process_vm_readv) copies everything before it returns. The GIL is free during
  that time, the agent's lock is not.
- Errors are exceptions; names come back as bytes or str.
- NIXL itself merges neighbouring descriptors of one read (its telemetry shows it).
- A child that is forked after an agent exists hangs: start processes by spawn.
- Nothing in NIXL or UCX ends a read in flight: see `tcp_sockets.py`.
"""

import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from pdserve.kvtransfer.transport.agent import (
    Descriptors,
    Reason,
    TransferError,
    flat_bytes,
    memory_of,
)
from pdserve.kvtransfer.transport.tcp_sockets import Address, listening, sever
from pdserve.kvtransfer.transport.ucx_log import OWN_SETTINGS, process_log

logger = logging.getLogger(__name__)

_create_lock = threading.Lock()


def _create(nixl_api: Any, name: str, progress_delay_us: int) -> Any:
    """Make a nixl_agent whose progress thread sleeps for up to `progress_delay_us` between rounds.

    The wrapper class has no argument for it. So the binding that it calls is replaced while it is
    constructed.
    """

    class Binding:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(original, attribute)

        @staticmethod
        def nixlAgent(agent_name: str, config: Any) -> Any:
            config.pthrDelay = progress_delay_us
            return original.nixlAgent(agent_name, config)

    strict = nixl_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    with _create_lock:
        original = nixl_api.nixlBind
        nixl_api.nixlBind = Binding()
        try:
            return nixl_api.nixl_agent(
                name, nixl_api.nixl_agent_config(backends=[], sync_mode=strict)
            )
        finally:
            nixl_api.nixlBind = original


SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
"""Measured: reads of 268 MB over TCP are 1.7 times as fast as with UCX's 8k and 64k
(benchmarks/results/log.md)."""


def ucx_settings(ucx_tls: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """UCX settings that we make. We set segment sizes only if the user sets neither. A process that
    sends larger segments than the other side takes aborts (tried). So the sizes also go into the
    metadata, and `add_peer` refuses others."""
    chosen = {} if any(name in environment for name in SEGMENTS) else dict(SEGMENTS)
    return chosen if ucx_tls is None else {**chosen, "UCX_TLS": ucx_tls}


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    """Describes an agent to its peers.

    - listens: addresses where its UCX takes TCP connections. NIXL's own part has them but does not
      show them.
    - segments: values of SEGMENTS in force; None if UCX chose.
    """

    nixl: bytes
    listens: frozenset[Address]
    segments: tuple[str | None, ...]


class NixlAgent:
    """Implements `agent.TransferAgent`. name: must be new at each start of a process, because a
    peer may still know the old one."""

    kind = "nixl"

    def __init__(self, name: str, *, progress_delay_us: int, ucx_tls: str | None) -> None:
        import nixl

        nixl_api = importlib.import_module(f"{nixl._pkg.__name__}._api")
        self.name = name
        self._log = process_log()
        self._bind = nixl_api.nixlBind
        named = [
            value
            for key, value in vars(self._bind).items()
            if key.startswith("nixl") and key.endswith("Error")
        ]
        self._errors = (*named, RuntimeError)  # RuntimeError stands for any other C++ exception
        self._lost = (self._bind.nixlRemoteDisconnectError, self._bind.nixlBackendError)
        self._users = 0
        self._users_lock = threading.Lock()
        self._peers: dict[str, frozenset[Address]] = {}  # addresses where each of them listens
        with self._translate("create"):
            self._agent: Any = _create(nixl_api, name, progress_delay_us)
            others = listening()
            settings = ucx_settings(ucx_tls, os.environ)
            with self._log.environment(settings):
                in_force = {
                    name: value for name, value in os.environ.items() if name.startswith("UCX_")
                }
                self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
            self._listens = frozenset(listening() - others)
        self._segments = tuple(in_force.get(name) for name in SEGMENTS)
        shown = " ".join(
            f"{name}={value}"
            for name, value in sorted(in_force.items())
            if name not in OWN_SETTINGS
        )
        logger.info("NIXL agent %s: progress delay %d us, %s", name, progress_delay_us, shown)

    @contextmanager
    def _translate(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            reason: Reason = "peer-lost" if isinstance(error, self._lost) else "error"
            raise TransferError(reason, f"{what}: {type(error).__name__}: {error}") from error

    @property
    def metadata(self) -> bytes:
        """The agent's metadata, which describes what is registered so far. Register everything that
        peers read before the first call."""
        return msgspec.msgpack.encode(
            _Metadata(bytes(self._agent.get_agent_metadata()), self._listens, self._segments)
        )

    def register(self, tensor: torch.Tensor) -> Any:
        flat = flat_bytes(tensor)
        memory, device_id = memory_of(tensor)
        with self._translate("register"):
            return self._agent.register_memory(
                [(flat.data_ptr(), flat.numel(), device_id, "")], memory
            )

    def deregister(self, registration: Any) -> None:
        with self._translate("deregister"):
            self._agent.deregister_memory(registration)

    def add_peer(self, metadata: bytes) -> str:
        told = msgspec.msgpack.decode(metadata, type=_Metadata)
        if told.segments != self._segments:
            both = f"ours {self._segments}, the peer's {told.segments}"
            raise TransferError(
                "error", f"{', '.join(SEGMENTS)} differ: {both}; set them alike on all hosts"
            )
        with self._translate("connect"):
            found = self._agent.add_remote_agent(told.nixl)
        name = found.decode() if isinstance(found, bytes) else found
        self._peers[name] = told.listens
        return name

    def remove_peer(self, name: str) -> None:
        self._peers.pop(name, None)
        with self._translate("disconnect"):
            self._agent.remove_remote_agent(name)
        self._log.mark()  # copies UCX's messages about it to our log

    def sever(self, peer: str) -> int:
        count = sever(self._peers[peer])
        logger.warning("NIXL agent %s: cut %d TCP connections to %s", self.name, count, peer)
        return count

    def prepare(self, peer: str | None, descriptors: Descriptors) -> Any:
        row = (
            descriptors.address,
            descriptors.num_bytes,
            descriptors.device_id,
            descriptors.stride,
            descriptors.count,
        )
        with self._translate("prepare"):
            return self._agent.prep_xfer_dlist(
                peer or "NIXL_INIT_AGENT", np.array([row], np.uint64), descriptors.memory
            )

    def release_prepared(self, prepared: Any) -> None:
        with self._translate("release descriptors"):
            prepared.release()

    def make_read(
        self,
        local: Any,
        local_ids: Sequence[int] | np.ndarray,
        remote: Any,
        remote_ids: Sequence[int] | np.ndarray,
    ) -> Any:
        with self._translate("make read"):
            return self._agent.make_prepped_xfer(
                "READ",
                local,
                np.asarray(local_ids, np.int32),
                remote,
                np.asarray(remote_ids, np.int32),
            )

    def post(self, handle: Any) -> bool:
        return self._state("post", self._agent.transfer, handle)

    def check(self, handle: Any) -> bool:
        return self._state("read", self._agent.check_xfer_state, handle)

    def _state(self, what: str, call: Callable[[Any], str], handle: Any) -> bool:
        with self._translate(what):
            state = call(handle)
        if state == "ERR":
            raise TransferError("peer-lost", f"{what}: state ERR")
        return state == "DONE"

    def release(self, handle: Any) -> None:
        with self._translate("release read"):
            handle.release()

    def transport_mark(self) -> int:
        return self._log.mark()

    def transport_since(self, mark: int, memory: str) -> str:
        return self._log.transport_since(mark, memory)

    def attach(self) -> None:
        with self._users_lock:
            self._users += 1

    def detach(self) -> None:
        """Remove a user. The last one frees NIXL's agent: its progress thread ends, and its
        registrations go."""
        with self._users_lock:
            self._users -= 1
            if self._users == 0:
                self._agent = None
