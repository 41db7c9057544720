"""The two messages of a step: `ForwardWork` runs the model over its rows, `SampleWork` samples from
the logits that it left.

They hold only arrays and numbers. An executor that has its model, its KV cache and all messages so
far needs nothing else, on whatever host it is. Made by the planner, carried out by an `Executor`.
"""

from dataclasses import dataclass

import numpy as np

from pdserve.engine.sampling.staged_rows import StagedRows


@dataclass(frozen=True)
class StepShape:
    """The numbers that the host needs to choose and launch a step's kernels."""

    num_decodes: int
    max_decode_context: int  # at least the longest context of the decodes
    # For each prefill chunk: how many rows of its sequence come before it, and how many it has.
    chunks: tuple[tuple[int, int], ...] = ()

    @property
    def num_rows(self) -> int:
        """Number of rows, without padding."""
        return self.num_decodes + sum(rows for _, rows in self.chunks)


@dataclass(frozen=True)
class BlockCopies:
    """Blocks to copy, all at once. sources, targets: int64 `[copies]`, both contiguous."""

    sources: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class LogitRows:
    """The logits to compute."""

    rows: np.ndarray  # int32 [samples], rows of the step; one may occur several times
    slots: np.ndarray  # int32 [samples], slots whose newest token is sampled there


@dataclass(frozen=True)
class ScoredRows:
    """Prompt tokens whose log-probabilities are wanted."""

    first_row: int  # row whose logits score the first target; the next rows score the others
    targets: np.ndarray  # int32 [n]
    num_top: int  # alternatives for each target


@dataclass(frozen=True)
class HomeWork:
    """One home's part of a step. It is done in this order: copies, table_changes, forward, logits,
    scores, hidden states.
    """

    packed: np.ndarray  # the step's `Arrays` (packing.py)
    lengths: tuple[int, ...]  # their lengths
    shape: StepShape
    table_changes: np.ndarray | None = None  # int32 [3, n]: slot, index and block
    copies: tuple[BlockCopies, ...] = ()
    # Logits to compute. None: those of a graph's first rows, each for its own slot; only a step of
    # one home has None.
    logit_rows: LogitRows | None = None
    scores: tuple[ScoredRows, ...] = ()
    hidden_rows: np.ndarray | None = None  # int32 [n], rows whose hidden state is wanted

    @property
    def num_rows(self) -> int:
        """Number of rows of the step, including padding."""
        return self.lengths[0]


@dataclass(frozen=True)
class ForwardWork:
    """One step up to its logits."""

    number: int  # counts the steps
    # size of the graph of decodes to replay, the same in all homes; 0: none, but steps with prompts
    # may have graphs of their own (PiecewiseGraphs)
    graph: int
    homes: tuple[HomeWork, ...]  # a home of which nothing is wanted computes rows of padding
    num_samples: int = 0  # number of logits, home after home
    is_late: bool = False  # its SampleWork comes after the previous step has been collected

    @property
    def home_rows(self) -> tuple[int, ...]:
        """Number of rows of each home, including padding."""
        return tuple(home.num_rows for home in self.homes)


@dataclass(frozen=True)
class SampleWork:
    """Samples from the logits of ForwardWork `number`, which is the last one sent."""

    number: int
    rows: StagedRows
