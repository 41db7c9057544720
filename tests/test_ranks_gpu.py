"""Workers of several ranks with GPUs, over HTTP and NIXL: rows of P's homes go into the memory of
D's ranks, and the tokens are those of one GPU. Where there is one GPU all ranks share it.
"""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hosts import hosts
from support.served import cluster
from support.tiny_models import make_speaking
from test_ranks_end_to_end import assert_answers_of

from demo.recall import recall_prompts
from pdserve.engine.llm import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.processes, pytest.mark.lengthy]

ONE, TP2, DP2 = (1, 1), (2, 1), (1, 1, 2)
CLIENTS, REQUESTS = 16, 8  # at once, and of each
USED_BYTES = 100 << 20  # of a card that has a rank; an idle one has none


@pytest.mark.parametrize(("family", "p", "d"), [("qwen3-moe", ONE, DP2), ("deepseek-v3", DP2, TP2)])
async def test_experts_and_homes_of_unlike_degrees_equal_one_gpu(
    family: str, p: tuple[int, ...], d: tuple[int, ...], tmp_path: Path
) -> None:
    folder = make_speaking(family, tmp_path / family)
    prompts = [each.prompt for each in recall_prompts(seed=78, num_prompts=6)]
    engine = {"device": "cuda", "expert_parallel": True, "max_num_seqs": 16}
    with hosts(folder, "P", "D", engine=engine, degrees={"P": p, "D": d}) as started:
        llm = LLM(str(folder), device="cuda", num_kv_blocks=512, max_num_seqs=16)
        async with cluster(*started) as running:
            await assert_answers_of(llm, running, prompts)
            assert await running.metric("pdserve_kv_transfers_total", outcome="done") > 0
            for rank in range(1, len(started[1].followers) + 1):
                await running.until_metric("pdserve_kv_transfer_bytes_total", 1, rank=str(rank))


@pytest.mark.multigpu
async def test_two_homes_on_two_cards_take_over_rightly_under_load(tmp_path: Path) -> None:
    """P shares the first card with the first home of D. Clients send one request after another, so
    that hand-offs, prompts and decodes overlap. Every second answer is sampled."""
    folder = make_speaking("qwen3-moe", tmp_path / "mixture")
    prompts = [each.prompt for each in recall_prompts(seed=79, num_prompts=CLIENTS * REQUESTS)]
    lengths = [random.Random(seed).randrange(16, 129) for seed in range(len(prompts))]
    settings: list[dict[str, Any]] = [
        {"seed": seed, "max_tokens": length, "temperature": (0.0, 0.9)[seed % 2]}
        for seed, length in enumerate(lengths)
    ]
    llm = LLM(str(folder), device="cuda", num_kv_blocks=512, max_num_seqs=16)
    params = [SamplingParams(**each) for each in settings]
    wanted = [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
    free_before, _ = torch.cuda.mem_get_info(1)
    engine = {"device": "cuda", "expert_parallel": True, "max_num_seqs": 16}
    with hosts(folder, "P", "D", engine=engine, degrees={"P": ONE, "D": DP2}) as started:
        assert torch.cuda.mem_get_info(1)[0] < free_before - USED_BYTES, "no rank on this card"
        async with cluster(*started) as running:

            async def client(number: int) -> int:
                right = 0
                for index in range(number, len(prompts), CLIENTS):
                    answer = await running.complete(
                        prompt=prompts[index], return_token_ids=True, **settings[index]
                    )
                    right += answer["choices"][0]["token_ids"] == wanted[index]
                return right

            began = time.monotonic()
            right = sum(await asyncio.gather(*map(client, range(CLIENTS))))
            seconds = time.monotonic() - began
            moved = await running.metric("pdserve_kv_transfer_bytes_total")
            pulls = await running.metric("pdserve_kv_transfers_total", outcome="done")
            pull_s = await running.metric("pdserve_kv_transfer_seconds_sum")
            print(
                f"{right} of {len(prompts)} right in {seconds:.1f} s; {pulls:.0f} pulls of "
                f"{moved / pulls / 1e6:.2f} MB took {1000 * pull_s / pulls:.1f} ms each"
            )
            assert right == len(prompts)
            await running.until_metric("pdserve_kv_transfer_bytes_total", 1, rank="1")
