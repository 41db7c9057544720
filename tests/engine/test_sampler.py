"""From logits to tokens: against transformers' logits processors, against the distributions themselves, and by hand."""

import math
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pdserve.engine.protocol import SamplingParams
from pdserve.engine.sampler import SampleRow, _adjust, _filter, sample, token_logprobs

VOCAB = 50


def logits_of(num_rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def row_of(
    prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), choice: int = 0, stops: Any = (), **sampling: Any
) -> SampleRow:
    params = SamplingParams(**{"seed": 0, **sampling})
    return SampleRow(params, choice, [*prompt, *output], len(prompt), frozenset(stops))


def tokens(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return [sampled.token_id for sampled in sample(logits, rows)]


def adjusted(row: SampleRow, logits: torch.Tensor | None = None) -> torch.Tensor:
    return _adjust(logits_of() if logits is None else logits, [row])[0]


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return _filter(logits / params.temperature, [params] * len(logits)).softmax(-1)


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
        [TemperatureLogitsWarper(1.3), TopKLogitsWarper(20), TopPLogitsWarper(0.7), MinPLogitsWarper(0.05)],
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
    torch.testing.assert_close(distribution(logits, SamplingParams(top_k=top_k)), logits.softmax(-1))


@pytest.mark.parametrize("penalty", [1.3, 0.6])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    ids = [3, 9, 9, 20, 41, 3]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits_of().clone())[0]
    row = row_of(tuple(ids[:3]), tuple(ids[3:]), repetition_penalty=penalty)
    torch.testing.assert_close(adjusted(row), expected)
    assert not torch.equal(expected, logits_of()[0])


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    row = row_of((5, 6), (7, 7, 7, 5), presence_penalty=0.5, frequency_penalty=0.25)
    change = adjusted(row) - logits_of()[0]
    expected = torch.zeros(VOCAB)
    expected[7], expected[5] = -0.5 - 0.75, -0.5 - 0.25
    torch.testing.assert_close(change, expected)
    assert torch.equal(adjusted(row_of((5, 6), presence_penalty=2.0)), logits_of()[0])


def test_negative_penalties_encourage() -> None:
    change = adjusted(row_of((), (7,), frequency_penalty=-1.5)) - logits_of()[0]
    assert change[7].item() == pytest.approx(1.5) and change.count_nonzero() == 1


def test_logit_bias() -> None:
    change = adjusted(row_of(logit_bias={3: 2.5, 0: -100})) - logits_of()[0]
    assert (change[3].item(), change[0].item()) == pytest.approx((2.5, -100)) and change.count_nonzero() == 2
    assert tokens(logits_of(), [row_of(temperature=0, logit_bias={17: 100})]) == [17]


def test_bias_comes_before_the_penalties() -> None:
    row = row_of((3,), logit_bias={3: 10.0}, repetition_penalty=2.0)
    assert adjusted(row, torch.full((1, VOCAB), -4.0))[3].item() == 3.0


@pytest.mark.parametrize("num_output", [0, 1, 2, 3])
def test_stop_tokens_are_masked_before_min_tokens(num_output: int) -> None:
    logits = logits_of()
    logits[0, 4], logits[0, 8] = 50.0, 40.0
    row = row_of(output=(1,) * num_output, stops={4, 8}, min_tokens=2, temperature=0, logit_bias={4: 100})
    assert (tokens(logits, [row]) == [4]) == (num_output >= 2)
    assert (adjusted(row, logits)[[4, 8]] == -math.inf).all().item() == (num_output < 2)


def test_the_logits_given_are_left_alone() -> None:
    logits = logits_of(2)
    before = logits.clone()
    sample(logits, [row_of(logit_bias={1: 5.0}, repetition_penalty=1.5), row_of(top_k=3, stops={2}, min_tokens=1)])
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
    return torch.bincount(torch.tensor(tokens(logits.expand(count, -1), rows)), minlength=logits.shape[-1]).double()


DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.5},
    "filtered": {"top_k": 8, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("case", DISTRIBUTIONS)
def test_draws_follow_the_distribution(case: str) -> None:
    logits, count = logits_of(seed=5, vocab=12), 3000
    sampling = DISTRIBUTIONS[case]
    counts = draw_many(logits, count, **sampling)
    expected = distribution(logits, SamplingParams(**sampling))[0].double() * count
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 6


def test_the_distribution_test_can_fail() -> None:
    logits, count = logits_of(seed=5, vocab=12), 3000
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
    assert sampled.token_id == 31 and sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(logp[31].item(), abs=1e-6)
    assert sampled.logprob.rank == 1 + int((logp > logp[31]).sum()) > 1
    assert [token for token, _ in sampled.logprob.top] == logp.topk(3).indices.tolist()


def test_numbers_of_alternatives() -> None:
    logits = logits_of(4)
    entries = token_logprobs(logits, [0, 1, 2, 3], [None, 0, 2, VOCAB + 10])
    assert entries[0] is None
    assert [len(entry.top) for entry in entries[1:]] == [0, 2, VOCAB]  # type: ignore[union-attr]
    assert token_logprobs(logits, [0] * 4, [None] * 4) == [None] * 4
    assert entries[3] is not None and math.fsum(math.exp(p) for _, p in entries[3].top) == pytest.approx(1.0, abs=1e-5)


def test_equal_logits_share_the_better_rank() -> None:
    [entry] = token_logprobs(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), [2], [0])
    assert entry is not None and entry.rank == 1
