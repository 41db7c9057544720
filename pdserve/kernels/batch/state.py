# mypy: allow-untyped-defs
"""Triton kernels over the state of the running batch that stays on the device: block tables and
newest tokens, by slot.

They turn what a step sends (positions, slots, changes) into the model's inputs, so that a sampled
token never has to visit the host before it is fed back. They know nothing of sequences or
scheduling. triton_ops.py calls them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.launch import cdiv, launch

BLOCK = 128


def launch_gather_inputs(
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    last_token: Tensor,
    tables: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Launches the twin of reference.gather_inputs."""
    known_ids = torch.empty_like(ids)
    slot_mapping = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    launch(
        gather_inputs_kernel,
        (cdiv(len(ids), BLOCK),),
        (ids, positions, slots, last_token, tables, known_ids, slot_mapping),
        (len(ids), tables.stride(0), block_size.bit_length() - 1),
        BLOCK=BLOCK,
    )
    return known_ids, slot_mapping


def launch_update_tables(tables: Tensor, changes: Tensor) -> None:
    """Launches the twin of reference.update_tables."""
    num_changes = changes.shape[1]
    grid = (cdiv(num_changes, BLOCK),)
    launch(
        update_tables_kernel, grid, (tables, changes), (num_changes, tables.stride(0)), BLOCK=BLOCK
    )


def launch_store_tokens(last_token: Tensor, slots: Tensor, token_ids: Tensor) -> None:
    """Launches the twin of reference.store_tokens."""
    grid = (cdiv(len(slots), BLOCK),)
    launch(store_tokens_kernel, grid, (last_token, slots, token_ids), (len(slots),), BLOCK=BLOCK)


@triton.jit(do_not_specialize=["num_rows", "stride_table", "block_shift"])
def gather_inputs_kernel(
    ids_ptr,  # int32 [T]
    positions_ptr,  # int32 [T]
    slots_ptr,  # int32 [T]
    last_token_ptr,  # int32 [num_slots]
    tables_ptr,  # int32 [num_slots, max_blocks]
    known_ids_ptr,  # int32 [T]
    slot_mapping_ptr,  # int64 [T]
    num_rows,
    stride_table,
    block_shift,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=valid, other=0).to(tl.int64)
    ids = tl.load(ids_ptr + rows, mask=valid, other=0)
    newest = tl.load(last_token_ptr + slots, mask=valid & (ids < 0), other=0)
    tl.store(known_ids_ptr + rows, tl.where(ids < 0, newest, ids), mask=valid)
    positions = tl.load(positions_ptr + rows, mask=valid, other=0)
    blocks = tl.load(
        tables_ptr + slots * stride_table + (positions >> block_shift), mask=valid, other=0
    )
    slot_mapping = (blocks.to(tl.int64) << block_shift) + (positions & ((1 << block_shift) - 1))
    tl.store(slot_mapping_ptr + rows, slot_mapping, mask=valid)


@triton.jit(do_not_specialize=["num_changes", "stride_table"])
def update_tables_kernel(
    tables_ptr,  # int32 [num_slots, max_blocks]
    changes_ptr,  # int32 [3, N]
    num_changes,
    stride_table,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = rows < num_changes
    slots = tl.load(changes_ptr + rows, mask=valid, other=0).to(tl.int64)
    indices = tl.load(changes_ptr + num_changes + rows, mask=valid, other=0)
    blocks = tl.load(changes_ptr + 2 * num_changes + rows, mask=valid, other=0)
    tl.store(tables_ptr + slots * stride_table + indices, blocks, mask=valid)


@triton.jit(do_not_specialize=["num_tokens"])
def store_tokens_kernel(
    last_token_ptr,  # int32 [num_slots]
    slots_ptr,  # int32 [N]
    token_ids_ptr,  # int [N]
    num_tokens,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = rows < num_tokens
    slots = tl.load(slots_ptr + rows, mask=valid, other=0)
    tokens = tl.load(token_ids_ptr + rows, mask=valid, other=0)
    tl.store(last_token_ptr + slots, tokens.to(tl.int32), mask=valid)
