"""The load of the experts of a running cluster over Ray: `pdserve expert-load` counts every row of
all workers, roles and ranks once, while answers run, and engines place copies by its file.

Prefill has one rank. Decode has two homes that share the experts of a mixture.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.raylets import connected, serving
from support.streams import prompts
from support.tiny_models import make_speaking

from pdserve.cluster.cli import main
from pdserve.cluster.client import Client, ClusterError, connect
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.kernels.experts.load_file import read_load
from pdserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

APP = "experts"
PORT = 8131
TOP_K, NUM_EXPERTS = 4, 16  # of the family "qwen3-moe"
LAYERS = (1,)  # those with experts
NUM_TOKENS = 24
NUM_LONG = 400
ENGINE: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 512}
HOMES: dict[str, Any] = {"data_parallel": 2, "expert_parallel": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_speaking("qwen3-moe", tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[Client]:
    config: dict[str, Any] = {
        "model": {"path": str(model), "name": "mixture"},
        "engine": ENGINE,
        "router": {"resources": {"ingress": 0.1}, "split": "always"},
        "prefill": {"resources": {"prefill": 1}},
        "decode": {"resources": {"decode": 1}, "engine": HOMES},
    }
    with (
        serving(APP, PORT, config, {"prefill": 1.0}, {"decode": 1.0}),
        connect(app_name=APP) as client,
    ):
        yield client


async def complete(prompt: str, num_tokens: int) -> int:
    """Returns the number of tokens of the answer."""
    body = {"model": "mixture", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
    async with connected(PORT) as http:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["completion_tokens"]


def test_before_a_request_there_is_no_load(client: Client) -> None:
    with pytest.raises(ClusterError, match="let the cluster serve a typical load first"):
        client.expert_load()


async def test_every_row_is_counted_once(client: Client, model: Path, tmp_path: Path) -> None:
    texts = prompts((40, 90, 160, 300))
    tokenizer = Tokenizer.load(model)
    num_prompt_rows = sum(len(tokenizer.encode(text)) for text in texts)
    num_decode_rows = len(texts) * (NUM_TOKENS - 1)
    assert await asyncio.gather(*(complete(text, NUM_TOKENS) for text in texts)) == [
        NUM_TOKENS
    ] * len(texts)
    expected = {
        "prefill": num_prompt_rows,
        "decode": num_decode_rows,
        "": num_prompt_rows + num_decode_rows,
    }
    for role, num_rows in expected.items():
        file = tmp_path / f"load{role}.json"
        words = [
            "expert-load",
            "--app",
            APP,
            "--out",
            str(file),
            *(["--role", role] if role else []),
        ]
        assert await asyncio.to_thread(main, words) == 0
        load = read_load(file, LAYERS, NUM_EXPERTS)
        assert {layer: sum(rows) for layer, rows in load.items()} == dict.fromkeys(
            LAYERS, num_rows * TOP_K
        ), role
    await asyncio.to_thread(assert_places_by, file, model)


def assert_places_by(file: Path, model: Path) -> None:
    placed: dict[str, Any] = {"redundant_experts": 2, "expert_load_file": str(file)}
    llm = LLM(str(model), **ENGINE, **HOMES, **placed)
    [output] = llm.generate(
        ["45 + 38 ="], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False
    )
    assert len(output.outputs[0].token_ids) == 4


async def num_decode_choices(client: Client) -> int:
    """Returns how often decode workers chose an expert."""
    return sum((await client.aexpert_load("decode")).layers[LAYERS[0]])


async def test_answers_go_on_while_the_load_is_read(client: Client) -> None:
    text = prompts((50,))[0]
    before = await num_decode_choices(client)
    answer = asyncio.create_task(complete(text, NUM_LONG))
    seen = [before]
    while not answer.done():
        seen.append(await num_decode_choices(client))
    assert await answer == NUM_LONG
    assert seen == sorted(seen) and len(set(seen)) > 3
    assert await num_decode_choices(client) == before + (NUM_LONG - 1) * TOP_K
