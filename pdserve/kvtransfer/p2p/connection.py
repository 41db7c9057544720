"""Prepares what one connected peer needs: descriptors and scratch memory. If the peer's blocks have
another size than ours, or its rows another dtype, it also uses the staging ring. It also checks
whether the peer's KV cache can be pulled at all.

The thread of a `link.peer_link.PeerLink` makes and closes it, and posts the reads. Nothing here
reads or waits.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pdserve.configs.kv_layout import KVLayout
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.kvtransfer.connector import KVCacheMemory
from pdserve.kvtransfer.p2p.ranges import (
    BlockRange,
    local_descriptors,
    plan_for,
    remote_descriptors,
)
from pdserve.kvtransfer.p2p.staging import Staging, StagingRing
from pdserve.kvtransfer.transport.agent import Descriptors, TransferAgent, TransferError, memory_of
from pdserve.protocol.handoff import KVCacheMeta

logger = logging.getLogger(__name__)

PROBE_BYTES = 4 << 20
GENERATION_BYTES = 8


@dataclass(frozen=True)
class RankSource:
    """The source of a part of each block.

    - local: descriptors of that part of all our blocks, or of blocks of the staging ring.
    - remote: descriptors of it in all blocks of one peer rank.
    """

    span: BlockRange
    local: Any
    remote: Any


@dataclass(frozen=True)
class HomeSource:
    """The parts that are read of each block of one of the peer's homes. whole_blocks: neighbouring
    blocks are neighbouring bytes on both sides."""

    parts: tuple[RankSource, ...]
    whole_blocks: bool

    @property
    def num_bytes(self) -> int:
        return sum(part.span.num_bytes for part in self.parts)


@dataclass
class OwnKVCache:
    """Our side of every link: the registered KV cache, and the staging ring before it. rank: this
    process's rank in the engine."""

    memory: KVCacheMemory
    ring: StagingRing
    rank: int = 0

    @property
    def kv_cache(self) -> KVCache:
        return self.memory.kv_cache

    @property
    def layout(self) -> KVLayout:
        return self.memory.kv_cache.layout

    def layout_as(self, meta: KVCacheMeta) -> KVLayout:
        """Our rows as the peer stores them, with its block size and its dtype."""
        layout = self.layout.with_block_size(meta.block_size)
        dtype = self.memory.unrounded.get(meta.rows)
        return layout if dtype is None else layout.with_dtype(dtype)


