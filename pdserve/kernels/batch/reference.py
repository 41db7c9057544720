"""The batch's state on the device in plain torch: block tables and newest tokens by slot."""

import torch
from torch import Tensor


def gather_inputs(
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    last_token: Tensor,
    tables: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Returns `(token ids int32 [T], slot_mapping int64 [T])` of the rows at `positions` [T] of the
    sequences in `slots` [T]. All inputs are int32.

    ids: [T], the token of each row, or -1 for the newest token of its slot.
    last_token: [num_slots], the newest token of each slot.
    tables: [num_slots, max_blocks].
    An entry of slot_mapping is block * block_size + offset.
    """
    known_ids = torch.where(ids < 0, last_token[slots], ids)
    blocks = tables[slots, positions // block_size].to(torch.int64)
    return known_ids, blocks * block_size + positions % block_size


def update_tables(tables: Tensor, changes: Tensor) -> None:
    """Sets `tables[slot, index] = block` for each column of `changes` int32 [3, N]. No (slot,
    index) may come twice.

    tables [num_slots, max_blocks] int32.
    """
    slots, indices, blocks = changes
    tables[slots, indices] = blocks


def store_tokens(last_token: Tensor, slots: Tensor, token_ids: Tensor) -> None:
    """Sets `last_token[slots] = token_ids`. last_token is int32 [num_slots]; slots is int32 [N],
    and all are different."""
    last_token[slots] = token_ids.to(torch.int32)
