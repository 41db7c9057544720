"""Descriptor arithmetic: which byte ranges, and which rows, of which peer's blocks fill ours. Pure;
touches no memory and no transport.

Inside a block, KV heads follow each other, and inside a head, its layers (configs/kv_layout.py). So
two ranks share a few runs of bytes, each a `BlockRange`. Equal ranks share one, the whole block.
With other tensor parallelism or stages there is one per peer rank and group of layers, since the
layers of a peer's stage are a group. (Where they are not, there is one per head of ours.) Called by
`connection.py` and `link/link_pulls.py`.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pdserve.configs.kv_layout import KVLayout
from pdserve.kvtransfer.transport.agent import Descriptors
from pdserve.protocol.handoff import GroupMemory, KVCacheMeta, RankMemory


@dataclass(frozen=True)
class BlockSizes:
    """Tokens per block, here and at a peer; powers of two. Both sides count a prompt's blocks from
    its first token."""

    ours: int
    theirs: int

    @property
    def step(self) -> int:
        """Number of the peer's blocks after which both sides have the end of a block."""
        return max(1, self.ours // self.theirs)

    def cover(self, first: int, last: int) -> tuple[int, int]:
        """The peer's blocks `(first, last)` that hold the rows of ours from first to before
        last."""
        return first * self.ours // self.theirs, -(-last * self.ours // self.theirs)

    def filled(self, count: int) -> int:
        """Number of our blocks that the peer's first `count` blocks fill."""
        return count * self.theirs // self.ours


@dataclass(frozen=True)
class BlockRange:
    """Bytes `[local_offset, +num_bytes)` of each of our blocks, which come from `[remote_offset,
    +num_bytes)` of a block of peer rank `rank`."""

    rank: int
    local_offset: int
    remote_offset: int
    num_bytes: int


@dataclass(frozen=True)
class _Cell:
    """The bytes of one KV head in one layer within a block; both by global id."""

    layer: int
    head: int
    offset: int
    num_bytes: int


def plan_for(
    layout: KVLayout, meta: KVCacheMeta, own_rank: int = 0, home: int = 0
) -> list[BlockRange]:
    """Ranges that cover all KV of one of our blocks once, in order. Each is as long as one peer
    rank allows. layout: of our rank, with the peer's block size. home: the peer's home that is
    read.

    Several peer ranks may store the same (head, layer). Then it is read from one of them, and our
    ranks, over all our homes, take them in turns. ValueError if none stores it, or if it has
    another number of bytes there.
    """
    ours = _cells(groups_of(layout))
    theirs = {
        index: {(cell.layer, cell.head): cell for cell in _cells(rank.groups)}
        for index, rank in enumerate(meta.ranks)
        if rank.home == home
    }
    plan: list[BlockRange] = []
    done = 0
    while done < len(ours):
        first = ours[done]
        lengths = {rank: _run_length(ours[done:], stored) for rank, stored in theirs.items()}
        length = max(lengths.values(), default=0)
        if not length:
            raise ValueError(_refusal(first, list(theirs.values()), home))
        able = [rank for rank, found in lengths.items() if found == length]
        rank = able[own_rank % len(able)]
        last = ours[done + length - 1]
        start = theirs[rank][first.layer, first.head].offset
        plan.append(
            BlockRange(rank, first.offset, start, last.offset + last.num_bytes - first.offset)
        )
        done += length
    only = plan[0]
    is_whole = len(plan) == 1 and only.remote_offset == 0
    if is_whole and meta.ranks[only.rank].block_bytes == layout.block_bytes:
        return [replace(only, num_bytes=layout.block_bytes)]  # includes the block's padding
    return plan


def groups_of(layout: KVLayout) -> tuple[GroupMemory, ...]:
    """The groups, as a rank with this layout describes them to its peers."""
    return tuple(
        GroupMemory(group.layers, group.heads, offset, head_bytes)
        for group, offset, head_bytes in zip(
            layout.groups, layout.offsets, layout.head_bytes, strict=True
        )
    )


def _cells(groups: Sequence[GroupMemory]) -> list[_Cell]:
    """The cells of all groups, in their order."""
    cells = []
    for group in groups:
        num_bytes = group.head_bytes // len(group.layers)
        places = itertools.product(group.heads, group.layers)
        cells += [
            _Cell(layer, head, group.offset + index * num_bytes, num_bytes)
            for index, (head, layer) in enumerate(places)
        ]
    return cells


def _run_length(cells: Sequence[_Cell], stored: Mapping[tuple[int, int], _Cell]) -> int:
    """Number of cells, from the first on, that follow each other in a rank's memory, too."""
    distance = None
    for length, cell in enumerate(cells):
        there = stored.get((cell.layer, cell.head))
        if there is None or there.num_bytes != cell.num_bytes:
            return length
        if distance is None:
            distance = there.offset - cell.offset
        if there.offset - cell.offset != distance:
            return length
    return len(cells)


def _refusal(cell: _Cell, stored: Sequence[Mapping[tuple[int, int], _Cell]], home: int) -> str:
    found = [there[cell.layer, cell.head] for there in stored if (cell.layer, cell.head) in there]
    where = f"KV head {cell.head} of layer {cell.layer}"
    if not found:
        return f"{where} is stored on no rank of the peer" + (f"'s home {home}" if home else "")
    return f"{where} takes {cell.num_bytes} bytes of a block here, {found[0].num_bytes} there"


def local_descriptors(
    address: int, block_bytes: int, num_blocks: int, span: BlockRange, memory: str, device_id: int
) -> Descriptors:
    """The part of each of our blocks that `span` fills, one piece per block."""
    return Descriptors(
        address + span.local_offset, span.num_bytes, block_bytes, num_blocks, memory, device_id
    )


def remote_descriptors(there: RankMemory, num_blocks: int, span: BlockRange) -> Descriptors:
    """The part of each of the peer's blocks that `span` reads."""
    return Descriptors(
        there.address + span.remote_offset,
        span.num_bytes,
        there.block_bytes,
        num_blocks,
        there.memory,
        there.device_id,
    )


def order_pairs(
    local_ids: Sequence[int] | np.ndarray, remote_ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Both lists as int32, as pairs sorted by remote id, so that neighbours meet and merge."""
    local = np.asarray(local_ids, np.int32)
    remote = np.asarray(remote_ids, np.int32)
    order = np.argsort(remote, kind="stable")
    return local[order], remote[order]


def count_descriptors(local_ids: np.ndarray, remote_ids: np.ndarray, whole_blocks: bool) -> int:
    """Number of descriptors after merging pairs that are neighbours on both sides. Parts of blocks
    are never neighbours."""
    if len(local_ids) == 0:
        return 0
    if not whole_blocks:
        return len(local_ids)
    breaks = (np.diff(local_ids) != 1) | (np.diff(remote_ids) != 1)
    return 1 + int(np.count_nonzero(breaks))
