"""Descriptor arithmetic: which byte ranges, and which rows, of which peer's blocks fill ours. Pure;
touches no memory and no transport.

A block is contiguous and its KV heads are its outermost axis (configs/kv_layout.py), so any run of
heads is one range: `HeadRange`. With equal tensor parallelism there is one range, the whole block;
with unequal, one per peer rank that holds some of our heads. Called by `connection.py` and
`link/link_pulls.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pdserve.configs.kv_layout import KVLayout
from pdserve.kvtransfer.transport.agent import Descriptors
from pdserve.protocol.handoff import RankMemory


@dataclass(frozen=True)
class BlockSizes:
    """Tokens of our blocks and of a peer's, powers of two. Both sides count a prompt's blocks from
    its first token."""

    ours: int
    theirs: int

    @property
    def step(self) -> int:
        """So many of theirs end where one of ours ends."""
        return max(1, self.ours // self.theirs)

    def cover(self, first: int, last: int) -> tuple[int, int]:
        """`(first, last)` of theirs that hold the rows of ours from `first` to before `last`."""
        return first * self.ours // self.theirs, -(-last * self.ours // self.theirs)

    def filled(self, count: int) -> int:
        """How many of ours the first `count` of theirs fill."""
        return count * self.theirs // self.ours


@dataclass(frozen=True)
class HeadRange:
    """Bytes `[local_offset, +num_bytes)` of each of our blocks come from `[remote_offset,
    +num_bytes)` of rank `rank`'s."""

    rank: int
    local_offset: int
    remote_offset: int
    num_bytes: int


def plan_heads(
    local_heads: Sequence[int], remote_heads: Sequence[Sequence[int]], head_bytes: int
) -> list[HeadRange]:
    """Ranges that cover all local heads once, in order, each as long as one peer rank allows.

    remote_heads: the global head ids each peer rank stores, in storage order; replicas are allowed,
    any one is read. ValueError when a head is stored nowhere.
    """
    plan: list[HeadRange] = []
    done = 0
    while done < len(local_heads):
        rank, first, length = _longest_run(local_heads[done:], remote_heads)
        if length == 0:
            raise ValueError(
                f"KV head {local_heads[done]} is stored on no rank of the peer "
                f"({list(remote_heads)})"
            )
        plan.append(HeadRange(rank, done * head_bytes, first * head_bytes, length * head_bytes))
        done += length
    return plan


def _longest_run(
    heads: Sequence[int], remote_heads: Sequence[Sequence[int]]
) -> tuple[int, int, int]:
    """`(rank, first index there, length)` of the longest run that starts with heads[0]; length 0 if
    none does."""
    best = (0, 0, 0)
    for rank, stored in enumerate(remote_heads):
        if heads[0] not in stored:
            continue
        first = list(stored).index(heads[0])
        length = 0
        while (
            length < min(len(heads), len(stored) - first)
            and stored[first + length] == heads[length]
        ):
            length += 1
        best = max(best, (rank, first, length), key=lambda found: found[2])
    return best


def plan_for(layout: KVLayout, ranks: Sequence[RankMemory]) -> list[HeadRange]:
    """`plan_heads` for one of our ranks. ValueError when a peer rank stores other layers together,
    or a head takes another number of bytes there."""
    ours = layout.group
    for there in ranks:
        stored = [group.layers for group in there.groups]
        if stored != [ours.layers]:
            raise ValueError(
                f"the peer stores layers in groups {stored}, not as {ours.layers}: only equal ones "
                "can be pulled"
            )
    theirs = [there.groups[0] for there in ranks]
    for group in theirs:
        if group.head_bytes != layout.head_bytes:
            raise ValueError(
                f"KV head bytes differ: ours {layout.head_bytes}, the peer's {group.head_bytes}"
            )
    plan = plan_heads(ours.heads, [group.heads for group in theirs], layout.head_bytes)
    return [
        replace(span, remote_offset=theirs[span.rank].offset + span.remote_offset) for span in plan
    ]


def local_descriptors(
    address: int, block_bytes: int, num_blocks: int, span: HeadRange, memory: str, device_id: int
) -> Descriptors:
    """The part of each of our blocks that `span` fills, one piece a block."""
    return Descriptors(
        address + span.local_offset, span.num_bytes, block_bytes, num_blocks, memory, device_id
    )


def remote_descriptors(
    there: RankMemory, block_bytes: int, num_blocks: int, span: HeadRange
) -> Descriptors:
    """The part of each of the peer's blocks that `span` reads. block_bytes: of the *peer's*
    block."""
    return Descriptors(
        there.address + span.remote_offset,
        span.num_bytes,
        block_bytes,
        num_blocks,
        there.memory,
        there.device_id,
    )


def order_pairs(
    local_ids: Sequence[int] | np.ndarray, remote_ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Both lists as int32, pairs kept, sorted by remote id so that neighbours meet and merge."""
    local = np.asarray(local_ids, np.int32)
    remote = np.asarray(remote_ids, np.int32)
    order = np.argsort(remote, kind="stable")
    return local[order], remote[order]


def count_descriptors(local_ids: np.ndarray, remote_ids: np.ndarray, whole_blocks: bool) -> int:
    """Descriptors left after merging pairs that are neighbours on both sides; parts of blocks are
    never neighbours."""
    if len(local_ids) == 0:
        return 0
    if not whole_blocks:
        return len(local_ids)
    breaks = (np.diff(local_ids) != 1) | (np.diff(remote_ids) != 1)
    return 1 + int(np.count_nonzero(breaks))
