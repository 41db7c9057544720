"""Compares the arrays that a step sends to the device with rows built one by one."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.scheduling.sequence import Request, Sequence
from pdserve.engine.scheduling.step_plan import Chunk, HomePlan
from pdserve.engine.stepping.executor import Padding
from pdserve.engine.stepping.packing import (
    ALIGNMENT,
    Arrays,
    StepInputs,
    blank,
    step_inputs,
    table_changes,
    unpack,
)
from pdserve.engine.stepping.work import StepShape
from pdserve.kernels.batch.reference import gather_inputs, update_tables
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

BLOCK_SIZE = 4
NUM_SLOTS = 12
MAX_BLOCKS = 16


def advanced(
    slot: int, before: int, count: int, num_left: int = 0, num_pending: int = 0
) -> Sequence:
    """A sequence with `before` computed rows that has advanced by `count`. num_left: tokens behind
    those; num_pending: of all its tokens, the last ones whose values are in flight.
    """
    num_known = before + count + num_left - num_pending
    tokens = [100 * slot + i for i in range(num_known)]
    request = Request(
        RequestKey("test", 0, str(slot)), tuple(tokens), SamplingParams(seed=0), 9, frozenset()
    )
    seq = Sequence(
        request, 0, tokens, num_pending=num_pending, num_computed=before + count, slot=slot
    )
    seq.block_table = [20 * slot + i for i in range(-(-(before + count) // BLOCK_SIZE))]
    return seq


@st.composite
def plans(draw: st.DrawFn) -> HomePlan:
    """Decodes and chunks in any order, fresh and continued, with and without a token in flight."""
    slots = draw(st.lists(st.integers(1, NUM_SLOTS), min_size=1, max_size=6, unique=True))
    plan = HomePlan()
    for slot in slots:
        before = draw(st.integers(0, 30))
        count = draw(st.sampled_from([1, 1, 2, 3, 7, 20]))
        num_left = draw(st.sampled_from([0, 0, 5]))
        num_pending = draw(st.integers(0, 1)) if before + count + num_left > 1 else 0
        seq = advanced(slot, before, count, num_left, num_pending)
        plan.chunks[seq] = Chunk(count, 0)
    return plan


def counts_of(plan: HomePlan) -> list[tuple[Sequence, int]]:
    return [(seq, chunk.num_rows) for seq, chunk in plan.chunks.items()]


def ordered(plan: HomePlan) -> list[tuple[Sequence, int]]:
    """Decodes before chunks, each in the plan's order."""
    return sorted(counts_of(plan), key=lambda item: item[1] > 1)


def arrays_of(inputs: StepInputs) -> Arrays[np.ndarray]:
    return unpack(inputs.packed, inputs.lengths)


def padded(plan: HomePlan, more_rows: int) -> StepInputs:
    """Steps with chunks have no padding sequences."""
    is_decode = all(chunk.num_rows == 1 for chunk in plan.chunks.values())
    more_seqs = more_rows if is_decode else 0
    padding = Padding(0, plan.num_rows + more_rows, len(plan.chunks) + more_seqs)
    return step_inputs(plan, padding, BLOCK_SIZE)


@given(plans(), st.integers(0, 9))
def test_arrays_are_the_rows_one_by_one(plan: HomePlan, more_rows: int) -> None:
    inputs = padded(plan, more_rows)
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    first_row: dict[Sequence, int] = {}
    for seq, count in ordered(plan):
        first_row[seq] = len(ids)
        for position in range(seq.num_computed - count, seq.num_computed):
            ids.append(seq.token_ids[position] if position < len(seq.token_ids) else -1)
            positions.append(position)
            slots.append(seq.slot)
    num_rows = len(ids)
    arrays = arrays_of(inputs)
    assert arrays.ids.tolist() == ids + [0] * more_rows
    assert arrays.positions[:num_rows].tolist() == positions
    assert arrays.slots.tolist() == slots + [0] * more_rows
    more_seqs = [0] * (len(arrays.table_rows) - len(plan.chunks))
    assert arrays.table_rows.tolist() == [seq.slot for seq, _ in ordered(plan)] + more_seqs
    assert (
        arrays.context_lens.tolist() == [seq.num_computed for seq, _ in ordered(plan)] + more_seqs
    )
    chunks = [count for _, count in counts_of(plan) if count > 1]
    assert arrays.query_starts.tolist() == [sum(chunks[:i]) for i in range(len(chunks) + 1)]
    assert inputs.first_row == first_row
    assert all(getattr(arrays, f.name).dtype == np.int32 for f in fields(Arrays))


