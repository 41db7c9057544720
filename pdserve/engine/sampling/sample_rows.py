"""What a step's rows ask of the sampler, as small arrays that go to the device in one copy.

Edits of single logits (biases and masked stop tokens), penalties, temperatures, keys and filters,
each array present only when some row needs it. What a slot keeps on the device, its edits and its
token counts, is sent when it changes: when a row joins, and when it reaches min_tokens. Host only:
knows neither logits nor device. `SampleRow`s are made by the engine; `RowStaging` is called by the
sampler.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pdserve.engine.sampling.randomness import Purpose, row_keys
from pdserve.kernels.sampling.reference import IN_PROMPT, NEG_INF
from pdserve.protocol.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

RowArrays = dict[str, np.ndarray]
Edits = tuple[np.ndarray, np.ndarray]
"""Distinct token ids (int32), and what is added to their logits (float32)."""


def max_edits(num_eos: int) -> int:
    """The most edits that a row can have: of a model with so many end-of-sequence tokens."""
    return MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + num_eos


@dataclass(frozen=True)
class SampleRow:
    """What sampling needs to know of one choice. Stop tokens are masked before min_tokens.

    slot: 1..num_slots, the sequence's own from its first sample to `Sampler.release`; no two rows
    of a step share one. position: of the token to sample among the generated ones, those in flight
    included. token_ids: prompt and output so far, without tokens in flight; not copied, since a
    step must not cost more the longer its sequences are.
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

    @property
    def is_edited(self) -> bool:
        return bool(self.sampling.logit_bias) or self.masks_stops


@dataclass
class _SlotState:
    """What the device has of a slot. next_position: that of the token which its counts lack; None:
    no counts. edits_of: whose edits are there; None: nobody's. masks_stops: whether these mask stop
    tokens.
    """

    next_position: int | None = None
    edits_of: SamplingParams | None = None
    masks_stops: bool = False


class RowStaging:
    """Makes the arrays of one step after another. `changed_at` are flat positions in the tables of
    edits `[num_slots + 1, max_edits]`, `counted_at` and `counts_rows` in the token counts
    `[num_slots + 1, vocab]`.
    """

    def __init__(self, vocab_size: int, num_slots: int, max_edits: int) -> None:
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self.max_edits = max_edits
        self._slots: dict[int, _SlotState] = {}

    def release(self, slot: int) -> None:
        """The slot's sequence is gone: the next one there starts anew."""
        self._slots.pop(slot, None)

    def stage(self, rows: list[SampleRow]) -> RowArrays:
        """The arrays of these rows by name: none when all are greedy and unedited. AssertionError
        for a slot outside
        1..num_slots, and for penalties whose tokens are partly unknown.
        """
        arrays: RowArrays = {}
        self._stage_edits(arrays, rows)
        self._stage_penalties(arrays, rows)
        self._stage_draws(arrays, rows)
        return arrays

    def _stage_draws(self, arrays: RowArrays, rows: list[SampleRow]) -> None:
        """Temperatures and keys when a row is drawn, filters when a drawn row has one."""
        params = [row.sampling for row in rows]
        drawn = [p for p in params if not p.greedy]
        if not drawn:
            return
        numbers = np.array(
            [(p.seed or 0, r.choice, r.position) for p, r in zip(params, rows, strict=True)],
            np.int64,
        )
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
        """The slots of the rows that have edits, and those edits which the device does not have."""
        edited = [i for i, row in enumerate(rows) if row.is_edited]
        if not edited:
            return
        slots = np.zeros(len(rows), dtype=np.int32)
        slots[edited] = [rows[i].slot for i in edited]
        arrays["edited_slots"] = slots
        changed = [rows[i] for i in edited if self._edits_change(rows[i])]
        if not changed:
            return
        made: dict[tuple[int, bool], Edits] = {}  # choices of a request have the same
        for row in changed:
            if (id(row.sampling), row.masks_stops) not in made:
                made[id(row.sampling), row.masks_stops] = _edits(row)
        edits = [made[id(row.sampling), row.masks_stops] for row in changed]
        starts = [row.slot * self.max_edits for row in changed]
        at = [
            np.arange(start, start + len(ids))
            for start, (ids, _) in zip(starts, edits, strict=True)
        ]
        arrays["changed_slots"] = np.array([row.slot for row in changed], dtype=np.int64)
        arrays["changed_counts"] = np.array([len(ids) for ids, _ in edits], dtype=np.int32)
        arrays["changed_at"] = np.concatenate(at)
        arrays["changed_ids"] = np.concatenate([ids for ids, _ in edits])
        arrays["changed_values"] = np.concatenate([values for _, values in edits])

    def _edits_change(self, row: SampleRow) -> bool:
        """Whether the device has other edits in the row's slot than the row needs; it will have
        these."""
        state = self._state(row)
        masks_stops = row.masks_stops
        if state.edits_of is row.sampling and state.masks_stops == masks_stops:
            return False
        state.edits_of = row.sampling
        state.masks_stops = masks_stops
        return True

    def _stage_penalties(self, arrays: RowArrays, rows: list[SampleRow]) -> None:
        penalised = [i for i, row in enumerate(rows) if row.has_penalties]
        if not penalised:
            return
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
            at = [
                ids + row.slot * self.vocab_size
                for row, (ids, _) in zip(fresh, counted, strict=True)
            ]
            arrays["fresh_slots"] = np.array([row.slot for row in fresh], dtype=np.int64)
            arrays["counted_at"] = np.concatenate(at)
            arrays["counted"] = np.concatenate([amounts for _, amounts in counted])

    def _state(self, row: SampleRow) -> _SlotState:
        assert 0 < row.slot <= self.num_slots, f"slot {row.slot} lies outside 1..{self.num_slots}"
        return self._slots.setdefault(row.slot, _SlotState())


def _edits(row: SampleRow) -> Edits:
    """A masked token's bias does not matter."""
    edits: dict[int, float] = dict(row.sampling.logit_bias or {})
    if row.masks_stops:
        edits |= dict.fromkeys(row.stop_token_ids, NEG_INF)
    return np.array(list(edits), dtype=np.int32), _floats(edits.values())


def _count(row: SampleRow) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (int64) and what the counts of apply_penalties (int32) add for each; ids may come
    twice."""
    known = len(row.token_ids) - row.num_prompt_tokens
    assert known == row.position, (
        "a sequence's first penalised sample cannot lie behind tokens in flight"
    )
    tokens = np.array(row.token_ids, dtype=np.int64)
    prompt = np.unique(tokens[: row.num_prompt_tokens])
    amounts = np.ones(len(prompt) + known, dtype=np.int32)
    amounts[: len(prompt)] = IN_PROMPT
    return np.concatenate((prompt, tokens[row.num_prompt_tokens :])), amounts


def _floats(values: Iterable[float]) -> np.ndarray:
    return np.fromiter(values, dtype=np.float32)
