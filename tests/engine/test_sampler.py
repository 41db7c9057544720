"""From logits to tokens: against transformers' logits processors, against the distributions
themselves, and by hand."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine.whole_sampler import WholeSampler
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pdserve.engine.sampling.device_copies import to_device_packed
from pdserve.engine.sampling.rules.slot_edits import SlotEdits
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.sampling.sampled_tokens import Sampled
from pdserve.engine.sampling.staged_rows import Arrays
from pdserve.kernels.ops import TORCH, Ops, ops_for
from pdserve.kernels.sampling import reference
from pdserve.protocol.events import TokenLogprob
from pdserve.protocol.sampling_params import MAX_LOGIT_BIAS, MAX_SEED, SamplingParams

VOCAB = 50
CPU = torch.device("cpu")


def logits_of(num_rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def sampler_of(
    vocab: int = VOCAB, max_num_seqs: int = 16, ops: Ops = TORCH, device: str = "cpu"
) -> WholeSampler:
    return WholeSampler(vocab, max_num_seqs, ops, device)


def row_of(
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    choice: int = 0,
    stops: Any = (),
    slot: int = 1,
    **sampling: Any,
) -> SampleRow:
    params = SamplingParams(**{"seed": 0, **sampling})
    return SampleRow(
        params, choice, slot, [*prompt, *output], len(prompt), frozenset(stops), len(output)
    )


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[Sampled]:
    """Sample with a new sampler that has a slot for each row."""
    rows = [replace(row, slot=i + 1) for i, row in enumerate(rows)]
    return sampler_of(logits.shape[-1], len(rows)).sample(logits, rows).fetch()


def tokens(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return ids_of(sample(logits, rows))


def ids_of(samples: list[Sampled]) -> list[int]:
    return [token for sampled in samples for token in sampled.token_ids]


def score(sampler: WholeSampler, logits: torch.Tensor, targets: list[int], num_top: int) -> Any:
    return sampler.on_device.score(logits, np.array(targets, dtype=np.int32), num_top)


def adjusted(row: SampleRow, logits: torch.Tensor | None = None) -> torch.Tensor:
    sampler = sampler_of()
    staged = sampler.stage([row])
    given = logits_of() if logits is None else logits
    return sampler.on_device._changed(given, staged, sampler.on_device._send(staged.rules))[0]


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    rows = [SampleRow(params, 0, 1, [], 0, frozenset())] * len(logits)
    staged = to_device_packed(WholeSampler(logits.shape[-1], 1).stage(rows).draws, CPU)
    scaled = logits / params.temperature
    if "top_k" in staged:
        names = ("temperature", "top_k", "top_p", "min_p")
        value, last = (
            x[:, None] for x in reference.cut_tokens(logits, *(staged[name] for name in names))
        )
        outside = (logits < value) | ((logits == value) & (torch.arange(logits.shape[-1]) > last))
        scaled = scaled.masked_fill(outside, -math.inf)
    return scaled.softmax(-1)


WARPERS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "top_k": ({"top_k": 5}, [TopKLogitsWarper(5)]),
    "top_k of 1": ({"top_k": 1}, [TopKLogitsWarper(1)]),
    "top_k beyond the vocabulary": ({"top_k": 99}, [TopKLogitsWarper(99)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "tiny top_p": ({"top_p": 1e-6}, [TopPLogitsWarper(1e-6)]),
    "min_p": ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    "all": (
        {"temperature": 1.3, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
        [
            TemperatureLogitsWarper(1.3),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.7),
            MinPLogitsWarper(0.05),
        ],
    ),
}


@pytest.mark.parametrize("case", WARPERS)
def test_filters_equal_transformers(case: str) -> None:
    sampling, warpers = WARPERS[case]
    logits = logits_of(64, seed=1)
    expected = logits
    for warper in warpers:
        expected = warper(None, expected)
    got = distribution(logits, SamplingParams(**sampling))
    assert torch.equal(got > 0, expected.softmax(-1) > 0)
    torch.testing.assert_close(got, expected.softmax(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_off(top_k: int) -> None:
    logits = logits_of(3)
    torch.testing.assert_close(
        distribution(logits, SamplingParams(top_k=top_k)), logits.softmax(-1)
    )


@pytest.mark.parametrize("penalty", [1.3, 0.6])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    ids = [3, 9, 9, 20, 41, 3]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits_of().clone())[
        0
    ]
    row = row_of(tuple(ids[:3]), tuple(ids[3:]), repetition_penalty=penalty)
    torch.testing.assert_close(adjusted(row), expected)
    assert not torch.equal(expected, logits_of()[0])


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    row = row_of((5, 6), (7, 7, 7, 5), presence_penalty=0.5, frequency_penalty=0.25)
    change = adjusted(row) - logits_of()[0]
    expected = torch.zeros(VOCAB)
    expected[7] = -0.5 - 0.75
    expected[5] = -0.5 - 0.25
    torch.testing.assert_close(change, expected)
    assert torch.equal(adjusted(row_of((5, 6), presence_penalty=2.0)), logits_of()[0])


def test_negative_penalties_encourage() -> None:
    change = adjusted(row_of((), (7,), frequency_penalty=-1.5)) - logits_of()[0]
    assert change[7].item() == pytest.approx(1.5) and change.count_nonzero() == 1


def test_logit_bias() -> None:
    change = adjusted(row_of(logit_bias={3: 2.5, 0: -100})) - logits_of()[0]
    assert (change[3].item(), change[0].item()) == pytest.approx(
        (2.5, -100)
    ) and change.count_nonzero() == 2
    assert tokens(logits_of(), [row_of(temperature=0, logit_bias={17: 100})]) == [17]


def test_bias_comes_before_the_penalties() -> None:
    row = row_of((3,), logit_bias={3: 10.0}, repetition_penalty=2.0)
    assert adjusted(row, torch.full((1, VOCAB), -4.0))[3].item() == 3.0


@pytest.mark.parametrize("num_output", [0, 1, 2, 3])
def test_stop_tokens_are_masked_before_min_tokens(num_output: int) -> None:
    logits = logits_of()
    logits[0, 4] = 50.0
    logits[0, 8] = 40.0
    row = row_of(
        output=(1,) * num_output, stops={4, 8}, min_tokens=2, temperature=0, logit_bias={4: 100}
    )
    assert (tokens(logits, [row]) == [4]) == (num_output >= 2)
    assert (adjusted(row, logits)[[4, 8]] == -math.inf).all().item() == (num_output < 2)


def test_the_logits_given_are_left_alone() -> None:
    logits = logits_of(2)
    before = logits.clone()
    sample(
        logits,
        [
            row_of(logit_bias={1: 5.0}, repetition_penalty=1.5),
            row_of(top_k=3, stops={2}, min_tokens=1),
        ],
    )
    assert torch.equal(logits, before)


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [9, 30]] = 1.0
    logits[1, 49] = 1.0
    rows = [row_of(temperature=0), row_of(temperature=9e-6), row_of(temperature=0)]
    assert tokens(logits, rows) == [9, 49, 0]


def draw_many(logits: torch.Tensor, count: int, **sampling: Any) -> torch.Tensor:
    """Counts of `count` draws at different positions from one distribution."""
    rows = [row_of((), tuple([0] * i), seed=99, **sampling) for i in range(count)]
    return torch.bincount(
        torch.tensor(tokens(logits.expand(count, -1), rows)), minlength=logits.shape[-1]
    ).double()


DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.5},
    "filtered": {"top_k": 8, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("case", DISTRIBUTIONS)
def test_draws_follow_the_distribution(case: str) -> None:
    logits = logits_of(seed=5, vocab=12)
    count = 3000
    sampling = DISTRIBUTIONS[case]
    counts = draw_many(logits, count, **sampling)
    expected = distribution(logits, SamplingParams(**sampling))[0].double() * count
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 6


def test_the_distribution_test_can_fail() -> None:
    logits = logits_of(seed=5, vocab=12)
    count = 3000
    wrong = distribution(logits, SamplingParams(temperature=1.15))[0].double() * count
    statistic = ((draw_many(logits, count) - wrong) ** 2 / wrong).sum().item()
    assert statistic > 11 + 6 * math.sqrt(22) + 6


def test_seeds_choices_and_positions_draw_apart_and_repeat() -> None:
    flat = torch.zeros(1, 1000)
    variants = [
        row_of(seed=1),
        row_of(seed=2),
        row_of(seed=1, choice=1),
        row_of(output=(0,), seed=1),
        row_of(seed=1 << 40),
        row_of(seed=-1),
    ]
    drawn = [tokens(flat, [row])[0] for row in variants]
    assert len(set(drawn)) == len(drawn)
    assert drawn == [tokens(flat, [row])[0] for row in variants]
    moved = row_of((7, 7, 7), (0,), seed=1)  # positions count the output, whatever the prompt
    assert tokens(flat, [moved]) == [drawn[3]]


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Not even when the others ask for every filter and penalty there is."""
    rows = [
        row_of(seed=1),
        row_of(temperature=0, logprobs=2),
        row_of(seed=3, top_k=4),
        row_of(seed=4, top_p=0.5, temperature=0.3, logprobs=0),
        row_of((1,), (2, 3), seed=5, min_p=0.2, presence_penalty=1.0),
        row_of((1,), (2, 3), seed=6, repetition_penalty=1.7, logit_bias={3: 4.0}, logprobs=50),
        row_of(stops={5}, min_tokens=3, seed=7),
    ]
    logits = logits_of(len(rows), seed=2)
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    backwards = sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


