"""What a step's rows ask of the sampler, as small arrays that go to the device in one copy.

Biases, masked stop tokens, penalties, temperatures, keys and filters, each array present only when some row needs it.
Remembers of each slot what need not be made or sent again. Host only: knows neither logits nor device. `SampleRow`s are
made by the engine; `RowStaging` is called by the sampler.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pdserve.engine.protocol import SamplingParams
from pdserve.engine.randomness import Purpose, row_keys
from pdserve.kernels.reference import IN_PROMPT

RowArrays = dict[str, np.ndarray]


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


@dataclass
class _SlotState:
    """What is known of a slot. next_position: that of the token which the counts on the device lack; None: no counts.
    bias, stops: its sparse settings, made once.
    """

    next_position: int | None = None
    bias: tuple[np.ndarray, np.ndarray] | None = None
    stops: np.ndarray | None = None


class RowStaging:
    """Makes the arrays of one step after another. `bias_at` and `masked_at` are flat positions in the step's logits
    `[rows, vocab]`, `counted_at` and `counts_rows` in the token counts `[num_slots + 1, vocab]`.
    """

    def __init__(self, vocab_size: int, num_slots: int) -> None:
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self._slots: dict[int, _SlotState] = {}

    def release(self, slot: int) -> None:
        """The slot's sequence is gone: the next one there starts anew."""
        self._slots.pop(slot, None)

    def stage(self, rows: list[SampleRow]) -> RowArrays:
        """The arrays of these rows by name: none when all are greedy and unedited. AssertionError for a slot outside
        1..num_slots, and for penalties whose tokens are partly unknown.
        """
        arrays: RowArrays = {}
        self._stage_edits(arrays, rows)
        self._stage_draws(arrays, rows)
        return arrays

    def _stage_draws(self, arrays: RowArrays, rows: list[SampleRow]) -> None:
        """Temperatures and keys when a row is drawn, filters when a drawn row has one."""
        params = [row.sampling for row in rows]
        drawn = [p for p in params if not p.greedy]
        if not drawn:
            return
        numbers = np.array([(p.seed or 0, r.choice, r.position) for p, r in zip(params, rows, strict=True)], np.int64)
        seeds, choices, positions = numbers.T
        arrays["keys"] = row_keys(seeds, choices, positions, Purpose.SAMPLE)
        arrays["temperature"] = _floats(0.0 if p.greedy else p.temperature for p in params)
        vocab = self.vocab_size
        if any(0 < p.top_k < vocab or p.top_p < 1.0 or p.min_p > 0.0 for p in drawn):
            top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
            arrays["top_k"] = np.array(top_k, dtype=np.int32)
            arrays["top_p"] = _floats(p.top_p for p in params)
            arrays["min_p"] = _floats(p.min_p for p in params)

    def _stage_edits(self, arrays: RowArrays, rows: list[SampleRow]) -> None:
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
            arrays["bias_at"] = np.concatenate([ids + i * self.vocab_size for i, (ids, _) in biased])
            arrays["bias"] = np.concatenate([values for _, (_, values) in biased])
        if masked:
            arrays["masked_at"] = np.concatenate([ids + i * self.vocab_size for i, ids in masked])
        if penalised:
            self._stage_penalties(arrays, rows, penalised)

    def _stage_penalties(self, arrays: RowArrays, rows: list[SampleRow], penalised: list[int]) -> None:
        slots = np.zeros(len(rows), dtype=np.int32)
        slots[penalised] = [rows[i].slot for i in penalised]
        arrays["slots"] = slots
        arrays["repetition"] = _floats(row.sampling.repetition_penalty for row in rows)
        arrays["frequency"] = _floats(row.sampling.frequency_penalty for row in rows)
        arrays["presence"] = _floats(row.sampling.presence_penalty for row in rows)
        arrays["penalised_rows"] = np.array(penalised, dtype=np.int64)
        arrays["counts_rows"] = slots[penalised].astype(np.int64) * self.vocab_size
        arrays["ones"] = np.ones(len(penalised), dtype=np.int32)
        fresh = []
        for i in penalised:
            state = self._state(rows[i])
            if state.next_position != rows[i].position:
                fresh.append(rows[i])
            state.next_position = rows[i].position + 1
        if fresh:
            counted = [_count(row) for row in fresh]
            at = [ids + row.slot * self.vocab_size for row, (ids, _) in zip(fresh, counted, strict=True)]
            arrays["fresh_slots"] = np.array([row.slot for row in fresh], dtype=np.int64)
            arrays["counted_at"] = np.concatenate(at)
            arrays["counted"] = np.concatenate([amounts for _, amounts in counted])

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
