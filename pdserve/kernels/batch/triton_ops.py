"""BatchOps in Triton: checks the inputs of the kernels and launches them."""

from torch import Tensor

from pdserve.kernels.batch.state import (
    launch_gather_inputs,
    launch_store_tokens,
    launch_update_tables,
)
from pdserve.kernels.launching.checks import check_ids


def gather_inputs(
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    last_token: Tensor,
    tables: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Does what reference.gather_inputs does."""
    check_ids(ids=ids, positions=positions, slots=slots, tables=tables)
    return launch_gather_inputs(ids, positions, slots, last_token, tables, block_size)


def update_tables(tables: Tensor, changes: Tensor) -> None:
    """Does what reference.update_tables does."""
    check_ids(tables=tables, changes=changes)
    if changes.shape[1]:
        launch_update_tables(tables, changes)


def store_tokens(last_token: Tensor, slots: Tensor, token_ids: Tensor) -> None:
    """Does what reference.store_tokens does."""
    check_ids(slots=slots, token_ids=token_ids)
    if len(slots):
        launch_store_tokens(last_token, slots, token_ids)
