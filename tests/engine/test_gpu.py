"""Tests the engine on a CUDA device: parity with transformers there, bfloat16 no worse than theirs,
and an honest fence."""

import gc
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.harness import Driver, logprob_of, make_engine, plan_step
from support.gpu_llms import replayed_sizes, twice
from support.tiny_models import FAMILIES, make_embedding, make_tiny

from pdserve.engine.execution.cuda_graphs import DecodeGraphs, capturing
from pdserve.engine.execution.piecewise_graphs import Cut, PiecewiseGraphs
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.engine.stepping.packing import Arrays, blank, unpack
from pdserve.kernels.attention import dense
from pdserve.kernels.latents import expanded
from pdserve.protocol.start_progress import StartProgress

__all__ = ["replayed_sizes"]
pytestmark = pytest.mark.gpu

PROMPTS = [
    torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 70, 16, 33, 150)
]


@pytest.fixture(scope="module", params=["llama3", "qwen3", "qwen3-moe", "deepseek-v2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param), seed=3)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def any_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param), seed=3)


def reference(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    # Some versions of transformers leave out soft caps with any other attention.
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    return model.cuda()


def log_softmax(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt]).cuda()).logits[0].float().log_softmax(-1).cpu()


def make_llm(folder: Path, dtype: str, **engine: Any) -> LLM:
    return LLM(
        str(folder),
        dtype=dtype,
        tokenizer=False,
        **{"device": "cuda", "num_kv_blocks": 64, **engine},
    )


@pytest.mark.parametrize(
    "engine", [{}, {"max_num_batched_tokens": 17}, {"num_kv_blocks": 16}, {"block_size": 64}]
)
def test_greedy_float32_equals_transformers(folder: Path, engine: dict) -> None:
    check_greedy(folder, **engine)


def test_every_family_equals_transformers(any_folder: Path) -> None:
    check_greedy(any_folder, max_num_batched_tokens=64)


def check_greedy(folder: Path, **engine: Any) -> None:
    """Checks tokens one for one, up to a near-tie of the two best, where the order of additions may
    decide."""
    llm = make_llm(folder, "float32", **engine)
    model = reference(folder, torch.float32)
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


def test_bfloat16_is_no_worse_than_transformers(any_folder: Path) -> None:
    """Both against float32: the mean error of the log-probabilities of 4,000 prompt tokens."""
    llm = make_llm(any_folder, "bfloat16", num_kv_blocks=200)
    exact = reference(any_folder, torch.float32)
    rounded = reference(any_folder, torch.bfloat16)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    lengths = [5, 33, 64, 150, 200, 250] * 6
    prompts = [
        torch.randint(256, (length,), generator=torch.Generator().manual_seed(i)).tolist()
        for i, length in enumerate(lengths)
    ]
    ours = []
    theirs = []
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        targets = torch.tensor(prompt[1:])[:, None]
        want = log_softmax(exact, prompt)[:-1].gather(1, targets)[:, 0]
        got = torch.tensor([logprob_of(entry) for entry in (output.prompt_logprobs or [])[1:]])
        ours.append((got - want).abs())
        theirs.append((log_softmax(rounded, prompt)[:-1].gather(1, targets)[:, 0] - want).abs())
    gaps = torch.cat(ours).mean(), torch.cat(theirs).mean()
    print(any_folder.name, *(f"{gap:.5f}" for gap in gaps))
    assert gaps[0] <= 1.05 * gaps[1]


def test_embeddings_equal_those_of_a_cpu(tmp_path: Path) -> None:
    folder = make_embedding(tmp_path / "tiny")
    texts = ["a", "What is 23 + 54? " * 12, "One sheep, two sheep, three sheep. " * 30]
    rows = {}
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        llm = LLM(str(folder), device=device, dtype=dtype, num_kv_blocks=128)
        outputs = llm.embed(texts, use_tqdm=False)
        rows[device, dtype] = np.array([each.outputs.embedding for each in outputs])
    exact = rows["cpu", "float32"]
    np.testing.assert_allclose(rows["cuda", "float32"], exact, atol=1e-3)
    assert ((rows["cuda", "bfloat16"] * exact).sum(axis=1) > 0.999).all()


def test_sampled_choices_do_not_depend_on_the_device(folder: Path) -> None:
    """Same draws, logits that differ by rounding: hardly a token differs. Several choices copy
    blocks in one step."""
    params = SamplingParams(
        temperature=1.0, top_p=0.9, top_k=40, seed=7, max_tokens=24, n=2, presence_penalty=0.4
    )
    cuda = make_llm(folder, "float32").generate(PROMPTS, params, use_tqdm=False)
    cpu = make_llm(folder, "float32", device="cpu").generate(PROMPTS, params, use_tqdm=False)
    tokens = [
        [choice.token_ids for output in outputs for choice in output.outputs]
        for outputs in (cuda, cpu)
    ]
    assert sum(a == b for a, b in zip(*tokens, strict=True)) >= 9 and len(tokens[0]) == 10


SLEEP_CYCLES = 1_000_000_000  # about half a second


def dispatch(driver: Driver) -> Any:
    """Queue a step behind a sleeping stream; it must not wait for the device anywhere."""
    engine = driver.engine
    torch.cuda._sleep(SLEEP_CYCLES)
    torch.cuda.set_sync_debug_mode("error")
    try:
        began = time.perf_counter()
        step = plan_step(engine)
        step.handle = engine.executor.forward(step.forward)
        engine.steps._sample(step)
        assert time.perf_counter() - began < 0.2
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.steps.in_flight.append(step)
    return step


EVERYTHING = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    top_k=30,
    min_p=0.01,
    logprobs=3,
    presence_penalty=0.5,
    logit_bias={3: 1.0},
    seed=1,
    n=2,
)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0, seed=0), EVERYTHING], ids=["greedy", "everything"]
)
def test_a_step_is_queued_without_waiting_and_complete_only_when_the_device_is(
    folder: Path, sampling: SamplingParams
) -> None:
    driver = Driver(make_engine(folder, device="cuda"))
    for prompt in PROMPTS:
        driver.add(prompt, sampling)
    # a prefill, then a decode that is fed by it on the device
    steps = [dispatch(driver), dispatch(driver)]
    assert not steps[0].handle.ready() and not steps[1].handle.ready()
    result = driver.step()
    assert steps[0].handle.ready() and result.events
    driver.run()
    driver.assert_empty()


