"""Packs what a step sends to the device: small integer arrays, in one copy.

They are built from the plan on the host, after the engine has advanced its sequences' counts.
Tokens that a step in flight still samples are not known here. Their rows carry -1, and the device
takes the newest token of the slot. Knows no model. Packed by the planner, unpacked by the model
runner.
"""

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.step_plan import HomePlan
from pdserve.engine.stepping.executor import Padding
from pdserve.engine.stepping.work import StepShape

ALIGNMENT = 4  # int32s; Triton compiles a kernel anew for pointers that are not 16-byte aligned


A = TypeVar("A", np.ndarray, Tensor)


@dataclass(frozen=True)
class Arrays(Generic[A]):
    """The int32 arrays of a step; A is np.ndarray on the host, Tensor on the device.

    Rows are in this order: decodes (sequences with one row), prefill chunks, padding.
    """

    ids: A  # [rows]; -1 means the newest token of the slot
    positions: A  # [rows], each in its sequence
    slots: A  # [rows], slot of the row's sequence; 0 for padding
    table_rows: A  # [sequences], slot
    context_lens: A  # [sequences], KV length including this step's rows
    query_starts: A  # [prefills + 1], offsets into the prefill rows


@dataclass(frozen=True)
class StepInputs:
    """The packed inputs of a step, and what the host must know of them."""

    packed: np.ndarray  # the step's `Arrays`
    lengths: tuple[int, ...]  # lengths of these arrays (see `unpack`)
    first_row: dict[Sequence, int]  # where each sequence's rows begin
    shape: StepShape


def step_inputs(plan: HomePlan, padding: Padding, block_size: int) -> StepInputs:
    """Make the inputs of a home whose sequences have already advanced by the plan.

    Padding rows have slot 0 and write to the null block. Padding sequences have no context; only a
    step of decodes has them. A home that has nothing to do decodes such sequences.
    """
    decodes = [seq for seq, chunk in plan.chunks.items() if chunk.num_rows == 1]
    prefills = [(seq, chunk.num_rows) for seq, chunk in plan.chunks.items() if chunk.num_rows > 1]
    num_decodes = len(decodes)
    counts = [count for _, count in prefills]
    starts = list(itertools.accumulate(counts, initial=0))
    num_rows = num_decodes + starts[-1]

    num_sequences = padding.num_sequences
    lengths = (*(padding.num_rows,) * 3, num_sequences, num_sequences, len(starts))
    packed = blank(lengths)
    arrays = unpack(packed, lengths)

    contexts = [seq.num_computed for seq in decodes]
    arrays.ids[:num_decodes] = [_last_input(seq) for seq in decodes]
    arrays.slots[:num_decodes] = arrays.table_rows[:num_decodes] = [seq.slot for seq in decodes]
    arrays.context_lens[:num_decodes] = contexts
    arrays.positions[:num_decodes] = arrays.context_lens[:num_decodes] - 1
    for i, (seq, count) in enumerate(prefills):
        end = seq.num_computed
        rows = slice(num_decodes + starts[i], num_decodes + starts[i + 1])
        arrays.ids[rows] = _inputs(seq, end - count, end)
        arrays.positions[rows] = np.arange(end - count, end, dtype=np.int32)
        arrays.slots[rows] = arrays.table_rows[num_decodes + i] = seq.slot
        arrays.context_lens[num_decodes + i] = end
    if more := padding.num_rows - num_rows:
        arrays.positions[num_rows:] = np.arange(more, dtype=np.int32) % block_size
    arrays.query_starts[:] = starts

    first_row = {seq: row for row, seq in enumerate(decodes)}
    first_row |= {seq: num_decodes + starts[i] for i, (seq, _) in enumerate(prefills)}
    return StepInputs(
        packed=packed,
        lengths=lengths,
        first_row=first_row,
        shape=StepShape(
            num_decodes=num_decodes if plan.chunks else num_sequences,
            max_decode_context=max(contexts, default=0 if plan.chunks else 1),
            chunks=tuple((seq.num_computed - count, count) for seq, count in prefills),
        ),
    )


def table_changes(seqs: Iterable[Sequence]) -> np.ndarray | None:
    """Returns int32 `[3, N]`: slot, index and block of each block table entry that the device does
    not know yet. Marks them as known.
    """
    slots: list[int] = []
    indices: list[int] = []
    blocks: list[int] = []
    for seq in seqs:
        num_blocks = len(seq.block_table)
        if seq.num_synced < num_blocks:
            slots += [seq.slot] * (num_blocks - seq.num_synced)
            indices += range(seq.num_synced, num_blocks)
            blocks += seq.block_table[seq.num_synced :]
            seq.num_synced = num_blocks
    return np.array([slots, indices, blocks], dtype=np.int32) if slots else None


def blank(lengths: SequenceOf[int]) -> np.ndarray:
    """Make zeros for arrays of these lengths, for `unpack`."""
    return np.zeros(sum(map(_aligned, lengths)), dtype=np.int32)


def unpack(packed: A, lengths: SequenceOf[int]) -> Arrays[A]:
    """Views of one packed array, each at an aligned offset. lengths: of the views, in order."""
    views = []
    offset = 0
    for length in lengths:
        views.append(packed[offset : offset + length])
        offset += _aligned(length)
    return Arrays(*views)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device through pinned memory, without waiting. PyTorch keeps the pinned piece
    until it is read.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _last_input(seq: Sequence) -> int:
    return seq.token_ids[seq.num_computed - 1] if seq.num_computed <= len(seq.token_ids) else -1


def _inputs(seq: Sequence, start: int, end: int) -> list[int]:
    known = seq.token_ids[start:end]
    return known if len(known) == end - start else [*known, -1]


def _aligned(length: int) -> int:
    return length + -length % ALIGNMENT
