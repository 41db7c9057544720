"""Staged rows are the message between the sampler's two halves: what a step's rows ask of it, as
small arrays.

Arrays and numbers alone. Made by `row_staging`, read by the sampler.
"""

from dataclasses import dataclass, field

import numpy as np

Arrays = dict[str, np.ndarray]
"""Of 4- or 8-byte numbers, one-dimensional."""


@dataclass(frozen=True)
class StagedRows:
    """draws: temperatures, keys and filters, {} when all rows are greedy. rules: of each rule that
    changes logits in this step, by its name, in the order in which they are applied. scored_rows:
    those whose tokens' log-probabilities are wanted; num_top: with so many alternatives each.
    """

    num_rows: int
    draws: Arrays = field(default_factory=dict)
    rules: dict[str, Arrays] = field(default_factory=dict)
    scored_rows: tuple[int, ...] = ()
    num_top: tuple[int, ...] = ()
