"""A logit rule of the tests that needs values: no token comes twice in a row. It applies to rows
with an odd seed."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from engine.harness import PaperExecutor
from torch import Tensor

from pdserve.engine.engine import Engine
from pdserve.engine.execution.local_executor import LocalExecutor
from pdserve.engine.sampling.row_staging import RowStaging
from pdserve.engine.sampling.rules.logit_rule import AskedRows, LogitRule
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.sampling.sampler import Sampler
from pdserve.engine.sampling.staged_rows import Arrays
from pdserve.kernels.sampling.reference import NEG_INF


class NoRepeat(LogitRule[bool]):
    name = "no_repeat"
    needs_values: ClassVar[bool] = True
    SEED = 1

    def __init__(self) -> None:
        self.asked: list[bool] = []  # whether a row that it was asked about had ended

    def join(self, row: SampleRow) -> bool | None:
        return True if (row.sampling.seed or 0) % 2 else None

    def stage(self, rows: AskedRows[bool], num_rows: int) -> Arrays:
        for _, row, _ in rows:
            assert row.num_known == row.position, "the token before is in flight"
            last = row.token_ids[-1]
            ended = last in row.stop_token_ids and row.num_known > row.sampling.min_tokens
            self.asked.append(ended)
        return {
            "rows": np.array([at for at, _, _ in rows], dtype=np.int64),
            "ids": np.array([row.token_ids[-1] for _, row, _ in rows], dtype=np.int64),
        }

    def apply(self, logits: Tensor, staged: Mapping[str, Tensor]) -> None:
        logits.view(-1).index_fill_(0, staged["rows"] * logits.shape[1] + staged["ids"], NEG_INF)


def use_rule(engine: Engine, rule: NoRepeat | None = None) -> Engine:
    """The engine applies this rule after all others, to the requests that come from now on."""
    executor = engine.executor
    assert isinstance(executor, (LocalExecutor, PaperExecutor))
    sampler = executor.sampler
    rules = (*(r for r in sampler.rules if r.name != NoRepeat.name), rule or NoRepeat())
    executor.sampler = Sampler(sampler.ops, sampler.vocab_size, rules, sampler.device)
    engine._planner.staging = RowStaging(rules, sampler.vocab_size, 2 * engine.config.max_num_seqs)
    return engine
