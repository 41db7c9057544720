"""The in-process transport. Peers are other LocalAgents of the same process, found by name; a read
is a torch copy.

It is for setups of one process and for tests. Tests can make an agent slow, frozen or dead
(`LocalFaults`), and so drive every branch of `p2p/rank_receiver.py`. A read from a frozen agent
stays in flight, and its bytes land after the thaw, as over NIXL.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pdserve.kvtransfer.transport.agent import Descriptors, TransferError, flat_bytes

_agents: dict[str, "LocalAgent"] = {}
_agents_lock = threading.Lock()


@dataclass
class LocalFaults:
    """Faults that an agent's readers see. delay_s: seconds that each read takes. frozen: no read
    completes. dead: all reads fail."""

    delay_s: float = 0.0
    frozen: bool = False
    dead: bool = False


@dataclass
class _View:
    """Descriptors of one registered memory. flat: uint8. offset: of descriptor 0 in flat."""

    flat: torch.Tensor
    offset: int
    descriptors: Descriptors
    owner: "LocalAgent"

    def piece(self, index: int) -> torch.Tensor:
        start = self.offset + index * self.descriptors.stride
        return self.flat[start : start + self.descriptors.num_bytes]


@dataclass(eq=False)
class _Read:
    local: _View
    remote: _View
    pairs: list[tuple[int, int]]
    ready_at: float = 0.0
    done: bool = False
    severed: bool = False


@dataclass(eq=False)
class LocalAgent:
    """Implements `agent.TransferAgent`."""

    name: str
    faults: LocalFaults = field(default_factory=LocalFaults)
    kind: str = "local"

    def __post_init__(self) -> None:
        self._regions: list[torch.Tensor] = []
        self._peers: set[str] = set()
        self._in_flight: list[_Read] = []
        self._lock = threading.Lock()
        self._users = 0
        with _agents_lock:
            if self.name in _agents:
                raise ValueError(
                    f"agent {self.name!r} already exists in this process: use a new incarnation"
                )
            _agents[self.name] = self

    @property
    def metadata(self) -> bytes:
        return self.name.encode()

    def register(self, tensor: torch.Tensor) -> Any:
        flat = flat_bytes(tensor)
        with self._lock:
            self._regions.append(flat)
        return flat

    def deregister(self, registration: Any) -> None:
        with self._lock:
            self._regions = [region for region in self._regions if region is not registration]

    def add_peer(self, metadata: bytes) -> str:
        name = metadata.decode()
        if name in self._peers:
            raise TransferError("error", f"connect: {name} is already connected")
        self._peer(name)
        self._peers.add(name)
        return name

    def remove_peer(self, name: str) -> None:
        self._peers.discard(name)

    def sever(self, peer: str) -> int:
        reads = [read for read in self._in_flight if read.remote.owner.name == peer]
        for read in reads:
            read.severed = True
        return len(reads)

    def prepare(self, peer: str | None, descriptors: Descriptors) -> _View:
        owner = self if peer is None else self._peer(peer)
        end = (
            descriptors.address
            + (descriptors.count - 1) * descriptors.stride
            + descriptors.num_bytes
        )
        with owner._lock:
            for flat in owner._regions:
                if flat.data_ptr() <= descriptors.address and end <= flat.data_ptr() + flat.numel():
                    return _View(flat, descriptors.address - flat.data_ptr(), descriptors, owner)
        raise TransferError("error", "prepare: the descriptors lie outside the registered memory")

    def release_prepared(self, prepared: _View) -> None:
        pass

    def make_read(
        self,
        local: _View,
        local_ids: Sequence[int] | np.ndarray,
        remote: _View,
        remote_ids: Sequence[int] | np.ndarray,
    ) -> _Read:
        return _Read(
            local, remote, [(int(a), int(b)) for a, b in zip(local_ids, remote_ids, strict=True)]
        )

    def post(self, handle: _Read) -> bool:
        handle.ready_at = time.monotonic() + handle.remote.owner.faults.delay_s
        self._in_flight = [
            read for read in self._in_flight if not read.done and not read.severed
        ] + [handle]
        return self.check(handle)

    def check(self, handle: _Read) -> bool:
        faults = handle.remote.owner.faults
        if faults.dead or handle.severed:
            raise TransferError("peer-lost", f"read: {handle.remote.owner.name} is gone")
        if handle.done:
            return True
        if faults.frozen or time.monotonic() < handle.ready_at:
            return False
        for a, b in handle.pairs:
            handle.local.piece(a).copy_(handle.remote.piece(b))
        if handle.local.flat.is_cuda:
            torch.cuda.current_stream(handle.local.flat.device).synchronize()
        handle.done = True
        return True

    def release(self, handle: _Read) -> None:
        pass

    def transport_mark(self) -> int:
        return 0

    def transport_since(self, mark: int, memory: str) -> str:
        return "local"

    def attach(self) -> None:
        with self._lock:
            self._users += 1

    def detach(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.faults.dead = True
            with _agents_lock:
                _agents.pop(self.name, None)

    def _peer(self, name: str) -> "LocalAgent":
        with _agents_lock:
            agent = _agents.get(name)
        if agent is None or agent.faults.dead:
            raise TransferError("peer-lost", f"{name} does not answer")
        return agent
