"""Quantised weights and a KV cache in fp8 on a CUDA device: the CPU's probabilities, in every way
of storing, as far as rounding lets them be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.harness import logprob_of
from support.quantised import write_kv_scales
from support.tiny_models import make_tiny

from demo.storing import WAYS, write_quantised
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.kernels.linear.int4.rounded_ops import FEW_ROWS

pytestmark = pytest.mark.gpu

LENGTHS = (5, 70, 16, 33, 150, 260)
PROMPTS = [
    torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in LENGTHS
]
WHOLE_BLOCKS: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
}
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=0)


def logprobs_by(folder: Path, device: str, dtype: str, **engine: Any) -> torch.Tensor:
    """Compute log-probabilities of all tokens of the prompts, except the first of each."""
    llm = LLM(str(folder), tokenizer=False, num_kv_blocks=200, device=device, dtype=dtype, **engine)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.engine.check_integrity()
    said = [logprob_of(entry) for output in outputs for entry in (output.prompt_logprobs or [])[1:]]
    assert len(said) == sum(LENGTHS) - len(LENGTHS)
    return torch.tensor(said)


def check(plain: Path, folder: Path, **engine: Any) -> None:
    """Quantisation costs on a GPU what it costs on CPU, up to the costs of bfloat16. An activation
    between two codes may be rounded to the other one on another device."""
    exact = logprobs_by(plain, "cpu", "float32")
    cost = (logprobs_by(folder, "cpu", "float32", **engine) - exact).abs().mean()
    for dtype in ("float32", "bfloat16"):
        rounding = (logprobs_by(plain, "cuda", dtype) - exact).abs().mean()
        gap = (logprobs_by(folder, "cuda", dtype, **engine) - exact).abs().mean()
        print(folder.name, engine, dtype, f"{cost:.4f} {rounding:.4f} {gap:.4f}")
        assert cost > 0 and gap <= 1.2 * cost + 1.5 * rounding


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return make_tiny("llama3", tmp_path / "plain", seed=3, intermediate_size=160)


@pytest.mark.parametrize("stored", sorted(WAYS))
def test_weights(stored: str, plain: Path, tmp_path: Path) -> None:
    check(plain, write_quantised(plain, tmp_path / stored, WAYS[stored]))


@pytest.mark.parametrize("stored", ["awq", "gptq", "ct-int4-rows"])
def test_int4_with_activations_in_fp8(stored: str, plain: Path, tmp_path: Path) -> None:
    folder = write_quantised(plain, tmp_path / stored, WAYS[stored])
    check(plain, folder, activation_dtype="fp8")


@pytest.mark.parametrize("num_seqs", [8, FEW_ROWS + 8])
def test_graphs_share_the_scratch_of_int4(num_seqs: int, plain: Path, tmp_path: Path) -> None:
    """Steps of few decodes, and of so many that each matrix is written in e4m3 first."""
    folder = write_quantised(plain, tmp_path / "int4", WAYS["ct-int4-fp8"])
    prompts = [[number, 3, 4] for number in range(num_seqs)]
    found = []
    for cuda_graphs in (False, True):
        llm = LLM(
            str(folder),
            tokenizer=False,
            num_kv_blocks=200,
            device="cuda",
            dtype="bfloat16",
            cuda_graphs=cuda_graphs,
        )
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


def test_weights_quantised_while_they_load(plain: Path) -> None:
    check(plain, plain, quantization="fp8")


@pytest.mark.parametrize("has_scales", [False, True])
def test_a_kv_cache_in_fp8(plain: Path, has_scales: bool) -> None:
    if has_scales:
        write_kv_scales(plain)
    check(plain, plain, kv_cache_dtype="fp8")


def test_both(plain: Path, tmp_path: Path) -> None:
    folder = write_quantised(plain, tmp_path / "fp8", WAYS["fp8"])
    write_kv_scales(folder)
    check(plain, folder, kv_cache_dtype="fp8")


@pytest.mark.parametrize("stored", ["fp8-blocks", "fp8"])
@pytest.mark.parametrize("sizes", [{}, WHOLE_BLOCKS], ids=["tiny", "whole blocks"])
def test_experts(sizes: dict[str, Any], stored: str, tmp_path: Path) -> None:
    plain = make_tiny("qwen3-moe", tmp_path / "plain", seed=3, **sizes)
    check(plain, write_quantised(plain, tmp_path / stored, WAYS[stored]))


def test_experts_quantised_while_they_load(tmp_path: Path) -> None:
    plain = make_tiny("qwen3-moe", tmp_path / "plain", seed=3)
    check(plain, plain, quantization="fp8")


@pytest.mark.parametrize("stored", ["awq", "ct-int4-rows"])
def test_experts_in_int4(stored: str, tmp_path: Path) -> None:
    plain = make_tiny("qwen3-moe", tmp_path / "plain", seed=3, intermediate_size=128)
    check(plain, write_quantised(plain, tmp_path / stored, WAYS[stored]))