def test_the_device_is_quiet_when_an_interrupted_call_returns(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(folder, "float32")
    params = SamplingParams(temperature=0, max_tokens=12, n=2)
    expected = [output.outputs for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    llm.engine.reset()

    def interrupted(*_: Any) -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, params, use_tqdm=False)
    assert torch.cuda.current_stream().query()
    assert [output.outputs for output in llm.generate(PROMPTS, params, use_tqdm=False)] == expected


def test_blocks_of_an_aborted_request_are_free_only_when_no_step_can_touch_them(
    folder: Path,
) -> None:
    engine = make_engine(folder, device="cuda", enable_prefix_caching=False)
    driver = Driver(engine)
    key = driver.add(PROMPTS[4], SamplingParams(temperature=0, seed=0))
    before = engine.blocks.num_free
    step = dispatch(driver)
    engine.abort(key)
    assert not step.handle.ready() and engine.blocks.num_free < before
    engine.check_integrity()
    driver.run()
    assert step.handle.ready() and engine.blocks.num_free == before


def test_a_prompt_is_held_for_a_hand_off_only_when_its_rows_are_there(folder: Path) -> None:
    engine = make_engine(folder, device="cuda")
    driver = Driver(engine)
    driver.add(PROMPTS[4], SamplingParams(temperature=0, seed=0), phase="prefill")
    step = dispatch(driver)
    assert not driver.held and not step.handle.ready()
    driver.run()
    [held] = driver.held
    assert step.handle.ready()
    rows = engine.kv_cache.groups[0][list(held.block_ids)].clone()
    other = Driver(make_engine(folder, device="cuda", async_scheduling=False, cuda_graphs=False))
    other.add(PROMPTS[4], SamplingParams(temperature=0, seed=0), phase="prefill")
    other.run()
    # a graph has rows of padding, so its products may add numbers in another order
    expected = other.engine.kv_cache.groups[0][list(other.held[0].block_ids)]
    assert expected.any()
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


def test_padding_rows_write_to_the_null_block_alone(folder: Path) -> None:
    """Batches that shrink below a captured size: what is not theirs stays as it is."""
    engine = make_engine(folder, device="cuda", enable_prefix_caching=False, num_kv_blocks=200)
    driver = Driver(engine)
    for i, prompt in enumerate(PROMPTS * 2):
        driver.add(
            prompt, SamplingParams(temperature=0, seed=0, max_tokens=3 + 2 * i, ignore_eos=True)
        )
    # nobody's: the KV cache is much larger than the work
    engine.kv_cache.groups[0][engine.blocks.num_blocks // 2 :] = 7.0
    driver.run()
    assert (engine.kv_cache.groups[0][engine.blocks.num_blocks // 2 :] == 7.0).all()
    survivor = driver.add(
        PROMPTS[1], SamplingParams(temperature=0, seed=0, max_tokens=40, ignore_eos=True)
    )
    for prompt in PROMPTS:
        driver.add(prompt, SamplingParams(temperature=0, seed=0, max_tokens=5, ignore_eos=True))
    driver.run()
    alone = make_llm(folder, str(engine.spec.dtype)).generate(
        [PROMPTS[1]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False
    )
    assert driver.tokens[survivor, 0][:20] == alone[0].outputs[0].token_ids[:20]


@pytest.mark.parametrize(
    "engine", [{"cuda_graphs": False}, {"async_scheduling": False}, {"num_kv_blocks": 20}]
)
def test_graphs_and_asynchrony_change_no_token(folder: Path, engine: dict) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(
            temperature=1.0,
            top_p=0.9,
            seed=3,
            max_tokens=30,
            n=3,
            frequency_penalty=0.3,
            logprobs=2,
        ),
        SamplingParams(
            temperature=0.7,
            seed=4,
            max_tokens=33,
            repetition_penalty=1.2,
            stop_token_ids=[5, 6, 7, 8],
        ),
        SamplingParams(temperature=1.0, seed=5, max_tokens=20, min_p=0.05, logit_bias={9: 4.0}),
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2),
    ]
    outputs = [
        make_llm(folder, "float32", **config).generate(PROMPTS, params, use_tqdm=False)
        for config in ({}, engine)
    ]
    tokens = [[choice.token_ids for output in out for choice in output.outputs] for out in outputs]
    # a near-tie may fall the other way
    assert sum(a == b for a, b in zip(*tokens, strict=True)) >= len(tokens[0]) - 1


def test_graphs_share_one_memory_and_keep_their_outputs_apart_from_other_use() -> None:
    """Outputs of 1 GiB in all stay in the memory of the largest graph, which nobody else is
    given."""
    width = 1 << 20

    def step(arrays: Arrays[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = arrays.ids[:, None].to(torch.bfloat16)
        return rows * torch.ones(1, 16, device="cuda", dtype=torch.bfloat16), rows.expand(
            -1, width
        ) + 1.0

    def prompt_step(rows: torch.Tensor, cut: Cut) -> torch.Tensor:
        large = rows[0, :, None].to(torch.bfloat16).expand(-1, width) + 1.0
        return large[:, :16] * 2.0

    before = torch.cuda.memory_allocated()
    device = torch.device("cuda", 0)
    with capturing(device) as memory:
        pieces = PiecewiseGraphs(prompt_step, device, memory)
        pieces.capture([64, 128], StartProgress().report)
        graphs = DecodeGraphs(step, device, memory)
        graphs.capture([8, 16, 32, 64, 128], StartProgress().report)
    assert torch.cuda.memory_allocated() - before < 1 << 20
    others = [torch.full((1 << 27,), 7, dtype=torch.uint8, device="cuda") for _ in range(4)]
    for size in (8, 128, 32, 128):
        lengths = [size, size, size, size, size, 1]
        packed = blank(lengths)
        ids = np.arange(size, dtype=np.int32)
        arrays = unpack(packed, lengths)
        arrays.ids[:] = arrays.slots[:] = ids
        hidden, logits, slots = graphs.replay(size, packed)
        want = torch.arange(size, device="cuda").bfloat16()
        assert torch.equal(hidden, want[:, None].expand(-1, 16)) and torch.equal(
            logits[:, -1], want + 1
        )
        assert slots.tolist() == ids.tolist() and logits.shape == (size, width)
        del hidden, logits
    assert all(bool((other == 7).all()) for other in others)


def test_no_request_waits_for_a_compiler(folder: Path) -> None:
    """Whatever comes after the start, in any batch."""
    llm = make_llm(folder, "bfloat16", num_kv_blocks=400, max_num_batched_tokens=300)
    rng = random.Random(0)
    for num_requests in (1, 2, 7, 40, 130):
        prompts = [
            [rng.randrange(256) for _ in range(rng.randint(1, 90))] for _ in range(num_requests)
        ]
        params = [
            SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 10]),
                min_p=rng.choice([0.0, 0.1]),
                n=rng.choice([1, 1, 3]),
                presence_penalty=rng.choice([0.0, 0.5]),
                logit_bias=rng.choice([None, {3: 1.0}]),
                logprobs=rng.choice([None, None, 0, 4]),
                prompt_logprobs=rng.choice([None, None, 0, 2]),
                stop_token_ids=[1, 2],
                min_tokens=rng.choice([0, 3]),
                seed=rng.randrange(1000),
                max_tokens=rng.randint(3, 25),
            )
            for _ in prompts
        ]
        llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.late_compiles.count == 0


def test_a_long_prompt_waits_for_no_compiler_either(tmp_path: Path) -> None:
    """Its later chunks stand behind pieces that cuDNN attends to, and are the same as by the paged
    kernel, up to the rounding of bfloat16.
    """
    folder = make_tiny("llama3", tmp_path, max_position_embeddings=16384, head_dim=64)
    engine = {
        "max_num_batched_tokens": 4096,
        "num_kv_blocks": 900,
        "block_size": 16,
        "cuda_graphs": False,
    }
    prompts = [
        torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in (9000, 8200)
    ]
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
    llm = make_llm(folder, "bfloat16", **engine)
    before = len(dense._warm.pieces)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert before and llm.engine.late_compiles.count == 0
    dense._warm.pieces.clear()
    again = make_llm(folder, "bfloat16", **{**engine, "max_num_batched_tokens": 2048})
    for one, two in zip(outputs, again.generate(prompts, params, use_tqdm=False), strict=True):
        a, b = ([logprob_of(entry) for entry in (x.prompt_logprobs or [])[1:]] for x in (one, two))
        assert (torch.tensor(a) - torch.tensor(b)).abs().mean() < 0.1


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_chunks_of_any_length_and_depth_wait_for_no_compiler(
    tmp_path: Path, cuda_graphs: bool
) -> None:
    """With as many heads as a model of 8B has, so that few rows have other tiles than many."""
    folder = make_tiny(
        "llama3",
        tmp_path,
        max_position_embeddings=20_000,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
    )
    engine = {"max_num_batched_tokens": 8192, "num_kv_blocks": 1200, "block_size": 64}
    llm = make_llm(folder, "bfloat16", cuda_graphs=cuda_graphs, **engine)
    rng = random.Random(0)
    for num_requests in (1, 1, 2, 5):
        lengths = [rng.choice([28, 600, 2048, 5891, 10_164, 15_000]) for _ in range(num_requests)]
        prompts = [[rng.randrange(256) for _ in range(length)] for length in lengths]
        params = [SamplingParams(temperature=0, max_tokens=rng.randint(3, 25)) for _ in prompts]
        llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.late_compiles.count == 0


def test_prompts_over_latents_say_the_same_in_both_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, in chunks, behind pieces, beside decodes: with keys and values of their own, and in
    the latent's space, up to the rounding of bfloat16."""
    folder = make_tiny(
        "deepseek-v2",
        tmp_path,
        max_position_embeddings=16384,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        kv_lora_rank=64,
    )
    engine = {"max_num_batched_tokens": 2048, "num_kv_blocks": 1600, "block_size": 16}
    prompts = [
        torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in (40, 900, 6100, 300, 2000, 1300)
    ]
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, ignore_eos=True)
    expand = expanded.expanded_prefill
    calls: list[tuple[tuple[int, int], ...]] = []

    def note(*args: Any) -> None:
        calls.append(args[2].chunks)
        expand(*args)

    monkeypatch.setattr(expanded, "expanded_prefill", note)
    llm = make_llm(folder, "bfloat16", **engine)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.late_compiles.count == 0
    assert any(before for chunks in calls for before, _ in chunks)
    assert any(before + rows > 4096 for chunks in calls for before, rows in chunks), "no pieces"
    monkeypatch.setattr(expanded, "expansion_pays", lambda *_: False)
    again = make_llm(folder, "bfloat16", **engine)
    calls.clear()
    for one, two in zip(outputs, again.generate(prompts, params, use_tqdm=False), strict=True):
        a, b = ([logprob_of(entry) for entry in (x.prompt_logprobs or [])[1:]] for x in (one, two))
        assert (torch.tensor(a) - torch.tensor(b)).abs().mean() < 0.1
    assert not calls


def test_the_pool_is_sized_by_what_is_left(folder: Path) -> None:
    gc.collect()  # the KV caches of other tests
    engine = make_engine(folder, device="cuda", num_kv_blocks=None, kv_memory_fraction=0.3)
    free, total = torch.cuda.mem_get_info()
    pool_bytes = engine.kv_cache.data.nbytes
    assert pool_bytes == engine.blocks.num_blocks * engine.layout.block_bytes
    assert 0.25 * total < pool_bytes < 0.3 * total and total - free < 0.32 * total


def test_steps_with_prompts_replay_graphs(replayed_sizes: list[int]) -> None:
    """Prompts that come while others decode, whole and behind a cached beginning."""
    expected = twice(cuda_graphs=False)
    assert not replayed_sizes
    assert twice(cuda_graphs=True) == expected
    assert replayed_sizes and set(replayed_sizes) <= {*range(64, 513, 64)}