def test_logprobs_are_of_the_unchanged_distribution() -> None:
    logits = logits_of()
    row = row_of(temperature=0, logit_bias={31: 100}, logprobs=3)
    [sampled] = sample(logits, [row])
    logp = logits[0].log_softmax(-1)
    assert sampled.token_ids == (31,) and sampled.logprobs is not None
    [entry] = sampled.logprobs
    assert entry.logprob == pytest.approx(logp[31].item(), abs=1e-6)
    assert entry.rank == 1 + int((logp > logp[31]).sum()) > 1
    assert [token for token, _ in entry.top] == logp.topk(3).indices.tolist()


def test_numbers_of_alternatives() -> None:
    rows = [row_of(temperature=0, logprobs=count) for count in (None, 0, 2, VOCAB + 10)]
    first, *others = [sampled.logprobs for sampled in sample(logits_of(4), rows)]
    assert first is None
    entries = [entry for logprobs in others for entry in logprobs or ()]
    assert [len(entry.top) for entry in entries] == [0, 2, VOCAB]
    assert math.fsum(math.exp(p) for _, p in entries[2].top) == pytest.approx(1.0, abs=1e-5)


def test_scores_of_given_tokens() -> None:
    logits = logits_of(5)
    sampler = sampler_of()
    scores = score(sampler, logits, [4, 3, 2, 1, 0], 2).fetch()
    logp = logits.log_softmax(-1)
    for i, entry in enumerate(scores):
        assert entry.token_id == 4 - i
        assert entry.logprob == pytest.approx(logp[i, 4 - i].item(), abs=1e-6)
        assert [token for token, _ in entry.top] == logp[i].topk(2).indices.tolist()


