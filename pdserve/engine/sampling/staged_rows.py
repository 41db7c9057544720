"""Staged rows are the message between the sampler's two halves: the parameters of a step's rows, as
small arrays.

Holds only arrays and numbers. Made by `row_staging`, read by the sampler.
"""

from dataclasses import dataclass, field

import numpy as np

Arrays = dict[str, np.ndarray]
"""One-dimensional arrays of 4- or 8-byte numbers, by name."""


@dataclass(frozen=True)
class StagedRows:
    """The parameters of a step's rows that the device half needs."""

    num_rows: int
    draws: Arrays = field(default_factory=dict)  # temperatures, keys, filters; {} if all are greedy
    # Arrays of each rule that changes logits in this step, by name, in the order of application.
    rules: dict[str, Arrays] = field(default_factory=dict)
    scored_rows: tuple[int, ...] = ()  # rows whose tokens' log-probabilities are wanted
    num_top: tuple[int, ...] = ()  # number of alternatives for each scored row