@given(plans(), st.integers(0, 2 * BLOCK_SIZE))
def test_rows_write_to_their_blocks_and_padding_to_the_null_block(
    plan: HomePlan, more_rows: int
) -> None:
    """Through the device's tables, as the model runner keeps them."""
    tables = torch.zeros(NUM_SLOTS + 1, MAX_BLOCKS, dtype=torch.int32)
    last_token = torch.arange(NUM_SLOTS + 1).int()
    changes = table_changes(plan.chunks)
    assert changes is not None
    update_tables(tables, torch.from_numpy(changes))
    arrays = arrays_of(padded(plan, more_rows))
    given_ids, positions, slots = map(
        torch.from_numpy, (arrays.ids, arrays.positions, arrays.slots)
    )
    ids, slot_mapping = gather_inputs(given_ids, positions, slots, last_token, tables, BLOCK_SIZE)
    row = 0
    for seq, count in ordered(plan):
        for position in range(seq.num_computed - count, seq.num_computed):
            block = seq.block_table[position // BLOCK_SIZE]
            assert slot_mapping[row] == block * BLOCK_SIZE + position % BLOCK_SIZE
            assert ids[row] == (
                seq.token_ids[position] if position < len(seq.token_ids) else seq.slot
            )
            row += 1
    assert slot_mapping[row:].tolist() == [i % BLOCK_SIZE for i in range(more_rows)]
    assert (arrays.positions[row:] < BLOCK_SIZE).all(), "read behind the table when there are many"


Rows = tuple[int, int]  # rows before a chunk, rows of it
SHAPES: dict[str, tuple[list[Rows], StepShape]] = {
    "fresh": ([(0, 9)], StepShape(0, 0, ((0, 9),))),
    "continued": ([(8, 5)], StepShape(0, 0, ((8, 5),))),
    "several, one continued": ([(0, 9), (4, 3)], StepShape(0, 0, ((0, 9), (4, 3)))),
    "decodes alone": ([(30, 1), (6, 1)], StepShape(2, 31)),
    "decodes and fresh": (
        [(30, 1), (0, 9), (6, 1), (0, 2)],
        StepShape(2, 31, ((0, 9), (0, 2))),
    ),
    "a decode and continued": ([(3, 1), (50, 9)], StepShape(1, 4, ((50, 9),))),
    "a prompt of one token is a decode": ([(0, 1), (0, 3)], StepShape(1, 1, ((0, 3),))),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(case: str) -> None:
    chunks, shape = SHAPES[case]
    plan = HomePlan(
        {advanced(slot, *rows): Chunk(rows[1], 0) for slot, rows in enumerate(chunks, 1)}
    )
    assert padded(plan, 0).shape == shape
    assert padded(plan, 3).shape == shape, "padding is nobody's prefill or decode"


@given(plans())
def test_shapes_follow_from_the_plan(plan: HomePlan) -> None:
    shape = padded(plan, 0).shape
    decodes = [seq for seq, count in counts_of(plan) if count == 1]
    chunks = [(seq.num_computed - count, count) for seq, count in counts_of(plan) if count > 1]
    assert shape.num_decodes == len(decodes)
    assert shape.max_decode_context == max((seq.num_computed for seq in decodes), default=0)
    assert shape.chunks == tuple(chunks)


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), min_size=6, max_size=6))
def test_what_is_packed_comes_out(columns: list[list[int]]) -> None:
    lengths = [len(column) for column in columns]
    host = blank(lengths)
    views = unpack(host, lengths)
    for f, column in zip(fields(Arrays), columns, strict=True):
        getattr(views, f.name)[:] = column
    packed = torch.from_numpy(host)
    unpacked = unpack(packed, lengths)
    for f, column in zip(fields(Arrays), columns, strict=True):
        tensor = getattr(unpacked, f.name)
        assert tensor.tolist() == column and tensor.dtype == torch.int32
        assert tensor.storage_offset() % ALIGNMENT == 0
        assert (
            not column or tensor.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
        ), "a copy"


def test_the_device_learns_each_block_once() -> None:
    known = advanced(1, 0, 8)
    grown = advanced(2, 0, 11)
    new = advanced(3, 0, 5)
    known.num_synced = len(known.block_table)
    grown.num_synced = 1
    changes = table_changes([known, grown, new])
    assert changes is not None and changes.dtype == np.int32
    assert changes.T.tolist() == [[2, 1, 41], [2, 2, 42], [3, 0, 60], [3, 1, 61]]
    assert table_changes([known, grown, new]) is None
