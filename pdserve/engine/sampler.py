"""Turns logits into tokens and log-probabilities, without waiting for the device: penalties, filters, draws.

Rows are independent: a row's result does not depend on the batch it is in. What a step needs to know of its rows goes
to the device in one copy; only the token counts of sequences with penalties stay there, one row of them a slot. Knows
no blocks, no scheduling and no text. Called by the engine with one `SampleRow` a logits row.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.protocol import SamplingParams, TokenLogprob
from pdserve.engine.randomness import Purpose, row_keys
from pdserve.kernels.ops import Ops
from pdserve.kernels.reference import IN_PROMPT, NEG_INF

TOP_ENTRIES = 1 << 21  # alternatives (row x rank) that are looked up at once: 32 MiB on the device
SCRATCH_BYTES = 64 << 10  # of the kernels' scratch, a row


@dataclass(frozen=True)
class SampleRow:
    """What sampling needs to know of one choice. Stop tokens are masked before min_tokens.

    slot: 1..num_slots, the sequence's own from its first sample to `Sampler.release`; no two rows of a step share
    one. position: of the token to sample among the generated ones, those in flight included. token_ids: prompt and
    output so far, without tokens in flight; not copied, since a step must not cost more the longer its sequences are.
    """

    sampling: SamplingParams
    choice: int
    slot: int
    position: int
    token_ids: list[int]
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]

    @property
    def has_penalties(self) -> bool:
        s = self.sampling
        return bool(s.repetition_penalty != 1.0 or s.presence_penalty or s.frequency_penalty)

    @property
    def masks_stops(self) -> bool:
        return self.position < self.sampling.min_tokens and bool(self.stop_token_ids)


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None


class HostCopy:
    """Device tensors on their way to the host: `tensors()` waits for these copies and for nothing behind them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = tensors
        if tensors[0].device.type == "cuda":
            # Torch gives pinned memory to nobody else before the copies into it are done.
            self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for target, source in zip(self._tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def tensors(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class Scores:
    """Log-probabilities of some tokens, of which `counts` says how many alternatives each has."""

    def __init__(self, tokens: Tensor, parts: list[tuple[Tensor, ...]], counts: list[int]) -> None:
        self._counts = counts
        self._num_parts = len(parts)
        self._copy = HostCopy([tokens, *(tensor for part in parts for tensor in part)])

    def fetch(self) -> list[TokenLogprob]:
        """Waits for the scores; one entry a row."""
        tokens, *rest = self._copy.tensors()
        entries: list[TokenLogprob] = []
        columns: list[list] = [[], [], [], []]
        for i in range(self._num_parts):
            for column, tensor in zip(columns, rest[4 * i : 4 * i + 4], strict=True):
                column += tensor.tolist()
        for token, count, logprob, rank, values, ids in zip(tokens.tolist(), self._counts, *columns, strict=True):
            entries.append(TokenLogprob(token, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True))))
        return entries


@dataclass(frozen=True)
class SampledTokens:
    """What a step sampled. token_ids: int32 [rows] on the device."""

    token_ids: Tensor
    host_ids: HostCopy
    scored_rows: list[int]
    scores: Scores | None

    def fetch(self) -> list[Sampled]:
        """Waits for this sample to arrive on the host, and for nothing behind it."""
        [host_ids] = self.host_ids.tensors()
        scores = dict(zip(self.scored_rows, self.scores.fetch(), strict=True)) if self.scores else {}
        return [Sampled(token, scores.get(i)) for i, token in enumerate(host_ids.tolist())]


@dataclass
class _SlotState:
    """What is known of a slot. next_position: that of the token which the counts on the device lack; None: no counts.
    bias, stops: its sparse settings, made once.
    """

    next_position: int | None = None
    bias: tuple[np.ndarray, np.ndarray] | None = None
    stops: np.ndarray | None = None


