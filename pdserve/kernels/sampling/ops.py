"""The interface that turns logits into tokens. reference.py says the shapes and implements it in
plain torch; triton_ops.py implements it in Triton."""

from typing import Protocol

from torch import Tensor


class SamplingOps(Protocol):
    def draw_tokens(
        self,
        logits: Tensor,
        temperature: Tensor | None = None,
        keys: Tensor | None = None,
        cut: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor: ...

    def cut_tokens(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def apply_edits(
        self, logits: Tensor, slots: Tensor, counts: Tensor, ids: Tensor, values: Tensor
    ) -> None: ...

    def apply_penalties(
        self,
        logits: Tensor,
        counts: Tensor,
        slots: Tensor,
        repetition: Tensor,
        frequency: Tensor,
        presence: Tensor,
    ) -> None: ...

    def apply_token_mask(self, logits: Tensor, rows: Tensor, words: Tensor) -> None: ...

    def token_logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
