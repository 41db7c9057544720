"""Tests that model.quantization: fp8 quantises 16-bit weights while they are loaded."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.dense_model import our_logits
from support.tiny_models import make_tiny

from demo.storing import WAYS, write_quantised
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.kernels.e4m3 import E4M3
from pdserve.kernels.ops import ops_for
from pdserve.models.config import read_spec
from pdserve.models.layers.linear import Linear
from pdserve.models.loader import load_model
from pdserve.models.registry import CausalLM
from pdserve.models.sources.storage import DENSE_STORAGE

CPU = torch.device("cpu")


def load(folder: Path, quantization: str | None = "fp8", load_format: str = "auto") -> CausalLM:
    spec = read_spec(str(folder), load_format, quantization=quantization)  # type: ignore[arg-type]
    return load_model(str(folder), spec, torch.float32, CPU, ops_for(CPU), load_format)  # type: ignore[arg-type]


def in_fp8(weight: torch.Tensor) -> torch.Tensor:
    """Rounds a matrix to e4m3 by rows, in float64, rounded once."""
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).double()
    codes = (weight.float() / scales.float()).clamp(-448, 448).to(E4M3)
    return (codes.double() * scales).float()


def test_fused_matrices_are_those_of_the_rows_in_fp8(tmp_path: Path) -> None:
    folder = make_tiny("llama3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    layer = load(folder)._layers[1]  # type: ignore[attr-defined]
    qkv: Linear = layer.attention._qkv
    names = [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
    want = torch.cat([in_fp8(tensors[name]) for name in names])
    assert qkv.matrix.kind == "fp8" and qkv.matrix.scales is None, "the CPU has the twin"
    assert torch.equal(qkv.matrix.data, want)
    assert not torch.equal(want, torch.cat([tensors[name] for name in names]))


def test_experts_are_quantised_and_what_attention_absorbs_is_not(tmp_path: Path) -> None:
    """A shared expert is a part of a module, scaled by its own columns."""
    folder = make_tiny("deepseek-v2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    layer = load(folder)._layers[1]  # type: ignore[attr-defined]
    experts = layer._mlp._experts.value
    mlp = "model.layers.1.mlp"

    def stored(expert: str) -> list[torch.Tensor]:
        return [tensors[f"{mlp}.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")]

    wanted = [stored(f"experts.{number}") for number in range(8)]
    gates, ups, downs = stored("shared_experts")
    shared = zip(gates.chunk(2), ups.chunk(2), downs.chunk(2, 1), strict=True)
    wanted += [list(each) for each in shared]
    assert experts.gate_up.kind == experts.down.kind == "fp8"
    assert len(experts.gate_up.data) == len(experts.down.data) == len(wanted)
    for number, (gate, up, down) in enumerate(wanted):
        gate_up = torch.cat((in_fp8(gate), in_fp8(up)))
        assert torch.equal(experts.gate_up.expert(number).data, gate_up)
        assert torch.equal(experts.down.expert(number).data, in_fp8(down))
    absorbed = layer.attention._heads.value
    kv_b = tensors["model.layers.1.self_attn.kv_b_proj.weight"]
    assert absorbed.kind == "dense" and torch.equal(absorbed.data.flatten(0, 1), kv_b)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen2-moe", "deepseek-v3"])
def test_logits_are_near_those_of_the_whole_numbers(family: str, tmp_path: Path) -> None:
    """Matrices that stay dense are complete: heads, routers, latents' matrices, gates."""
    folder = make_tiny(family, tmp_path)
    ids = torch.randint(0, 256, (32,))
    plain, quantised = (our_logits(load(folder, name), ids).double() for name in (None, "fp8"))
    error = ((quantised - plain).norm() / plain.norm()).item()
    assert 1e-3 < error < 0.5, error


def test_dummy_weights_are_quantised_too(tmp_path: Path) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    ids = torch.randint(0, 256, (16,))
    plain, quantised, again = (
        our_logits(load(folder, name, "dummy"), ids) for name in (None, "fp8", "fp8")
    )
    assert torch.equal(quantised, again) and not torch.equal(plain, quantised)


def test_the_fingerprint_knows(tmp_path: Path) -> None:
    folder = str(make_tiny("llama2", tmp_path))
    plain, again, quantised = (read_spec(folder, quantization=q) for q in (None, None, "fp8"))
    assert plain.fingerprint() == again.fingerprint() != quantised.fingerprint()
    assert type(quantised).model_validate_json(quantised.model_dump_json()) == quantised


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    plain = make_tiny("llama2", tmp_path / "a", intermediate_size=128)
    folder = write_quantised(plain, tmp_path / "b", WAYS["awq"])
    with pytest.raises(
        ValueError, match=r"model\.quantization: fp8 .*config says AWQ int4 .*leave it out"
    ):
        read_spec(str(folder), quantization="fp8")


def test_an_engine_serves_it(tmp_path: Path) -> None:
    """Tokens do not depend on the batch, and another fingerprint keeps its rows apart."""
    folder = str(make_tiny("llama3", tmp_path))

    def engine_of(quantization: str | None) -> LLM:
        return LLM(
            folder, tokenizer=False, device="cpu", num_kv_blocks=64, quantization=quantization
        )

    llm, plain = engine_of("fp8"), engine_of(None)
    assert llm.engine.model_fingerprint != plain.engine.model_fingerprint
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    prompts = [[3, 4, 5], [9] * 20, list(range(40))]

    def answers(of: LLM, some: list[list[int]]) -> list:
        outputs = of.generate(some, params, use_tqdm=False)
        return [(choice.token_ids, choice.logprobs) for o in outputs for choice in o.outputs]

    together = answers(llm, prompts)
    assert together == [answers(llm, [prompt])[0] for prompt in prompts]
    assert together != answers(plain, prompts)


def test_parts_stored_in_two_ways_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a checkpoint's modules that are multiplied as one differ."""
    folder = make_tiny("llama2", tmp_path)
    from pdserve.models.layers import linear

    chosen = linear.storage_of

    def but_for_k(spec, module: str):  # type: ignore[no-untyped-def]
        return DENSE_STORAGE if module.endswith("k_proj") else chosen(spec, module)

    monkeypatch.setattr(linear, "storage_of", but_for_k)
    with pytest.raises(
        ValueError,
        match=r"0\.self_attn\.q_proj would be held as fp8.*, .*k_proj as 16 bits.*one way",
    ):
        load(folder)
    assert math.isfinite(our_logits(load(folder, None), torch.arange(16)).sum().item())