@dataclass
class _Staged:
    """Arrays of one step for the device, by name, and then the tensors."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def send(self, device: torch.device) -> None:
        if self.arrays:
            self.tensors = to_device_packed(self.arrays, device)

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


class Sampler:
    """One engine's sampler. Not thread-safe; all its work is on the current stream."""

    def __init__(self, ops: Ops, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self.ops = ops
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self.device = device
        self._slots: dict[int, _SlotState] = {}
        # int32 [num_slots + 1, vocab], made by warm_up, or when a request first needs it.
        self._counts: Tensor | None = None

    def state_bytes(self) -> int:
        """Device memory of the token counts."""
        return (self.num_slots + 1) * self.vocab_size * 4

    def peak_bytes(self, num_rows: int) -> int:
        """Device memory, beside logits and `state_bytes`, that a sample or score of so many rows may take: a float32
        copy of the logits, then the alternatives with torch.topk's own workspace.
        """
        return num_rows * (self.vocab_size * 4 + SCRATCH_BYTES) + 16 * TOP_ENTRIES + 320 * self.vocab_size

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels of every feature, alone and together, for logits of this dtype (CUDA). On a stream of its
        own, so that another thread may capture graphs meanwhile; nothing is sampled before it returns.
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
            for num_rows, num_top in itertools.product((2, 64), (0, 1, 20)):  # torch.topk has several ways
                self.score(logits[:num_rows], [0] * num_rows, min(num_top, self.vocab_size)).fetch()

    def release(self, slot: int) -> None:
        """The slot's sequence is gone: the next one there starts anew."""
        self._slots.pop(slot, None)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: list[SampleRow]) -> SampledTokens:
        """One token a row from logits [len(rows), vocab] (float32, bfloat16 or float16), which are left alone.
        Log-probabilities are of the unchanged distribution. Never waits for the device.
        """
        staged = _Staged()
        self._stage_edits(staged, rows)
        self._stage_draws(staged, rows)
        scored_rows = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        if 0 < len(scored_rows) < len(rows):
            staged.arrays["scored_rows"] = np.array(scored_rows, dtype=np.int64)
        staged.send(self.device)
        token_ids = self._draw(self._edited(logits, staged), staged)
        if "penalised_rows" in staged:
            at = staged["counts_rows"] + token_ids.index_select(0, staged["penalised_rows"])
            self._token_counts().view(-1).index_add_(0, at, staged["ones"])
        host_ids = HostCopy([token_ids])
        scores = None
        if scored_rows:
            tokens = token_ids
            if "scored_rows" in staged:
                logits, tokens = (t.index_select(0, staged["scored_rows"]) for t in (logits, token_ids))
            scores = self._scores(logits, tokens, [rows[i].sampling.logprobs or 0 for i in scored_rows])
        return SampledTokens(token_ids, host_ids, scored_rows, scores)

    @torch.inference_mode()
    def score(self, logits: Tensor, targets: list[int], num_top: int) -> Scores:
        """Log-probabilities of one given token a row of logits [len(targets), vocab]. Never waits for the device."""
        tokens = to_device_packed({"targets": np.array(targets, dtype=np.int32)}, self.device)["targets"]
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

    # --- what the step's rows ask for ---

    def _stage_draws(self, staged: _Staged, rows: list[SampleRow]) -> None:
        """Temperatures and keys when a row is drawn, filters when a drawn row has one."""
        params = [row.sampling for row in rows]
        drawn = [p for p in params if not p.greedy]
        if not drawn:
            return
        numbers = np.array([(p.seed or 0, r.choice, r.position) for p, r in zip(params, rows, strict=True)], np.int64)
        seeds, choices, positions = numbers.T
        staged.arrays["keys"] = row_keys(seeds, choices, positions, Purpose.SAMPLE)
        staged.arrays["temperature"] = _floats(0.0 if p.greedy else p.temperature for p in params)
        vocab = self.vocab_size
        if any(0 < p.top_k < vocab or p.top_p < 1.0 or p.min_p > 0.0 for p in drawn):
            top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
            staged.arrays["top_k"] = np.array(top_k, dtype=np.int32)
            staged.arrays["top_p"] = _floats(p.top_p for p in params)
            staged.arrays["min_p"] = _floats(p.min_p for p in params)

    def _stage_edits(self, staged: _Staged, rows: list[SampleRow]) -> None:
        """Biases, masked stop tokens and penalties of the rows that have any."""
        biased: list[tuple[int, tuple[np.ndarray, np.ndarray]]] = []
        masked: list[tuple[int, np.ndarray]] = []
        penalised: list[int] = []
        for i, row in enumerate(rows):
            if row.sampling.logit_bias:
                biased.append((i, self._bias(row)))
            if row.masks_stops:
                masked.append((i, self._stops(row)))
            if row.has_penalties:
                penalised.append(i)
        if biased:
            staged.arrays["bias_at"] = np.concatenate([ids + i * self.vocab_size for i, (ids, _) in biased])
            staged.arrays["bias"] = np.concatenate([values for _, (_, values) in biased])
        if masked:
            staged.arrays["masked_at"] = np.concatenate([ids + i * self.vocab_size for i, ids in masked])
        if penalised:
            self._stage_penalties(staged, rows, penalised)

    def _stage_penalties(self, staged: _Staged, rows: list[SampleRow], penalised: list[int]) -> None:
        slots = np.zeros(len(rows), dtype=np.int32)
        slots[penalised] = [rows[i].slot for i in penalised]
        staged.arrays["slots"] = slots
        staged.arrays["repetition"] = _floats(row.sampling.repetition_penalty for row in rows)
        staged.arrays["frequency"] = _floats(row.sampling.frequency_penalty for row in rows)
        staged.arrays["presence"] = _floats(row.sampling.presence_penalty for row in rows)
        staged.arrays["penalised_rows"] = np.array(penalised, dtype=np.int64)
        staged.arrays["counts_rows"] = slots[penalised].astype(np.int64) * self.vocab_size
        staged.arrays["ones"] = np.ones(len(penalised), dtype=np.int32)
        fresh = []
        for i in penalised:
            state = self._state(rows[i])
            if state.next_position != rows[i].position:
                fresh.append(rows[i])
            state.next_position = rows[i].position + 1
        if fresh:
            counted = [_count(row) for row in fresh]
            at = [ids + row.slot * self.vocab_size for row, (ids, _) in zip(fresh, counted, strict=True)]
            staged.arrays["fresh_slots"] = np.array([row.slot for row in fresh], dtype=np.int64)
            staged.arrays["counted_at"] = np.concatenate(at)
            staged.arrays["counted"] = np.concatenate([amounts for _, amounts in counted])

    def _state(self, row: SampleRow) -> _SlotState:
        assert 0 < row.slot <= self.num_slots, f"slot {row.slot} lies outside 1..{self.num_slots}"
        return self._slots.setdefault(row.slot, _SlotState())

    def _bias(self, row: SampleRow) -> tuple[np.ndarray, np.ndarray]:
        state, bias = self._state(row), row.sampling.logit_bias or {}
        if state.bias is None:
            state.bias = np.array(list(bias), dtype=np.int64), _floats(bias.values())
        return state.bias

    def _stops(self, row: SampleRow) -> np.ndarray:
        state = self._state(row)
        if state.stops is None:
            state.stops = np.array(list(row.stop_token_ids), dtype=np.int64)
        return state.stops

    # --- on the device ---

    def _edited(self, logits: Tensor, staged: _Staged) -> Tensor:
        """Logits with bias, then masked stop tokens, then penalties; the input itself when no row asks for any."""
        if not ("bias" in staged or "masked_at" in staged or "slots" in staged):
            return logits
        edited = logits.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        flat = edited.view(-1)
        if "bias" in staged:
            flat.index_add_(0, staged["bias_at"], staged["bias"])
        if "masked_at" in staged:
            flat.index_fill_(0, staged["masked_at"], NEG_INF)
        if "slots" in staged:
            counts = self._token_counts()
            if "fresh_slots" in staged:
                counts.index_fill_(0, staged["fresh_slots"], 0)
                counts.view(-1).index_add_(0, staged["counted_at"], staged["counted"])
            settings = (staged[name] for name in ("slots", "repetition", "frequency", "presence"))
            self.ops.apply_penalties(edited, counts, *settings)
        return edited

    def _draw(self, logits: Tensor, staged: _Staged) -> Tensor:
        if "keys" not in staged:
            return self.ops.draw_tokens(logits)
        temperature, cut = staged["temperature"], None
        if "top_k" in staged:
            cut = self.ops.cut_tokens(logits, temperature, *(staged[name] for name in ("top_k", "top_p", "min_p")))
        return self.ops.draw_tokens(logits, temperature, staged["keys"], cut)

    def _token_counts(self) -> Tensor:
        if self._counts is None:
            self._counts = torch.empty((self.num_slots + 1, self.vocab_size), dtype=torch.int32, device=self.device)
        return self._counts


