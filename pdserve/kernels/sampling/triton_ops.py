"""SamplingOps in Triton: checks the inputs of the kernels and launches them."""

import torch
from torch import Tensor

from pdserve.kernels.launching.checks import check_ids, check_rows, num_sms
from pdserve.kernels.sampling.cut import launch_cut
from pdserve.kernels.sampling.draw import launch_draw
from pdserve.kernels.sampling.edits import launch_edits
from pdserve.kernels.sampling.logprobs import launch_token_logprobs
from pdserve.kernels.sampling.penalties import launch_penalties
from pdserve.kernels.sampling.token_mask import launch_token_mask

PROGRAMS = 8  # programs per SM: enough reads in flight for kernels that do little else


def draw_tokens(
    logits: Tensor,
    temperature: Tensor | None = None,
    keys: Tensor | None = None,
    cut: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Does what reference.draw_tokens does."""
    check_rows(logits=logits)
    if len(logits) == 0:
        return torch.empty(0, dtype=torch.int32, device=logits.device)
    return launch_draw(logits, temperature, keys, cut, PROGRAMS * num_sms(logits.device))


def cut_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Does what reference.cut_tokens does."""
    check_rows(logits=logits)
    return launch_cut(logits, temperature, top_k, top_p, min_p)


def apply_edits(logits: Tensor, slots: Tensor, counts: Tensor, ids: Tensor, values: Tensor) -> None:
    """Does what reference.apply_edits does."""
    check_ids(logits=logits, ids=ids, values=values)
    launch_edits(logits, slots, counts, ids, values)


def apply_penalties(
    logits: Tensor,
    counts: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Does what reference.apply_penalties does."""
    check_ids(logits=logits, counts=counts)
    launch_penalties(logits, counts, slots, repetition, frequency, presence)


def apply_token_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Does what reference.apply_token_mask does."""
    check_ids(logits=logits, rows=rows, words=words)
    if len(rows):
        launch_token_mask(logits, rows, words)


def token_logprobs(
    logits: Tensor, tokens: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Does what reference.token_logprobs does; torch.topk finds the alternatives."""
    check_rows(logits=logits)
    check_ids(tokens=tokens)
    logprobs, ranks, lse = launch_token_logprobs(logits, tokens, PROGRAMS * num_sms(logits.device))
    if num_top == 0:
        none = logits.new_empty(len(logits), 0, dtype=torch.float32)
        return logprobs, ranks, none, none.long()
    values, ids = logits.topk(num_top, dim=-1)
    return logprobs, ranks, values.float() - lse[:, None], ids
