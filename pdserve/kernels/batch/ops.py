"""The interface of the batch's state on the device. reference.py gives the shapes and implements it
in plain torch; triton_ops.py implements it in Triton."""

from typing import Protocol

from torch import Tensor


class BatchOps(Protocol):
    def gather_inputs(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        last_token: Tensor,
        tables: Tensor,
        block_size: int,
    ) -> tuple[Tensor, Tensor]: ...

    def update_tables(self, tables: Tensor, changes: Tensor) -> None: ...

    def store_tokens(self, last_token: Tensor, slots: Tensor, token_ids: Tensor) -> None: ...
