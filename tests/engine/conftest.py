"""LLMs of several ranks on CPU. Their processes are kept between tests (support/rank_pool.py)."""

import gc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine.several_ranks import ROOMY
from support.rank_pool import RankPool
from support.tiny_models import make_tiny

from pdserve.engine import ranks as ranks_module
from pdserve.engine.llm import LLM


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    gc.collect()
    pool.close()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def get(family: str, **overrides: Any) -> Path:
        return make_tiny(family, tmp_path_factory.mktemp(family), seed=3, **overrides)

    return get


@pytest.fixture
def make_llm(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """An LLM of pooled ranks; all that were made end with the test."""
    monkeypatch.setattr(ranks_module, "RankProcesses", pool.ranks_of)

    def make(folder: Path, tp: int, pp: int = 1, **engine: Any) -> LLM:
        return LLM(
            str(folder),
            tokenizer=False,
            device="cpu",
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            **ROOMY | engine,
        )

    yield make
    gc.collect()
