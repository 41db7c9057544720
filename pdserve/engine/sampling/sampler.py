"""Turns logits into tokens and log-probabilities, without waiting for the device: penalties,
filters, draws.

Rows are independent: a row's result does not depend on the batch it is in. What a step needs to
know of its rows goes to the device in one copy; the token counts of sequences with penalties and
the edits of single logits (biases, masked stop tokens) stay there, one row of them a slot. Knows no
blocks, no scheduling and no text. Called by the engine with one `SampleRow` a logits row.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.sampling.device_copies import HostCopy, to_device_packed
from pdserve.engine.sampling.sample_rows import RowStaging, SampleRow
from pdserve.engine.sampling.sampled_tokens import SampledTokens, Scores
from pdserve.kernels.ops import Ops
from pdserve.protocol.sampling_params import SamplingParams

TOP_ENTRIES = 1 << 21  # alternatives (row x rank) that are looked up at once: 32 MiB on the device
SCRATCH_BYTES = 64 << 10  # of the kernels' scratch, a row
EDIT_BYTES = 16  # of an edit on its way to the tables


@dataclass(frozen=True)
class _EditTables:
    """The edits of all slots, as `Ops.apply_edits` reads them. counts: int32 [num_slots + 1]; ids:
    int32, values: float32 [num_slots + 1, max_edits].
    """

    counts: Tensor
    ids: Tensor
    values: Tensor

    def update(self, staged: Mapping[str, Tensor]) -> None:
        self.counts.index_copy_(0, staged["changed_slots"], staged["changed_counts"])
        self.ids.view(-1).index_copy_(0, staged["changed_at"], staged["changed_ids"])
        self.values.view(-1).index_copy_(0, staged["changed_at"], staged["changed_values"])


class Sampler:
    """One engine's sampler. Not thread-safe; all its work is on the current stream. max_edits: the
    most that a row can have (`sample_rows.max_edits`).
    """

    def __init__(
        self, ops: Ops, vocab_size: int, num_slots: int, max_edits: int, device: torch.device
    ) -> None:
        self.ops = ops
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self.max_edits = min(max_edits, vocab_size)  # they are of distinct tokens
        self.device = device
        self._staging = RowStaging(vocab_size, num_slots, self.max_edits)
        # Both are made by warm_up, or when a request first needs them. Counts: int32 [num_slots +
        # 1, vocab].
        self._counts: Tensor | None = None
        self._edits: _EditTables | None = None

    def state_bytes(self) -> int:
        """Device memory of the token counts and the edits."""
        return (self.num_slots + 1) * (self.vocab_size * 4 + self.max_edits * 8 + 4)

    def peak_bytes(self, num_rows: int) -> int:
        """Device memory, beside logits and `state_bytes`, that a sample or score of so many rows
        may take: a float32 copy of the logits and new edits, then the alternatives with
        torch.topk's own workspace.
        """
        row = self.vocab_size * 4 + self.max_edits * EDIT_BYTES + SCRATCH_BYTES
        return num_rows * row + 16 * TOP_ENTRIES + 320 * self.vocab_size

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels of every feature, alone and together, for logits of this dtype
        (CUDA). On a stream of its own, so that another thread may capture graphs meanwhile; nothing
        is sampled before it returns.
        """
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            logits = torch.zeros(64, self.vocab_size, dtype=dtype, device=self.device)
            drawn = {"temperature": 1.0, "seed": 0}
            for edits in ({}, {"presence_penalty": 0.5, "logit_bias": {0: 1.0}}):
                for more in ({"temperature": 0.0}, drawn, drawn | {"top_p": 0.9}):
                    params = SamplingParams(logprobs=1, **edits, **more)  # type: ignore[arg-type]
                    rows = [SampleRow(params, i, 1, 0, [0], 1, frozenset()) for i in range(2)]
                    self.sample(logits[:2], rows).fetch()
            self.release(1)
            # torch.topk has several ways
            for num_rows, num_top in itertools.product((2, 64), (0, 1, 20)):
                self.score(logits[:num_rows], [0] * num_rows, min(num_top, self.vocab_size)).fetch()

    def release(self, slot: int) -> None:
        """The slot's sequence is gone: the next one there starts anew."""
        self._staging.release(slot)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: list[SampleRow]) -> SampledTokens:
        """One token a row from logits [len(rows), vocab] (float32, bfloat16 or float16), which are
        left alone. Log-probabilities are of the unchanged distribution. Never waits for the device.
        """
        arrays = self._staging.stage(rows)
        scored_rows = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        if 0 < len(scored_rows) < len(rows):
            arrays["scored_rows"] = np.array(scored_rows, dtype=np.int64)
        staged = to_device_packed(arrays, self.device) if arrays else {}
        token_ids = self._draw(self._edited(logits, staged), staged)
        if "penalised_rows" in staged:
            at = staged["counts_rows"] + token_ids.index_select(0, staged["penalised_rows"])
            self._token_counts().view(-1).index_add_(0, at, staged["ones"])
        host_ids = HostCopy([token_ids])
        scores = None
        if scored_rows:
            tokens = token_ids
            if "scored_rows" in staged:
                logits, tokens = (
                    t.index_select(0, staged["scored_rows"]) for t in (logits, token_ids)
                )
            scores = self._scores(
                logits, tokens, [rows[i].sampling.logprobs or 0 for i in scored_rows]
            )
        return SampledTokens(token_ids, host_ids, scored_rows, scores)

    @torch.inference_mode()
    def score(self, logits: Tensor, targets: list[int], num_top: int) -> Scores:
        """Log-probabilities of one given token a row of logits [len(targets), vocab]. Never waits
        for the device."""
        tokens = to_device_packed({"targets": np.array(targets, dtype=np.int32)}, self.device)[
            "targets"
        ]
        return self._scores(logits, tokens, [num_top] * len(targets))

    def _scores(self, logits: Tensor, tokens: Tensor, counts: list[int]) -> Scores:
        parts: list[tuple[Tensor, ...]] = []
        start = 0
        while start < len(counts):
            most = min(max(counts[start:]), self.vocab_size)
            end = start + max(TOP_ENTRIES // max(most, 1), 1)
            parts.append(self.ops.token_logprobs(logits[start:end], tokens[start:end], most))
            start = end
        return Scores(tokens, parts, counts)

    def _edited(self, logits: Tensor, staged: Mapping[str, Tensor]) -> Tensor:
        """Logits with biases and masked stop tokens, then penalties; the input itself when no row
        asks for any."""
        if not ("edited_slots" in staged or "slots" in staged):
            return logits
        edited = logits.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        if "edited_slots" in staged:
            tables = self._edit_tables()
            if "changed_slots" in staged:
                tables.update(staged)
            self.ops.apply_edits(
                edited, staged["edited_slots"], tables.counts, tables.ids, tables.values
            )
        if "slots" in staged:
            counts = self._token_counts()
            if "fresh_slots" in staged:
                counts.index_fill_(0, staged["fresh_slots"], 0)
                counts.view(-1).index_add_(0, staged["counted_at"], staged["counted"])
            settings = (staged[name] for name in ("slots", "repetition", "frequency", "presence"))
            self.ops.apply_penalties(edited, counts, *settings)
        return edited

    def _draw(self, logits: Tensor, staged: Mapping[str, Tensor]) -> Tensor:
        if "keys" not in staged:
            return self.ops.draw_tokens(logits)
        temperature = staged["temperature"]
        cut = None
        if "top_k" in staged:
            cut = self.ops.cut_tokens(
                logits, temperature, *(staged[name] for name in ("top_k", "top_p", "min_p"))
            )
        return self.ops.draw_tokens(logits, temperature, staged["keys"], cut)

    def _token_counts(self) -> Tensor:
        if self._counts is None:
            self._counts = torch.empty(
                (self.num_slots + 1, self.vocab_size), dtype=torch.int32, device=self.device
            )
        return self._counts

    def _edit_tables(self) -> _EditTables:
        if self._edits is None:
            shape = self.num_slots + 1, self.max_edits
            self._edits = _EditTables(
                torch.zeros(shape[0], dtype=torch.int32, device=self.device),
                torch.empty(shape, dtype=torch.int32, device=self.device),
                torch.empty(shape, dtype=torch.float32, device=self.device),
            )
        return self._edits