class Connection:
    """Everything that is prepared for one connected peer, and the memory for its generations and
    self-test bytes. homes: of the peer. generations: int64 `[homes, num_blocks]`.

    The scratch memory belongs to this connection alone, so a late read of an older connection
    cannot overwrite what is compared.
    """

    def __init__(
        self, agent: TransferAgent, own: OwnKVCache, meta: KVCacheMeta, wake: Callable[[], None]
    ) -> None:
        """Prepare everything. TransferError if that fails. wake: see `StagingRing.open`."""
        self.meta = meta
        self._agent = agent
        self.memory, device_id = memory_of(own.kv_cache.data)
        layout = own.layout_as(meta)
        self.block_bytes = layout.block_bytes
        self.staging: Staging | None = None
        self._peers: dict[int, str] = {}
        self._local: dict[Descriptors, Any] = {}
        self._prepared: list[Any] = []
        self._registrations: list[Any] = []
        try:
            if layout != own.layout:
                self.staging = own.ring.open(layout, wake)
            into = own.kv_cache if self.staging is None else self.staging.ring_blocks
            self.peer = self._add_rank(0)  # holds the generations
            self.homes = tuple(
                self._home_source(plan_for(layout, meta, own.rank, home), into, device_id)
                for home in range(meta.num_homes)
            )
            self.generations = torch.full((meta.num_homes, meta.num_blocks), -1, dtype=torch.int64)
            self._register(self.generations)
            least = min(meta.ranks[rank].block_bytes for rank in self._peers)
            self.probe_bytes = min(PROBE_BYTES, meta.num_blocks * least)
            probe = torch.empty(self.probe_bytes, dtype=torch.uint8, device=own.kv_cache.device)
            self._register(probe)
            self._probe = probe  # keeps the memory
            whole = Descriptors(
                probe.data_ptr(), self.probe_bytes, self.probe_bytes, 1, self.memory, device_id
            )
            self.probe_local = self._prepare(None, whole)
            self.probes = [
                self._prepare(peer, self._probe_descriptors(rank))
                for rank, peer in self._peers.items()
            ]
        except (TransferError, torch.OutOfMemoryError) as error:
            self.close()
            raise TransferError("error", f"connect: {error}") from error

    def _home_source(self, plan: list[BlockRange], into: KVCache, device_id: int) -> HomeSource:
        parts = []
        for span in plan:
            peer = self._add_rank(span.rank)
            here = local_descriptors(
                into.data.data_ptr(),
                self.block_bytes,
                into.num_blocks,
                span,
                self.memory,
                device_id,
            )
            # homes of a peer are alike, so most of them fill the same parts of our blocks
            if here not in self._local:
                self._local[here] = self._prepare(None, here)
            there = remote_descriptors(self.meta.ranks[span.rank], self.meta.num_blocks, span)
            parts.append(RankSource(span, self._local[here], self._prepare(peer, there)))
        whole = len(plan) == 1 and (
            plan[0].num_bytes == self.block_bytes == self.meta.ranks[plan[0].rank].block_bytes
        )
        return HomeSource(tuple(parts), whole)

    def _add_rank(self, rank: int) -> str:
        if rank not in self._peers:
            self._peers[rank] = self._agent.add_peer(self.meta.ranks[rank].agent_metadata)
        return self._peers[rank]

    def _probe_descriptors(self, rank: int) -> Descriptors:
        there = self.meta.ranks[rank]
        return Descriptors(
            there.address, self.probe_bytes, self.probe_bytes, 1, there.memory, there.device_id
        )

    def _prepare(self, peer: str | None, descriptors: Descriptors) -> Any:
        prepared = self._agent.prepare(peer, descriptors)
        self._prepared.append(prepared)
        return prepared

    def _register(self, tensor: torch.Tensor) -> None:
        self._registrations.append(self._agent.register(tensor))

    def prepare_generations(self, first: int, last: int) -> tuple[Any, Any]:
        """Prepare our and the peer's generation entries of the blocks first..last, one piece per
        home. The caller must release them."""
        offset = first * GENERATION_BYTES
        size = (last - first + 1) * GENERATION_BYTES
        rows = size, self.meta.num_blocks * GENERATION_BYTES, self.meta.num_homes
        here = Descriptors(self.generations.data_ptr() + offset, *rows)
        there = Descriptors(self.meta.generation_address + offset, *rows)
        return self._agent.prepare(None, here), self._agent.prepare(self.peer, there)

    def sever(self) -> None:
        """Sever all ranks of the peer; see `TransferAgent.sever`."""
        for peer in self._peers.values():
            self._agent.sever(peer)

    def close(self) -> None:
        """Release everything. Every read must have ended. Afterwards no repack runs."""
        if self.staging is not None:
            self.staging.close()
        steps: list[Callable[[], None]] = [
            partial(self._agent.release_prepared, prepared) for prepared in self._prepared
        ]
        steps += [partial(self._agent.remove_peer, peer) for peer in self._peers.values()]
        steps += [
            partial(self._agent.deregister, registration) for registration in self._registrations
        ]
        release_all(steps)


def release_all(steps: list[Callable[[], None]]) -> None:
    """Try every step. What belongs to a dead peer may fail to be released; then the transport keeps
    it."""
    for step in steps:
        try:
            step()
        except TransferError as error:
            logger.warning("KV transfer clean-up: %s", error)


def check_compatible(own: OwnKVCache, kind: str, meta: KVCacheMeta) -> str:
    """Returns why no pull from this KV cache can ever work, naming both sides; "" if it can."""
    if meta.connector != kind:
        return f"connector mismatch: ours is {kind!r}, the peer's {meta.connector!r}"
    memory = own.memory
    for what, ours, theirs, is_taken in (
        ("model", memory.model_fingerprint, meta.model, False),
        ("KV dtype", memory.rows_digest, meta.rows, meta.rows in memory.unrounded),
    ):
        if theirs != ours and not is_taken:
            digests = f"ours has digest {ours}, the peer's {theirs}"
            return f"KV caches are not compatible (another {what}): {digests}"
    try:
        for home in range(meta.num_homes):
            plan_for(own.layout_as(meta), meta, home=home)
    except ValueError as error:
        return str(error)
    return ""
