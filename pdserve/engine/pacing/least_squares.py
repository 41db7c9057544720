"""A small linear model with coefficients >= 0 that follows a stream of samples.

It is weighted least squares on relative errors. Old samples fade. A weak pull to a prior keeps
coefficients that the samples do not determine. An active set keeps the signs. Knows nothing of
steps. Used by step_model.
"""

import math
from collections.abc import Sequence

PRIOR_WEIGHT = 1.0  # the prior counts as one sample; the sums hold about 1 / (1 - kept) samples
TINY = 1e-12


class Fit:
    """A fit of coefficients >= 0.

    - num_terms: number of features of a sample; the first feature should be 1.
    - kept: factor by which the weight of earlier samples shrinks when one is added.
    """

    def __init__(self, num_terms: int, kept: float) -> None:
        self._kept = kept
        self._range = range(num_terms)
        self._products = [[0.0] * num_terms for _ in self._range]
        self._targets = [0.0] * num_terms
        self.weight = 0.0
        self.num_samples = 0

    def add(self, features: Sequence[float], value: float) -> None:
        """Add a sample; value must be above 0."""
        kept = self._kept
        scaled = [each / value for each in features]  # the error of a sample is relative to value
        for i in self._range:
            row = self._products[i]
            left = scaled[i]
            for j in self._range:
                row[j] = kept * row[j] + left * scaled[j]
            self._targets[i] = kept * self._targets[i] + left
        self.weight = kept * self.weight + 1
        self.num_samples += 1

    def solve(self, prior: Sequence[float]) -> list[float]:
        """Returns coefficients >= 0. Where the samples leave one open, it is near the prior's.
        Those of the prior must be >= 0, too."""
        scales = [math.sqrt(self._products[i][i] / self.weight) for i in self._range]
        used = [i for i in self._range if scales[i] > TINY]
        found = list(prior)
        while used:
            values = self._solve_for(used, scales, prior)
            worst = min(range(len(used)), key=values.__getitem__)
            if values[worst] >= 0:
                for i, value in zip(used, values, strict=True):
                    found[i] = value / scales[i]
                break
            found[used.pop(worst)] = 0.0
        return found

    def _solve_for(
        self, used: list[int], scales: list[float], prior: Sequence[float]
    ) -> list[float]:
        """Scaled coefficients of these terms, with the others at 0."""
        pull = PRIOR_WEIGHT / self.weight
        matrix = []
        for i in used:
            row = [
                self._products[i][j] / (self.weight * scales[i] * scales[j]) + pull * (i == j)
                for j in used
            ]
            target = self._targets[i] / (self.weight * scales[i])
            matrix.append([*row, target + pull * prior[i] * scales[i]])
        return _eliminate(matrix)


def _eliminate(matrix: list[list[float]]) -> list[float]:
    """Solve a positive definite system by Gaussian elimination. The right side is the last
    column."""
    size = len(matrix)
    for i in range(size):
        pivot = matrix[i]
        for row in matrix[i + 1 :]:
            factor = row[i] / pivot[i]
            for j in range(i, size + 1):
                row[j] -= factor * pivot[j]
    values = [0.0] * size
    for i in reversed(range(size)):
        row = matrix[i]
        rest = sum(row[j] * values[j] for j in range(i + 1, size))
        values[i] = (row[size] - rest) / row[i]
    return values
