"""Workers with GPUs fetch cached prefixes from each other over NIXL, and the tokens are those of
one GPU. Where there is one GPU the workers share it.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hosts import hosts
from support.served import cluster
from support.tiny_models import make_speaking

from pdserve.configs.router import RouterConfig
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.router.choosing.predict import Predictor

pytestmark = [pytest.mark.gpu, pytest.mark.processes, pytest.mark.lengthy]

SPREAD = RouterConfig(split="never", policy="round-robin")
MAX_TOKENS = 16
PREFIX = 768
NUM_PREFIXES = 6
SPEED = 1000.0  # tokens/s
TOLD_S = 0.3  # caches are told ten times a second


def prompts() -> list[list[int]]:
    """Each prefix twice, with another end."""
    draw = random.Random(8)
    found = []
    for _ in range(NUM_PREFIXES):
        prefix = draw.choices(range(100, 1500), k=PREFIX)
        found += [prefix + draw.choices(range(100, 1500), k=10 + end) for end in range(2)]
    return found


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3"])
@pytest.mark.parametrize("names", [("W0", "W1"), ("D0", "D1")], ids=["whole", "decode"])
async def test_a_prefix_of_another_gpu_gives_the_tokens_of_one(
    names: tuple[str, str], family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request with a prefix goes to the worker that does not have it. The router takes
    the GPUs for slow ones: they compute a prompt of this small model faster than they fetch it."""
    monkeypatch.setattr(Predictor, "full_speed", lambda predictor, worker: SPEED)
    folder = make_speaking(family, tmp_path / family)
    asked = prompts()
    llm = LLM(str(folder), device="cuda", num_kv_blocks=512)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    want = [each.outputs[0].token_ids for each in llm.generate(asked, params, use_tqdm=False)]
    cards = dict(zip(names, range(torch.cuda.device_count()), strict=False))
    sampling: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    with hosts(folder, *names, engine={"device": "cuda"}, gpus=cards) as started:
        async with cluster(*started, config=SPREAD) as running:
            got = []
            for prompt in asked:
                answer = await running.complete(prompt=prompt, return_token_ids=True, **sampling)
                got.append(answer["choices"][0]["token_ids"])
                await asyncio.sleep(TOLD_S)
            # the first pair opens the link, and one fetch may come too late
            least = (NUM_PREFIXES - 2) * (PREFIX - 64)
            await running.until_metric("pdserve_prefix_fetch_tokens_total", least)
            print(f"{await running.metric('pdserve_prefix_fetch_bytes_total'):,.0f} bytes fetched")
    assert got == want
