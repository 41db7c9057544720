"""Experts on several ranks, and attention in several homes, in processes: the tokens of one rank,
whatever is asked for."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.harness import Driver
from engine.several_ranks import TIGHT, answers, assert_nearer, assert_same, prompt_logprobs
from support.quantised import write_kv_scales

from demo.storing import WAYS, write_quantised
from pdserve.engine.llm import LLM, SamplingParams

pytestmark = [pytest.mark.lengthy, pytest.mark.processes]

MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3")
DEGREES = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]  # tp, dp, pp
DEGREES += [(4, 1, 1), (1, 4, 1)]
SAMPLE = {
    ("qwen2-moe", 2, 1, 1),
    ("deepseek-v3", 1, 2, 1),
    ("qwen3-moe", 1, 2, 2),
    ("mixtral", 2, 2, 1),
    ("gpt-oss", 1, 2, 1),
    ("qwen3-moe", 4, 1, 1),
    ("deepseek-v3", 1, 4, 1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "tp", "dp", "pp"),
    [
        pytest.param(family, *each, marks=[] if (family, *each) in SAMPLE else [pytest.mark.slow])
        for family in MIXTURES
        for each in DEGREES
    ],
)
def test_experts_on_several_ranks_answer_as_one_does(
    family: str,
    tp: int,
    dp: int,
    pp: int,
    folder_of: Callable[..., Path],
    make_llm: Callable[..., LLM],
) -> None:
    folder = folder_of(family)
    whole = make_llm(folder, 1)
    expected = answers(whole)
    llm = make_llm(folder, tp, pp, data_parallel=dp, expert_parallel=True)
    assert llm.engine.rows_digest == whole.engine.rows_digest, "rows do not depend on the degrees"
    assert_same(answers(llm), expected)
    loads = {layer: load.sum() for layer, load in whole.expert_load().items()}
    assert {layer: load.sum() for layer, load in llm.expert_load().items()} == loads
    assert_same(answers(llm), expected)  # from the prefix cache


SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
}
QUANTISED = [
    ("fp8-blocks", "fp8", 1, 2),
    ("fp8-blocks", "auto", 1, 2),
    *(("awq", kv_dtype, *each) for kv_dtype in ("auto", "fp8") for each in ((2, 1), (1, 2))),
    ("16 bits", "fp8", 2, 1),
    ("16 bits", "fp8", 1, 2),
]
FEW = {("fp8-blocks", "fp8", 1, 2), ("awq", "fp8", 2, 1)}


@pytest.fixture
def stored_as(tmp_path: Path, folder_of: Callable[..., Path]) -> Callable[[str], Path]:
    """A mixture with its weights in 16 bits or one of WAYS, and with scales of its KV cache."""

    def get(stored: str) -> Path:
        plain = folder_of("qwen3-moe", **SIZES)
        if stored in WAYS:
            folder = write_quantised(plain, tmp_path / stored, WAYS[stored])
        else:
            folder = Path(shutil.copytree(plain, tmp_path / "plain"))
        write_kv_scales(folder)
        return folder

    return get


@pytest.mark.parametrize(
    ("stored", "kv_dtype", "tp", "dp"),
    [pytest.param(*each, marks=[] if each in FEW else [pytest.mark.slow]) for each in QUANTISED],
)
def test_quantised_experts_and_rows_in_fp8(
    stored: str,
    kv_dtype: str,
    tp: int,
    dp: int,
    stored_as: Callable[[str], Path],
    make_llm: Callable[..., LLM],
) -> None:
    folder = stored_as(stored)
    expected = answers(make_llm(folder, 1, kv_cache_dtype=kv_dtype))
    llm = make_llm(folder, tp, data_parallel=dp, expert_parallel=True, kv_cache_dtype=kv_dtype)
    assert_same(answers(llm), expected)


@pytest.mark.parametrize("kv_dtype", ["fp8", pytest.param("auto", marks=pytest.mark.slow)])
def test_experts_in_fp8_where_ranks_share_attention(
    kv_dtype: str, stored_as: Callable[[str], Path], make_llm: Callable[..., LLM]
) -> None:
    """Sums over ranks differ in their last bits, and so may what e4m3 makes of them."""
    folder = stored_as("fp8-blocks")
    want = prompt_logprobs(make_llm(folder, 1, kv_cache_dtype=kv_dtype))
    found = prompt_logprobs(make_llm(folder, 2, expert_parallel=True, kv_cache_dtype=kv_dtype))
    plain = prompt_logprobs(make_llm(stored_as("16 bits"), 1, kv_cache_dtype=kv_dtype))
    assert_nearer(found, plain, want)


HOMES: dict[str, Any] = {"data_parallel": 2, "expert_parallel": True}


@pytest.mark.parametrize("is_tight", [True, False])
def test_preemptions_and_prompts_in_pieces(
    is_tight: bool, folder_of: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    """Each home preempts its own; 7 blocks of 16 tokens in each."""
    folder = folder_of("qwen3-moe")
    expected = answers(make_llm(folder, 1))
    engine = {"max_num_batched_tokens": 16, "num_kv_blocks": 80}
    if is_tight:
        engine = {**TIGHT, "num_kv_blocks": 8}
    llm = make_llm(folder, 1, **HOMES, **engine)
    assert_same(answers(llm), expected)
    assert (llm.engine.scheduler.num_preemptions > 0) == is_tight


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_home_that_is_idle_for_long_and_one_whose_requests_are_aborted(
    is_async: bool, folder_of: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    """One request is alone most of the time; others come, and are aborted in the middle."""
    folder = folder_of("deepseek-v2")
    prompts = [[(7 * i + 13 * j) % 250 for i in range(10 + 9 * j)] for j in range(5)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    wanted = [
        output.outputs[0].token_ids
        for output in make_llm(folder, 1).generate(prompts, params, use_tqdm=False)
    ]
    llm = make_llm(folder, 1, async_scheduling=is_async, **HOMES)
    driver = Driver(llm.engine)
    alone = driver.add(prompts[0], params)
    for _ in range(12):
        driver.step()
    others = [driver.add(prompt, params) for prompt in prompts[1:3]]
    for _ in range(5):
        driver.step()
    assert sorted(home.num_running for home in llm.engine.homes) == [1, 2]
    for key in others:
        assert llm.engine.abort(key)
    for _ in range(12):
        driver.step()
    late = [driver.add(prompt, params) for prompt in prompts[3:]]
    driver.run()
    driver.assert_empty()
    assert driver.tokens[alone, 0] == wanted[0]
    assert [driver.tokens[key, 0] for key in late] == wanted[3:]
    for key, want in zip(others, wanted[1:3], strict=True):
        got = driver.tokens[key, 0]
        assert got and got == want[: len(got)], "aborted in the middle"


def test_copies_of_the_experts_that_a_load_says_are_busy(
    folder_of: Callable[..., Path], make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    folder = folder_of("deepseek-v3")
    whole = make_llm(folder, 1)
    expected = answers(whole)
    file = tmp_path / "load.json"
    whole.save_expert_load(file)
    engine = {"expert_load_file": str(file), "redundant_experts": 3}
    llm = make_llm(folder, 1, **HOMES, **engine)
    assert_same(answers(llm), expected)
    assert {layer: load.sum() for layer, load in llm.expert_load().items()} == {
        layer: load.sum() for layer, load in whole.expert_load().items()
    }


@pytest.mark.parametrize(
    ("family", "engine", "said"),
    [
        ("qwen3-moe", {"data_parallel": 2}, "data_parallel is 2 without expert_parallel"),
        ("llama3", HOMES, "engine.expert_parallel is true, but the model has no experts"),
        ("qwen3-moe", {"redundant_experts": 2}, "redundant_experts places experts on ranks"),
        (
            "qwen3-moe",
            {**HOMES, "redundant_experts": 40},
            r"engine.redundant_experts \(40\) is too high",
        ),
        (
            "qwen3-moe",
            {**HOMES, "expert_load_file": "nowhere.json"},
            "engine.expert_load_file: now",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    family: str, engine: dict[str, Any], said: str, folder_of: Callable[..., Path]
) -> None:
    with pytest.raises(ValueError, match=said):
        LLM(str(folder_of(family)), tokenizer=False, device="cpu", **engine)
