"""The engine on a CUDA device: parity with transformers there, bfloat16 no worse than theirs, and an honest fence."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.harness import Driver, logprob_of, make_engine
from tiny_models import make_tiny

from pdserve.engine.llm import LLM, SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [
    torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 70, 16, 33, 150)
]


@pytest.fixture(scope="module", params=["llama3", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param), seed=3)


def reference(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.cuda()


def log_softmax(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt]).cuda()).logits[0].float().log_softmax(-1).cpu()


def make_llm(folder: Path, dtype: str, **engine: Any) -> LLM:
    return LLM(str(folder), dtype=dtype, tokenizer=False, **{"device": "cuda", "num_kv_blocks": 64, **engine})


@pytest.mark.parametrize("engine", [{}, {"max_num_batched_tokens": 17}, {"num_kv_blocks": 16}, {"block_size": 64}])
def test_greedy_float32_equals_transformers(folder: Path, engine: dict) -> None:
    """Token for token, up to a near-tie of the two best, where the order of additions may decide."""
    llm, model = make_llm(folder, "float32", **engine), reference(folder, torch.float32)
    params = SamplingParams(temperature=0, max_tokens=48)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        tokens = output.outputs[0].token_ids
        rows = log_softmax(model, prompt + tokens)[len(prompt) - 1 : -1]
        best = rows.max(dim=-1).values
        chosen = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (best - chosen).max() < 1e-3
        assert (chosen == best).float().mean() > 0.95
    llm.engine.check_integrity()
    assert llm.engine.blocks.num_owned == 0


def test_bfloat16_is_no_worse_than_transformers(folder: Path) -> None:
    """Both against float32: the mean error of prompt log-probabilities."""
    llm = make_llm(folder, "bfloat16")
    exact, rounded = reference(folder, torch.float32), reference(folder, torch.bfloat16)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    ours, theirs = [], []
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        targets = torch.tensor(prompt[1:])[:, None]
        want = log_softmax(exact, prompt)[:-1].gather(1, targets)[:, 0]
        got = torch.tensor([logprob_of(entry) for entry in (output.prompt_logprobs or [])[1:]])
        ours.append((got - want).abs())
        theirs.append((log_softmax(rounded, prompt)[:-1].gather(1, targets)[:, 0] - want).abs())
    assert torch.cat(ours).mean() < 1.5 * torch.cat(theirs).mean()


def test_sampled_choices_do_not_depend_on_the_device(folder: Path) -> None:
    """Same draws, logits that differ by rounding: hardly a token differs. Several choices copy blocks in one step."""
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=7, max_tokens=24, n=2, presence_penalty=0.4)
    cuda = make_llm(folder, "float32").generate(PROMPTS, params, use_tqdm=False)
    cpu = make_llm(folder, "float32", device="cpu").generate(PROMPTS, params, use_tqdm=False)
    tokens = [[choice.token_ids for output in outputs for choice in output.outputs] for outputs in (cuda, cpu)]
    assert sum(a == b for a, b in zip(*tokens, strict=True)) >= 9 and len(tokens[0]) == 10


def test_the_fence_is_not_ready_before_the_device_is_done(folder: Path) -> None:
    engine = make_engine(folder, device="cuda")
    driver = Driver(engine)
    driver.add(PROMPTS[1], SamplingParams(temperature=0, max_tokens=2, seed=0))
    driver.run()  # compiles the kernels
    driver.add(PROMPTS[4], SamplingParams(temperature=0, max_tokens=2, seed=0))
    torch.cuda.synchronize()
    plan = engine.scheduler.schedule()
    torch.cuda._sleep(2_000_000_000)  # about a second
    computed = engine.runner.execute(plan)
    assert not computed.fence.ready()
    torch.cuda.synchronize()
    assert computed.fence.ready()


def test_the_pool_is_sized_by_what_is_left(folder: Path) -> None:
    gc.collect()  # the pools of other tests
    engine = make_engine(folder, device="cuda", num_kv_blocks=None, kv_memory_fraction=0.3)
    free, total = torch.cuda.mem_get_info()
    pool_bytes = engine.pool.numel() * engine.pool.element_size()
    assert pool_bytes == engine.blocks.num_blocks * engine.layout.block_bytes
    assert 0.25 * total < pool_bytes < 0.3 * total and total - free < 0.32 * total
