"""Quantised checkpoints of every format as models: each matrix is what a float64 dequantiser makes
of its tensors, rounded to float32; of all families, and of each rank's part."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.dense_model import our_logits
from support.quantised import dequantise, dequantise_rounded
from support.tiny_models import make_tiny
from torch import Tensor

from demo.storing import WAYS, write_quantised
from pdserve.engine.llm import LLM, RequestOutput, SamplingParams
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.ops import ops_for
from pdserve.models.checkpoint import LoadFormat
from pdserve.models.config import read_spec
from pdserve.models.layers import linear
from pdserve.models.loader import load_model
from pdserve.models.registry import CausalLM
from pdserve.parallel.dims import ParallelDims

pytestmark = pytest.mark.lengthy

CPU = torch.device("cpu")
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v2", "deepseek-v3")
DENSE = ("phi3", "glm4", "gemma2", "olmo2")  # two of fused matrices, two of norms elsewhere
EVEN: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 128}
EVEN_LATENT: dict[str, Any] = {
    **EVEN,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 128,
    "q_lora_rank": 32,
}


def load(
    folder: Path, load_format: LoadFormat = "auto", dims: ParallelDims | None = None
) -> CausalLM:
    spec = read_spec(str(folder), load_format)
    return load_model(str(folder), spec, torch.float32, CPU, ops_for(CPU), load_format, dims=dims)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Matrix]]:
    """Matrices in the order in which models finish them."""
    matrices: list[Matrix] = []
    finish = linear._for_ops

    def noted(*args: object) -> Matrix:
        matrix = finish(*args)  # type: ignore[arg-type]
        matrices.append(matrix)
        return matrix

    monkeypatch.setattr(linear, "_for_ops", noted)
    yield matrices


def write_dense(plain: Path, folder: Path, way: str, quantised: Path) -> Path:
    """The model whose matrices are those of the quantised one, in float32."""
    write_quantised(plain, folder, WAYS[way])
    spec = read_spec(str(quantised))
    assert spec.formats is not None
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(quantised / "model.safetensors").items():
        module, _, last = name.rpartition(".")
        modules.setdefault(module, {})[last] = tensor
    tensors: dict[str, Tensor] = {}
    for module, stored in modules.items():
        format = spec.formats.of(module)
        if format.kind == "dense":
            tensors |= {f"{module}.{name}": tensor for name, tensor in stored.items()}
            continue
        read = dequantise_rounded if format.kind == "int4_fp8" else dequantise
        matrix = torch.from_numpy(read(stored, format.packing)).float().contiguous()
        tensors[f"{module}.weight"] = matrix
        if "bias" in stored:
            tensors[f"{module}.bias"] = stored["bias"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((plain / "config.json").read_text())
    return folder


def check(plain: Path, folder: Path, way: str, made: list[Matrix], dims: ParallelDims) -> None:
    quantised = write_quantised(plain, folder / "quantised", WAYS[way])
    dense = write_dense(plain, folder / "dense", way, quantised)
    load(dense, dims=dims)
    wanted = list(made)
    made.clear()
    load(quantised, dims=dims)
    assert len(made) == len(wanted) and {m.kind for m in made} > {"dense"}
    for ours, want in zip(made, wanted, strict=True):
        assert ours.data.shape == want.data.shape and torch.equal(ours.data, want.data)


@pytest.mark.parametrize("way", WAYS)
def test_every_format(way: str, made: list[Matrix], tmp_path: Path) -> None:
    plain = make_tiny("qwen2", tmp_path / "plain", intermediate_size=160)
    check(plain, tmp_path, way, made, ParallelDims())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["fp8-blocks", "ct-fp8-rows", "awq", "ct-int4"])
@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_experts(family: str, way: str, made: list[Matrix], tmp_path: Path) -> None:
    sizes = EVEN_LATENT if "deepseek" in family else {**EVEN, "moe_intermediate_size": 64}
    plain = make_tiny(family, tmp_path / "plain", **sizes)
    check(plain, tmp_path, way, made, ParallelDims())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("way", ["fp8", "ct-fp8-rows", "awq", "ct-int4-zeros"])
@pytest.mark.parametrize("family", DENSE)
def test_dense_families(
    family: str, way: str, num_ranks: int, made: list[Matrix], tmp_path: Path
) -> None:
    plain = make_tiny(family, tmp_path / "plain", **EVEN)
    for rank in range(num_ranks):
        check(plain, tmp_path, way, made, ParallelDims(tp=num_ranks, rank=rank))
        made.clear()


def answers(folder: Path) -> list[RequestOutput]:
    llm = LLM(str(folder), tokenizer=False, device="cpu", num_kv_blocks=64, dtype="float32")
    prompts = [[(7 * n + start) % 250 for n in range(40 + start)] for start in range(3)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("family", DENSE)
def test_answers_are_those_of_the_dequantised_weights(family: str, tmp_path: Path) -> None:
    """In awq activations are not rounded."""
    plain = make_tiny(family, tmp_path / "plain", **EVEN)
    quantised = write_quantised(plain, tmp_path / "quantised", WAYS["awq"])
    found = answers(quantised)
    dense = answers(write_dense(plain, tmp_path / "dense", "awq", quantised))
    assert [each.outputs for each in found] == [each.outputs for each in dense]
    assert [each.outputs for each in found] != [each.outputs for each in answers(plain)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["fp8", "ct-fp8-rows", "awq", "gptq", "ct-int4-zeros"])
@pytest.mark.parametrize("family", ["llama3", "qwen3-moe", "deepseek-v3"])
def test_parts_of_two_ranks(family: str, way: str, made: list[Matrix], tmp_path: Path) -> None:
    sizes = EVEN_LATENT if "deepseek" in family else {**EVEN, "moe_intermediate_size": 64}
    plain = make_tiny(family, tmp_path / "plain", **sizes)
    for rank in range(2):
        check(plain, tmp_path, way, made, ParallelDims(tp=2, rank=rank))
        made.clear()


@pytest.mark.parametrize("family", ["llama3", "phi3", "gemma2", "olmo2"])
def test_blocks_of_two_ranks(family: str, made: list[Matrix], tmp_path: Path) -> None:
    """Where parts are whole blocks, and where rows begin within one and end in another: a rank has
    192 rows of k and of v."""
    plain = make_tiny(
        family,
        tmp_path / "plain",
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=96,
        intermediate_size=256,
    )
    for rank in range(2):
        check(plain, tmp_path, "fp8-blocks", made, ParallelDims(tp=2, rank=rank))
        made.clear()


def test_blocks_of_glm_hold_whole_heads(made: list[Matrix], tmp_path: Path) -> None:
    """Its rope pairs neighbouring rows, so rows change places within their head."""
    plain = make_tiny("glm4", tmp_path / "plain", **EVEN, head_dim=64)
    check(plain, tmp_path, "fp8-blocks", made, ParallelDims())
    odd = make_tiny("glm4", tmp_path / "odd", **EVEN, head_dim=96)
    folder = write_quantised(odd, tmp_path / "refused", WAYS["fp8-blocks"])
    with pytest.raises(ValueError, match=r"self_attn\..*scales cover 128 rows.*16-bit weights"):
        load(folder)


@pytest.mark.parametrize("way", ["fp8", "fp8-blocks", "gptq", "ct-int4-zeros"])
def test_random_weights_of_a_format(way: str, tmp_path: Path) -> None:
    plain = make_tiny("llama3", tmp_path / "plain", intermediate_size=160)
    folder = write_quantised(plain, tmp_path / "quantised", WAYS[way])
    ids = torch.randint(0, 256, (16,))
    one, again, dense = (our_logits(load(f, "dummy"), ids) for f in (folder, folder, plain))
    assert torch.equal(one, again) and not torch.equal(one, dense)
    error = ((one - dense).norm() / dense.norm()).item()
    assert 1e-3 < error < 1.0, error


def test_a_fingerprint_for_each_format(tmp_path: Path) -> None:
    plain = make_tiny("llama3", tmp_path / "plain", intermediate_size=160)
    prints = {read_spec(str(plain)).fingerprint()}
    for way in ("fp8", "awq", "gptq", "gptq-v2", "ct-int4", "ct-int4-fp8"):
        spec = read_spec(str(write_quantised(plain, tmp_path / way, WAYS[way])))
        assert type(spec).model_validate_json(spec.model_dump_json()) == spec
        prints.add(spec.fingerprint())
    assert len(prints) == 7


def test_biases_of_zeros_are_dropped_and_others_are_not(tmp_path: Path) -> None:
    plain = make_tiny("llama3", tmp_path / "plain", intermediate_size=160)
    folder = write_quantised(plain, tmp_path / "quantised", WAYS["gptq"])
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.bias"
    save_file({**tensors, name: torch.zeros(160)}, file, {"format": "pt"})
    load(folder)
    save_file({**tensors, name: torch.eye(160)[3]}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"no place for tensor {name}"):
        load(folder)


def test_scales_of_a_kv_cache_are_known(tmp_path: Path) -> None:
    plain = make_tiny("llama3", tmp_path / "plain", intermediate_size=160)
    folder = write_quantised(plain, tmp_path / "quantised", WAYS["fp8"])
    file = folder / "model.safetensors"
    scale = {f"model.layers.0.self_attn.{x}_scale": torch.tensor(0.5) for x in "kv"}
    save_file({**load_file(file), **scale}, file, {"format": "pt"})
    load(folder)
