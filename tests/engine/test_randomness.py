"""The counter-based random numbers are a fixed function of their coordinates, uniform, and
independent over each of them."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.engine.sampling.randomness import Purpose, row_keys
from pdserve.kernels.sampling.reference import gumbel
from pdserve.protocol.sampling_params import MAX_SEED

FROZEN_KEY = [42661198]
FROZEN_GUMBEL = [0.418657, 2.03418, 1.328948]


def keys(
    seed: int = 0, choice: int = 0, position: int = 0, purpose: Purpose = Purpose.SAMPLE
) -> torch.Tensor:
    seeds, choices, positions = (
        np.array([number], dtype=np.int64) for number in (seed, choice, position)
    )
    return keys_of(seeds, choices, positions, purpose)


def keys_of(
    seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray, purpose: Purpose = Purpose.SAMPLE
) -> torch.Tensor:
    return torch.from_numpy(row_keys(seeds, choices, positions, purpose))


def noise(num_tokens: int = 4096, **where: Any) -> torch.Tensor:
    return gumbel(keys(**where), torch.arange(num_tokens))[0]


def uniform(gumbels: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.exp(-gumbels.double()))


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """How many standard deviations the statistic lies above its mean."""
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_the_numbers_never_change() -> None:
    """A request that resumes on another host, or after an update, must draw the same."""
    drawn = gumbel(keys(seed=MAX_SEED, choice=3, position=77), torch.tensor([0, 1, 150_000]))
    assert keys(seed=12345, choice=1, position=2).tolist() == FROZEN_KEY
    assert drawn[0].tolist() == pytest.approx(FROZEN_GUMBEL, rel=1e-6)


def test_each_coordinate_counts() -> None:
    base: dict[str, Any] = {"seed": 5, "choice": 1, "position": 9}
    variants = [base]
    variants += [base | {"seed": seed} for seed in (6, -5, 5 + (1 << 32), MAX_SEED, -MAX_SEED)]
    variants += [base | {"choice": 2}, base | {"choice": 9, "position": 1}, base | {"position": 10}]
    variants += [
        base | {"purpose": p} for p in (Purpose.SPECULATIVE_ACCEPT, Purpose.SPECULATIVE_REJECT)
    ]
    drawn = [uniform(noise(**variant)) - 0.5 for variant in variants]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert abs((a * b).mean().item() * 12) < 5 / math.sqrt(len(a)), "correlated"


def test_uniform_over_tokens_and_over_positions() -> None:
    over_tokens = uniform(noise(1 << 16, seed=1))
    positions = np.arange(1 << 16)
    zeros = np.zeros_like(positions)
    over_positions = uniform(gumbel(keys_of(zeros, zeros, positions), torch.tensor([42]))[:, 0])
    over_seeds = uniform(gumbel(keys_of(positions, zeros, zeros), torch.tensor([7]))[:, 0])
    for values in (over_tokens, over_positions, over_seeds):
        counts = torch.histc(values, bins=256, min=0, max=1)
        assert abs(chi_square(counts, torch.full((256,), len(values) / 256))) < 5


def test_neighbours_are_independent() -> None:
    """The low bits of neighbouring positions and token ids differ in few places only."""
    zeros = np.zeros(4096, dtype=np.int64)
    grid = uniform(gumbel(keys_of(zeros, zeros, np.arange(4096)), torch.arange(16))) - 0.5
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[2:], grid[:-2])):
        assert abs((a * b).mean().item() * 12) < 5 / math.sqrt(a.numel())


def test_gumbel_moments() -> None:
    values = noise(1 << 16, seed=3)
    assert values.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=0.06)
    assert values.isfinite().all()


def test_a_shard_of_the_vocabulary_draws_its_part() -> None:
    """A rank that holds tokens 1000..1500 computes what a whole one has there; so does any subset,
    in any order."""
    row = keys(seed=8, position=4)
    whole = gumbel(row, torch.arange(4096))
    assert torch.equal(gumbel(row, torch.arange(1000, 1500)), whole[:, 1000:1500])
    some = torch.tensor([4095, 0, 17, 17])
    assert torch.equal(gumbel(row, some), whole[:, some])


def test_rows_do_not_see_each_other() -> None:
    seeds = np.arange(10)
    together = gumbel(keys_of(seeds, seeds % 3, seeds * 3), torch.arange(100))
    for i in range(10):
        assert torch.equal(together[i], noise(100, seed=i, choice=i % 3, position=3 * i))