def test_alternatives_are_looked_up_in_bounded_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score(sampler_of(), logits_of(9), [3] * 9, 4).fetch()
    monkeypatch.setattr("pdserve.engine.sampling.sampler.TOP_ENTRIES", 10)
    seen: list[int] = []

    def spy(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> Any:
        seen.append(len(logits) * num_top)
        return token_logprobs(logits, tokens, num_top)

    token_logprobs = reference.token_logprobs
    monkeypatch.setattr(reference, "token_logprobs", spy)
    assert score(sampler_of(), logits_of(9), [3] * 9, 4).fetch() == whole
    assert len(seen) == 5 and max(seen) <= 10


def test_equal_logits_share_the_better_rank() -> None:
    [entry] = score(sampler_of(4), torch.tensor([[1.0, 3.0, 3.0, 0.0]]), [2], 0).fetch()
    assert isinstance(entry, TokenLogprob) and entry.rank == 1


GOLDEN_ROWS: list[dict[str, Any]] = [
    {"seed": 0},
    {"seed": -1},
    {"seed": MAX_SEED},
    {"seed": 12345, "choice": 3},
    {"seed": 7, "output": (500, 501, 502, 503, 504), "temperature": 0.7},
    {"seed": 1 << 40, "top_k": 20},
    {"seed": 5, "top_p": 0.9},
    {"seed": 9, "min_p": 0.3},
    {"seed": 2, "top_k": 40, "top_p": 0.5, "temperature": 1.5},
    {
        "seed": 3,
        "output": (500, 501),
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    {"seed": 4, "logit_bias": {7: 3.0}},
    {"temperature": 0},
]
GOLDEN_TOKENS = [997, 725, 905, 917, 424, 499, 374, 630, 238, 237, 371, 200]


def golden_logits() -> torch.Tensor:
    """Make 12 x 1000 logits that are exact in every float type's arithmetic."""
    numbers = torch.arange(len(GOLDEN_ROWS) * 1000, dtype=torch.int64)
    return ((numbers * 2654435761 % 65536).float() / 8192).view(-1, 1000)


def golden_rows() -> list[SampleRow]:
    return [row_of((1, 2, 3), slot=i + 1, **row) for i, row in enumerate(GOLDEN_ROWS)]


def test_the_draws_never_change() -> None:
    """A request that resumes on another host, or after an update, must draw the same."""
    assert tokens(golden_logits(), golden_rows()) == GOLDEN_TOKENS


# --- what stays on the device between samples ---

PENALTIES: dict[str, Any] = {
    "presence_penalty": 0.8,
    "frequency_penalty": 0.6,
    "repetition_penalty": 1.4,
}


class Sequences:
    """Some sequences that sample one token a step from logits of their own, collected `lag` steps
    later."""

    def __init__(
        self, sampler: WholeSampler, lag: int, rows: list[SampleRow], vocab: int = VOCAB
    ) -> None:
        self.sampler = sampler
        self.lag = lag
        self.rows = rows
        self.vocab = vocab
        self.in_flight: list[Any] = []
        self.outputs: list[list[int]] = [[] for _ in rows]

    def step(self, step: int) -> None:
        logits = logits_of(len(self.rows), 100 + step, self.vocab).to(self.sampler.device)
        self.in_flight.append(self.sampler.sample(logits, self.rows))
        for row in self.rows:
            row.position += 1
        if len(self.in_flight) > self.lag:
            self.collect()

    def collect(self) -> None:
        for row, output, sampled in zip(
            self.rows, self.outputs, self.in_flight.pop(0).fetch(), strict=True
        ):
            row.token_ids += sampled.token_ids
            output += sampled.token_ids


def mixed_rows() -> list[SampleRow]:
    return [
        row_of((1, 2, 3, 2), slot=3, temperature=0, **PENALTIES),
        row_of((5,), (7, 7, 9), slot=1, seed=4, **PENALTIES),
        row_of((5,), slot=6, temperature=0),
        row_of((5,), slot=2, temperature=0, presence_penalty=2.0, logprobs=1),
        row_of((5,), slot=4, temperature=0, logit_bias={8: 3.0}, stops={4, 9}, min_tokens=3),
    ]


def run_steps(sampler: WholeSampler, lag: int, num_steps: int = 12) -> list[list[int]]:
    sequences = Sequences(sampler, lag, mixed_rows())
    for step in range(num_steps):
        sequences.step(step)
    while sequences.in_flight:
        sequences.collect()
    return sequences.outputs


def test_tokens_in_flight_count_once() -> None:
    """The penalties see every token exactly once, whether the host knows it yet or not."""
    at_once = run_steps(sampler_of(), 0)
    assert run_steps(sampler_of(), 1) == run_steps(sampler_of(), 3) == at_once
    # counted from the host's tokens at each step
    afresh: list[list[int]] = [[] for _ in mixed_rows()]
    for step in range(12):
        rows = [
            replace(row, token_ids=row.token_ids + output, position=row.position + len(output))
            for row, output in zip(mixed_rows(), afresh, strict=True)
        ]
        for output, token in zip(
            afresh, tokens(logits_of(len(rows), 100 + step), rows), strict=True
        ):
            output.append(token)
    assert afresh == at_once
    assert len(set(at_once[3])) > len(set(at_once[2])), "the penalties change nothing here"


def test_a_slot_forgets_its_sequence() -> None:
    sampler = sampler_of()
    run_steps(sampler, 1)
    for slot in range(1, 7):
        sampler.staging.release(slot)
    assert run_steps(sampler, 0) == run_steps(sampler_of(), 0)


def test_a_sequence_that_starts_over_is_counted_anew() -> None:
    """A position that does not follow the last one: what the device counted is not this sequence's
    history."""
    sampler = sampler_of()
    logits = logits_of(seed=3)
    first = row_of(slot=2, temperature=0, **PENALTIES)
    sampler.sample(logits, [first])
    again = row_of((1, 2), (30, 31, 30), slot=2, temperature=0, **PENALTIES)
    assert sampler.sample(logits, [again]).fetch() == sample(logits, [again])


class Slots:
    """The arrays that rules which edit single logits send."""

    def __init__(self) -> None:
        self.sampler = sampler_of()

    def changed(self, *rows: SampleRow) -> dict[int, dict[int, float]]:
        """The edits that are sent: of each slot."""
        sent: dict[int, dict[int, float]] = {}
        for name, arrays in self.sampler.stage(list(rows)).rules.items():
            if "changed_slots" not in arrays:
                assert not any(name.startswith("changed") for name in arrays)
                continue
            [width] = [
                rule.width
                for rule in self.sampler.rules
                if isinstance(rule, SlotEdits) and rule.name == name
            ]
            for slot, count in self._counts(arrays):
                sent.setdefault(slot, {}).update(self._of(slot, count, width, arrays))
        return sent

    def _counts(self, arrays: Arrays) -> list[tuple[int, int]]:
        return list(
            zip(arrays["changed_slots"].tolist(), arrays["changed_counts"].tolist(), strict=True)
        )

    def _of(self, slot: int, count: int, width: int, arrays: Arrays) -> dict[int, float]:
        mine = (arrays["changed_at"] // width) == slot
        assert sorted(arrays["changed_at"][mine] % width) == list(range(count))
        return dict(
            zip(
                arrays["changed_ids"][mine].tolist(),
                arrays["changed_values"][mine].tolist(),
                strict=True,
            )
        )


def later(row: SampleRow, steps: int = 1) -> SampleRow:
    row.position += steps
    return row


def test_only_edits_that_change_are_sent() -> None:
    slots = Slots()
    biased = row_of(slot=3, temperature=0, logit_bias={8: 3.0, 4: -1.0}, stops={4, 9}, min_tokens=2)
    plain = row_of(slot=1)
    masked = row_of(slot=2, stops={7}, min_tokens=2)
    masks = -math.inf
    assert slots.changed(plain, biased) == {3: {8: 3.0, 4: masks, 9: masks}}
    assert slots.changed(later(biased), later(plain)) == {}, "wherever its row is by now"
    assert slots.changed(later(plain), masked, later(biased)) == {2: {7: masks}}, "one joins"
    assert slots.changed(later(masked), later(biased)) == {}
    assert slots.changed(later(masked)) == {}
    slots.sampler.staging.release(3)
    other = row_of(slot=3, logit_bias={1: 1.0})
    assert slots.changed(other) == {3: {1: 1.0}}
    assert slots.changed(row_of(slot=3, logit_bias={2: 1.0})) == {3: {2: 1.0}}, (
        "another sequence in the slot"
    )


def test_masks_end_with_min_tokens_and_biases_stay() -> None:
    sampler = sampler_of()
    row = row_of(logit_bias={8: 3.0}, stops={4}, min_tokens=2)
    rules = [list(sampler.stage([row]).rules)]
    rules += [list(sampler.stage([later(row)]).rules) for _ in range(2)]
    assert rules == [["bias", "stop_mask"], ["bias", "stop_mask"], ["bias"]]


def test_choices_of_a_request_share_the_arrays_of_their_stop_tokens() -> None:
    stops = frozenset(range(40))
    rows = [replace(row_of(slot=1 + i, min_tokens=1), stop_token_ids=stops) for i in range(3)]
    sampler = sampler_of()
    sampler.stage(rows)
    assert len({id(state.edits) for row in rows for _, state in row.states}) == 1


def test_a_step_sends_little_of_many_edits() -> None:
    """A step of 64 rows with all the biases that there can be, behind the first."""
    params = SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0))
    sampler = sampler_of(MAX_LOGIT_BIAS, 64)
    rows = [SampleRow(params, i, i + 1, [1], 1, frozenset()) for i in range(64)]
    sent = []
    for _ in range(3):
        staged = sampler.stage([later(row) for row in rows])
        assert not staged.draws
        sent.append(sum(a.nbytes for arrays in staged.rules.values() for a in arrays.values()))
    assert sent[0] > 64 * MAX_LOGIT_BIAS * 8 and sent[1] == sent[2] == 64 * 4


def test_rows_keep_their_edits_when_their_order_changes() -> None:
    sampler = sampler_of()
    logits = logits_of(3)
    rows = [row_of(slot=5, temperature=0, logit_bias={17: 100}), row_of(slot=2, temperature=0)]
    rows.append(row_of(slot=9, temperature=0, logit_bias={23: 100}, stops={23}, min_tokens=1))
    alone = [tokens(logits[:1], [row])[0] for row in rows]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        drawn = sampler.sample(logits[:1].expand(3, -1), [rows[i] for i in order]).fetch()
        assert ids_of(drawn) == [alone[i] for i in order]
    assert alone[0] == 17 and alone[2] == alone[1] != 23


def test_unknown_tokens_cannot_be_counted() -> None:
    with pytest.raises(AssertionError, match="in flight"):
        sampler_of().sample(logits_of(), [replace(row_of(**PENALTIES), position=1)])
    with pytest.raises(AssertionError, match="slot 5 lies outside"):
        sampler_of(max_num_seqs=4).sample(logits_of(), [row_of(slot=5, **PENALTIES)])


def test_all_greedy_rows_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(*_: Any) -> None:
        raise AssertionError("something was sent")

    rows = [row_of(temperature=0, slot=i + 1, top_k=3, min_tokens=4, logprobs=1) for i in range(3)]
    want = tokens(logits_of(3), rows)
    monkeypatch.setattr("pdserve.engine.sampling.sampler.to_device_packed", send)
    assert ids_of(sampler_of().sample(logits_of(3), rows).fetch()) == want
    with pytest.raises(AssertionError, match="something was sent"):
        sampler_of().sample(logits_of(), [row_of()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_widened(dtype: torch.dtype) -> None:
    logits = golden_logits().to(dtype)
    narrow, wide = (sampler_of(1000).sample(x, golden_rows()) for x in (logits, logits.float()))
    assert narrow.fetch() == wide.fetch()
    assert narrow.token_ids.dtype == torch.int32


@pytest.mark.gpu
class TestOnTheDevice:
    def on_gpu(self, vocab: int = VOCAB, max_num_seqs: int = 16) -> WholeSampler:
        return sampler_of(vocab, max_num_seqs, ops_for(torch.device("cuda")), "cuda")

    def test_the_draws_are_the_cpus(self) -> None:
        sampled = self.on_gpu(1000).sample(golden_logits().cuda(), golden_rows()).fetch()
        assert ids_of(sampled) == GOLDEN_TOKENS

    def test_tokens_in_flight_count_once(self) -> None:
        assert (
            run_steps(self.on_gpu(), 0) == run_steps(self.on_gpu(), 2) == run_steps(sampler_of(), 0)
        )

    def test_logprobs_are_the_cpus(self) -> None:
        rows = [
            replace(row, sampling=SamplingParams(seed=1, logprobs=i))
            for i, row in enumerate(golden_rows())
        ]
        on_gpu, on_cpu = (
            [s.logprobs for s in sampler.sample(golden_logits().to(sampler.device), rows).fetch()]
            for sampler in (self.on_gpu(1000), sampler_of(1000))
        )
        for theirs, ours in zip(on_gpu, on_cpu, strict=True):
            assert theirs is not None and ours is not None
            [a], [b] = theirs, ours
            assert (a.token_id, a.rank, len(a.top)) == (b.token_id, b.rank, len(b.top))
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=1e-5)

    def test_nothing_waits_for_the_device(self) -> None:
        sampler = self.on_gpu(1000)
        logits = golden_logits().cuda()
        rows = [replace(row, sampling=replaced(row.sampling, logprobs=3)) for row in golden_rows()]
        rows[0] = replace(
            rows[0],
            stop_token_ids=frozenset({3}),
            sampling=replaced(rows[0].sampling, min_tokens=9),
        )
        sampler.sample(logits, rows).fetch()  # compiles
        sampler.staging.release(10)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(1_000_000_000)
            sampled = sampler.sample(logits, rows)
            scores = score(sampler, logits, [1] * len(rows), 2)
            asleep = torch.cuda.Event()
            asleep.record()
            assert not asleep.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda._sleep(4_000_000_000)  # behind the sample: fetch must not wait for it
        behind = torch.cuda.Event()
        behind.record()
        assert len(sampled.fetch()) == len(scores.fetch()) == len(rows)
        assert not behind.query()

    def test_memory_stays_within_what_is_said(self) -> None:
        vocab = 128256
        num_rows = 64
        sampler = self.on_gpu(vocab, num_rows)
        logits = torch.randn(num_rows, vocab, device="cuda")
        bias = dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)
        every: dict[str, Any] = {"top_p": 0.9, "logprobs": 20, "logit_bias": bias, **PENALTIES}
        rows = [row_of(slot=i + 1, seed=i, **every) for i in range(num_rows)]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        sampler.sample(logits, rows).fetch()
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= sampler.on_device.peak_bytes(num_rows) + sampler.on_device.state_bytes()
        assert peak >= num_rows * vocab * 4 + sampler.on_device.state_bytes()


def replaced(params: SamplingParams, **changes: Any) -> SamplingParams:
    return msgspec.structs.replace(params, **changes)


def test_packed_arrays_arrive_whole() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arrays = {
        "odd": np.arange(3, dtype=np.int32),
        "wide": np.arange(5, dtype=np.int64) << 40,
        "floats": np.linspace(0, 1, 7, dtype=np.float32),
    }
    for name, tensor in to_device_packed(arrays, device).items():
        assert tensor.device.type == device.type
        assert (
            np.array_equal(tensor.cpu().numpy(), arrays[name])
            and tensor.cpu().numpy().dtype == arrays[name].dtype
        )
