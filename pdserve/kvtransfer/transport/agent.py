"""What sender and receiver need from a transport: one-sided reads between registered memories.

Implemented by `nixl_agent.NixlAgent` (processes, hosts, GPUs) and `local_agent.LocalAgent` (one
process, faults on demand), so the ticket, lease, deadline and quarantine logic exists once, in
`p2p/sender.py` and `p2p/rank_receiver.py`. Knows no blocks of requests. An agent is shared by one
sender and one receiver; each attaches, and the last to detach closes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

Reason = Literal["peer-lost", "error"]


class TransferError(Exception):
    """A transport call failed. reason "peer-lost": the other side is gone; "error": anything else.
    The text is the detail."""

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
"""A transport's own form of Descriptors, made once and used by many reads."""

Handle = Any
"""One read. It must be kept until `check` said True or raised: freeing it earlier does not stop the
bytes."""


class TransferAgent(Protocol):
    """Every method may be called from any thread; every one may raise TransferError."""

    name: str
    kind: str

    @property
    def metadata(self) -> bytes:
        """What a peer's `add_peer` takes."""
        ...

    def register(self, tensor: torch.Tensor) -> Any:
        """Make contiguous memory readable by peers and a destination of our reads; returns what
        `deregister` takes."""
        ...

    def deregister(self, registration: Any) -> None: ...

    def add_peer(self, metadata: bytes) -> str:
        """The peer's name. It must not be known already."""
        ...

    def remove_peer(self, name: str) -> None:
        """Forget the peer. All that was prepared for it must be released before. Reads in flight go
        on: see `sever`."""
        ...

    def sever(self, peer: str) -> int:
        """Cut the connections to a known peer: reads in flight from it raise soon, and nothing
        lands after. For a peer that answers no more: `remove_peer` and `release` stop no byte. How
        many were cut; 0 also where the transport has none (reads by shared memory or CMA end by
        themselves)."""
        ...

    def prepare(self, peer: str | None, descriptors: Descriptors) -> Prepared:
        """peer None: our own memory."""
        ...

    def release_prepared(self, prepared: Prepared) -> None: ...

    def make_read(
        self,
        local: Prepared,
        local_ids: Sequence[int] | np.ndarray,
        remote: Prepared,
        remote_ids: Sequence[int] | np.ndarray,
    ) -> Handle:
        """A read of the remote pieces into the local ones, pairwise; neighbours on both sides are
        merged."""
        ...

    def post(self, handle: Handle) -> bool:
        """Start the read; True when it is complete already. May copy everything before it returns
        (CMA does)."""
        ...

    def check(self, handle: Handle) -> bool:
        """True when complete."""
        ...

    def release(self, handle: Handle) -> None:
        """Only after the read ended, by completion or by an exception."""
        ...

    def transport_mark(self) -> int: ...

    def transport_since(self, mark: int, memory: str) -> str:
        """The transport that reads into `memory` use, judged by what happened since
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
    """`("DRAM" | "VRAM", device id)` as NIXL names them."""
    return ("VRAM", tensor.get_device()) if tensor.is_cuda else ("DRAM", 0)