def _count(row: SampleRow) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (int64) and what the counts of apply_penalties (int32) add for each; ids may come twice."""
    known = len(row.token_ids) - row.num_prompt_tokens
    assert known == row.position, "a sequence's first penalised sample cannot lie behind tokens in flight"
    tokens = np.array(row.token_ids, dtype=np.int64)
    prompt = np.unique(tokens[: row.num_prompt_tokens])
    amounts = np.ones(len(prompt) + known, dtype=np.int32)
    amounts[: len(prompt)] = IN_PROMPT
    return np.concatenate((prompt, tokens[row.num_prompt_tokens :])), amounts


def _floats(values: Iterable[float]) -> np.ndarray:
    return np.fromiter(values, dtype=np.float32)


def to_device_packed(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays (of 4- or 8-byte numbers) as tensors on the device; to CUDA by one copy from pinned memory, which
    torch gives to nobody else before the copy is done.
    """
    if device.type != "cuda":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    starts = np.cumsum([0, *(-(-array.nbytes // 16) * 16 for array in arrays.values())]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    memory = packed.numpy()
    for start, array in zip(starts, arrays.values(), strict=False):
        memory[start : start + array.nbytes] = array.view(np.uint8)
    sent = packed.to(device, non_blocking=True)
    tensors = {}
    for start, (name, array) in zip(starts, arrays.items(), strict=False):
        tensors[name] = sent[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype)
    return tensors
