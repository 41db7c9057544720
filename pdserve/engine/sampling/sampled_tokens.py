"""The sampler's output: tokens on the device, which the next step reads, and their copies on the
way to the host, with log-probabilities.

Knows no logits and no requests. Made by the sampler, fetched by the engine when the step is
complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pdserve.engine.sampling.device_copies import HostCopy
from pdserve.protocol.events import TokenLogprob


@dataclass(frozen=True)
class Sampled:
    """The next tokens of one row, in order. logprobs: one per token, if asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None


class Scores:
    """Log-probabilities of some tokens, each with the number of alternatives given by `counts`."""

    def __init__(
        self, tokens: Tensor, parts: list[tuple[Tensor, ...]], counts: Sequence[int]
    ) -> None:
        self._counts = counts
        self._num_parts = len(parts)
        self._copy = HostCopy([tokens, *(tensor for part in parts for tensor in part)])

    def fetch(self) -> list[TokenLogprob]:
        """Waits for the scores; returns one entry per row."""
        tokens, *rest = self._copy.tensors()
        entries: list[TokenLogprob] = []
        columns: list[list] = [[], [], [], []]
        for i in range(self._num_parts):
            for column, tensor in zip(columns, rest[4 * i : 4 * i + 4], strict=True):
                column += tensor.tolist()
        for token, count, logprob, rank, values, ids in zip(
            tokens.tolist(), self._counts, *columns, strict=True
        ):
            entries.append(
                TokenLogprob(
                    token, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True))
                )
            )
        return entries


@dataclass(frozen=True)
class SampledTokens:
    """The samples of one step. token_ids: int32 `[rows]` on the device."""

    token_ids: Tensor
    host_ids: HostCopy
    scored_rows: tuple[int, ...]
    scores: Scores | None

    def fetch(self) -> list[Sampled]:
        """Waits for these samples to arrive on the host, and for nothing after them."""
        [host_ids] = self.host_ids.tensors()
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        if self.scores:
            entries = self.scores.fetch()
            logprobs = {i: (entry,) for i, entry in zip(self.scored_rows, entries, strict=True)}
        return [Sampled((token,), logprobs.get(i)) for i, token in enumerate(host_ids.tolist())]
