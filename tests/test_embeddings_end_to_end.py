"""A tiny model in Qwen3-Embedding's form through everything but Ray: OpenAI's client, HTTP, router,
separate worker processes, also of several ranks; the embeddings of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from support.embedding_reference import embeddings_of
from support.hosts import Host, hosts
from support.served import MODEL, blocks_in_use, cluster
from support.tiny_models import make_embedding

TEXTS = ["a", "The capital of France is Paris.", "One sheep, two sheep. " * 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedding(tmp_path_factory.mktemp("embedding") / "tiny")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[float]]:
    return embeddings_of(folder, TEXTS)


@pytest.fixture(
    scope="module",
    params=[("PD", (1, 1)), ("A", (1, 1)), ("A", (2, 1)), ("A", (1, 2))],
    ids=["PD", "A", "A of TP2", "A of PP2"],
)
def workers(request: pytest.FixtureRequest, folder: Path) -> Iterator[list[Host]]:
    names, degrees = request.param  # ranks of a stage, stages
    engine = {"max_num_batched_tokens": 64}
    with hosts(folder, *names, engine=engine, degrees=dict.fromkeys(names, degrees)) as started:
        assert all(len(host.followers) == degrees[0] * degrees[1] - 1 for host in started)
        yield started


async def test_openais_client_gets_what_transformers_computes(
    workers: list[Host], folder: Path, expected: list[list[float]]
) -> None:
    async with cluster(*workers, folder=folder) as running:
        client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        forms: list[dict[str, Any]] = [{}, {"encoding_format": "float"}]
        for form in forms:
            found = await client.embeddings.create(model=MODEL, input=TEXTS, **form)
            for item, wanted in zip(found.data, expected, strict=True):
                np.testing.assert_allclose(item.embedding, wanted, atol=1e-4)
                assert np.dot(item.embedding, wanted) >= 0.999999
        with pytest.raises(openai.BadRequestError, match="is for embeddings"):
            await client.completions.create(model=MODEL, prompt="a")
        await running.until_metric("pdserve_engine_prompt_tokens_total", 1)
        assert await running.metric("pdserve_engine_generation_tokens_total") == 0
        assert await running.metric("pdserve_kv_transfers_total") == 0
        assert await blocks_in_use(running) == 0
