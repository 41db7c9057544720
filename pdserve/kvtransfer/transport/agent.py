"""The interface of a transport for sender and receiver: one-sided reads between registered
memories.

Implemented by `nixl_agent.NixlAgent` (processes, hosts, GPUs) and `local_agent.LocalAgent` (one
process, faults on demand). So tickets, leases, deadlines and quarantine are written once, in
`p2p/sender.py` and `p2p/rank_receiver.py`. Knows no blocks of requests. One sender and one receiver
share an agent; each attaches, and the last to detach closes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

Reason = Literal["peer-lost", "error"]


class TransferError(Exception):
    """A transport call failed. reason: "peer-lost" if the other side is gone, else "error". The
    text is the detail."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Descriptors:
    """`count` pieces of `num_bytes` bytes; piece i starts at `address + i * stride`. memory: "DRAM"
    or "VRAM"."""

    address: int
    num_bytes: int
    stride: int
    count: int
    memory: str = "DRAM"
    device_id: int = 0


Prepared = Any
"""A transport's own form of Descriptors; it is made once and used by many reads."""

Handle = Any
"""One read. Keep it until `check` has returned True or raised: freeing it earlier does not stop the
bytes."""


class TransferAgent(Protocol):
    """Moves bytes. Every method may be called from any thread, and may raise TransferError."""

    name: str
    kind: str

    @property
    def metadata(self) -> bytes:
        """The bytes that a peer's `add_peer` takes."""
        ...

    def register(self, tensor: torch.Tensor) -> Any:
        """Make contiguous memory readable by peers, and a destination of our reads. Returns the
        argument for `deregister`."""
        ...

    def deregister(self, registration: Any) -> None: ...

    def add_peer(self, metadata: bytes) -> str:
        """Add a peer that is not known yet. Returns its name."""
        ...

    def remove_peer(self, name: str) -> None:
        """Forget the peer. Everything that was prepared for it must be released before. Reads in
        flight continue: see `sever`."""
        ...

    def sever(self, peer: str) -> int:
        """Cut the connections to a known peer. Reads in flight from it raise soon, and nothing
        lands afterwards. Use it for a peer that no longer answers, because `remove_peer` and
        `release` stop no byte. Returns how many were cut. That is 0 if the transport has none:
        reads by shared memory or CMA end by themselves."""
        ...

    def prepare(self, peer: str | None, descriptors: Descriptors) -> Prepared:
        """Prepare descriptors of a peer; peer None means our own memory."""
        ...

    def release_prepared(self, prepared: Prepared) -> None: ...

    def make_read(
        self,
        local: Prepared,
        local_ids: Sequence[int] | np.ndarray,
        remote: Prepared,
        remote_ids: Sequence[int] | np.ndarray,
    ) -> Handle:
        """Make a read of the remote pieces into the local ones, pairwise. Neighbours on both sides
        are merged."""
        ...

    def post(self, handle: Handle) -> bool:
        """Start the read. Returns True if it is already complete. May copy everything before it
        returns (CMA does)."""
        ...

    def check(self, handle: Handle) -> bool:
        """True if the read is complete."""
        ...

    def release(self, handle: Handle) -> None:
        """Release a read. Call it only after the read has ended, well or with an exception."""
        ...

    def transport_mark(self) -> int: ...

    def transport_since(self, mark: int, memory: str) -> str:
        """The transport that reads into `memory` use, judged by what has happened since
        `transport_mark`."""
        ...

    def attach(self) -> None: ...

    def detach(self) -> None: ...


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory as uint8 `[num_bytes]`; ValueError unless it is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(
            "memory to register must be one contiguous tensor: take it whole and unsliced"
        )
    return tensor.view(-1).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> tuple[str, int]:
    """Returns `("DRAM" | "VRAM", device id)`, NIXL's names."""
    return ("VRAM", tensor.get_device()) if tensor.is_cuda else ("DRAM", 0)
