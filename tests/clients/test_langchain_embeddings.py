"""LangChain's OpenAIEmbeddings, by a cluster of its own whose model embeds: the vectors of
transformers in float32."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from clients.asks import KEY
from clients.server import PYTHON, ROOT, serving
from langchain_openai import OpenAIEmbeddings

TEXTS = ["a", "The capital of France is Paris.", "One sheep, two sheep. " * 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedding") / "tiny"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [str(PYTHON), "-m", "support.embedding_reference", str(path), *TEXTS]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths})
    return path


@pytest.fixture(scope="module")
def embedding_url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--model", str(folder), "--set", "engine.device=cpu")
    with serving(tmp_path_factory.mktemp("server") / "up.log", *options) as started:
        yield started


def test_embeddings(embedding_url: str, folder: Path) -> None:
    model = OpenAIEmbeddings(
        model=folder.name,
        base_url=f"{embedding_url}/v1",
        api_key=KEY,
        check_embedding_ctx_length=False,
        max_retries=0,
    )
    expected = np.array(json.loads((folder / "expected.json").read_text()))
    found = np.array(model.embed_documents(TEXTS))
    assert found.shape == expected.shape
    assert (np.sum(found * expected, axis=1) >= 0.9999).all()
    assert np.dot(model.embed_query(TEXTS[1]), expected[1]) >= 0.9999
