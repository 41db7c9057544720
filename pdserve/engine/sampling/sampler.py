"""The sampler's device half: turns logits into tokens and log-probabilities by rules, filters and
draws, without waiting for the device.

Rows are independent: a row's result does not depend on the batch it is in. The requests of a step's
rows come as one message (`staged_rows`), which goes to the device in one copy. Rules keep tables on
the device with a row for each slot. Knows no blocks, no scheduling and no text. Called by the
executor.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.sampling.device_copies import HostCopy, to_device_packed
from pdserve.engine.sampling.row_staging import RowStaging
from pdserve.engine.sampling.rules.registry import Rules
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.sampling.sampled_tokens import SampledTokens, Scores
from pdserve.engine.sampling.staged_rows import Arrays, StagedRows
from pdserve.kernels.launching.ahead import compile_and_do
from pdserve.kernels.ops import Ops
from pdserve.protocol.sampling_params import SamplingParams

TOP_ENTRIES = 1 << 21  # alternatives (row x rank) looked up at once: 32 MiB on the device
SCRATCH_BYTES = 64 << 10  # scratch memory of the kernels, per row

Staged = dict[str, dict[str, Tensor]]
"""The arrays of StagedRows on the device: by each rule's name, and the draws under the name ""."""


class Sampler:
    """One rank's sampler. Not thread-safe; all its work is on the current stream."""

    def __init__(self, ops: Ops, vocab_size: int, rules: Rules, device: torch.device) -> None:
        self.ops = ops
        self.vocab_size = vocab_size
        self.device = device
        self.rules = rules
        self._by_name = {rule.name: rule for rule in rules}
        assert len(self._by_name) == len(rules), "two logit rules have one name"

    def state_bytes(self) -> int:
        """Device memory of the rules' tables."""
        return sum(rule.state_bytes() for rule in self.rules)

    def peak_bytes(self, num_rows: int) -> int:
        """Maximum device memory that sampling or scoring num_rows rows takes, in addition to the
        logits and `state_bytes`. That is a float32 copy of the logits and the arrays of the rules,
        then the alternatives with torch.topk's own workspace.
        """
        row = self.vocab_size * 4 + SCRATCH_BYTES + sum(rule.row_bytes() for rule in self.rules)
        return num_rows * row + 16 * TOP_ENTRIES + 320 * self.vocab_size

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels of every feature, alone and together, for logits of this dtype
        (CUDA). Uses its own stream, so that another thread may capture graphs meanwhile. Nothing
        may be sampled before it returns.
        """
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            compile_and_do(self.device, lambda: self._use_every_feature(dtype))

    def _use_every_feature(self, dtype: torch.dtype) -> None:
        examples: dict[str, object] = {}
        for rule in self.rules:
            examples |= rule.example
        logits = torch.zeros(64, self.vocab_size, dtype=dtype, device=self.device)
        drawn = {"temperature": 1.0, "seed": 0}
        for asked in ({}, examples):
            for more in ({"temperature": 0.0}, drawn, drawn | {"top_p": 0.9}):
                params = SamplingParams(logprobs=1, **asked, **more)  # type: ignore[arg-type]
                staging = RowStaging(self.rules, self.vocab_size, 2)
                stops = frozenset(params.stop_token_ids)
                rows = [staging.join(SampleRow(params, i, 1 + i, [0], 1, stops)) for i in (0, 1)]
                self.sample(logits[:2], staging.stage(rows, [0, 0])).fetch()
        # torch.topk chooses among several kernels
        for num_rows, num_top in itertools.product((2, 64), (0, 1, 20)):
            targets = np.zeros(num_rows, dtype=np.int32)
            self.score(logits[:num_rows], targets, min(num_top, self.vocab_size)).fetch()

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: StagedRows) -> SampledTokens:
        """Sample one token per row from logits `[num_rows, vocab]` (float32, bfloat16 or float16),
        which stay unchanged. Log-probabilities are those of the unchanged distribution. Never waits
        for the device.
        """
        arrays = {"": dict(rows.draws), **rows.rules}
        if 0 < len(rows.scored_rows) < rows.num_rows:
            arrays[""]["scored_rows"] = np.array(rows.scored_rows, dtype=np.int64)
        staged = self._send(arrays)
        token_ids = self._draw(self._changed(logits, rows, staged), staged[""])
        for name in rows.rules:
            self._by_name[name].sampled(token_ids, staged[name])
        host_ids = HostCopy([token_ids])
        scores = None
        if rows.scored_rows:
            tokens = token_ids
            if "scored_rows" in staged[""]:
                scored = staged[""]["scored_rows"]
                logits, tokens = (t.index_select(0, scored) for t in (logits, token_ids))
            scores = self._scores(logits, tokens, rows.num_top)
        return SampledTokens(token_ids, host_ids, rows.scored_rows, scores)

    @torch.inference_mode()
    def score(self, logits: Tensor, targets: np.ndarray, num_top: int) -> Scores:
        """Log-probability of one given token (int32) per row of logits `[len(targets), vocab]`.
        Never waits for the device."""
        tokens = to_device_packed({"targets": targets}, self.device)["targets"]
        return self._scores(logits, tokens, [num_top] * len(targets))

    def _send(self, arrays: Mapping[str, Arrays]) -> Staged:
        flat = {(group, name): a for group, named in arrays.items() for name, a in named.items()}
        staged: Staged = {group: {} for group in arrays}
        if flat:
            for (group, name), tensor in to_device_packed(flat, self.device).items():
                staged[group][name] = tensor
        return staged

    def _scores(self, logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> Scores:
        parts: list[tuple[Tensor, ...]] = []
        start = 0
        while start < len(counts):
            most = min(max(counts[start:]), self.vocab_size)
            end = start + max(TOP_ENTRIES // max(most, 1), 1)
            parts.append(
                self.ops.sampling.token_logprobs(logits[start:end], tokens[start:end], most)
            )
            start = end
        return Scores(tokens, parts, counts)

    def _changed(self, logits: Tensor, rows: StagedRows, staged: Staged) -> Tensor:
        """Logits as the rules change them; the input itself if no rule does."""
        if not rows.rules:
            return logits
        changed = logits.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        for name in rows.rules:
            self._by_name[name].apply(changed, staged[name])
        return changed

    def _draw(self, logits: Tensor, staged: Mapping[str, Tensor]) -> Tensor:
        if "keys" not in staged:
            return self.ops.sampling.draw_tokens(logits)
        temperature = staged["temperature"]
        cut = None
        if "top_k" in staged:
            cut = self.ops.sampling.cut_tokens(
                logits, temperature, *(staged[name] for name in ("top_k", "top_p", "min_p"))
            )
        return self.ops.sampling.draw_tokens(logits, temperature, staged["keys"], cut)
