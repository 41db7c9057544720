"""Tests load_model: sharded equals unsharded, nothing is missing, nothing is left over, and dummy
weights are alike everywhere."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import make_tiny

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.kv.ops import HeadNorms
from pdserve.kernels.ops import ops_for
from pdserve.models.checkpoint import LoadFormat
from pdserve.models.config import read_spec
from pdserve.models.dummy import CPU_CHUNK, fill_normal
from pdserve.models.loader import load_model
from pdserve.models.registry import CausalLM
from pdserve.models.step_context import RopeTables, StepContext
from pdserve.models.weights import Weight

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def load(
    folder: Path,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> CausalLM:
    spec = read_spec(str(folder), load_format, seed)
    return load_model(str(folder), spec, dtype, CPU, ops_for(CPU), load_format, seed)


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights keep their tensors, to be looked at: by name `held`."""
    finish = Weight.finish

    def keep(weight: Weight) -> None:
        weight.held = dict(weight.tensors)  # type: ignore[attr-defined]
        finish(weight)

    monkeypatch.setattr(Weight, "finish", keep)


def data(weight: Weight) -> torch.Tensor:
    held: Tensors = weight.held  # type: ignore[attr-defined]
    return held["weight"]


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_sharded_equals_unsharded(tmp_path: Path) -> None:
    whole = load(make_tiny("qwen2", tmp_path / "whole", seed=3))
    sharded = load(make_tiny("qwen2", tmp_path / "sharded", seed=3, max_shard_size="50KB"))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    for a, b in zip(whole.weights.all, sharded.weights.all, strict=True):
        assert torch.equal(data(a), data(b))


def test_fused_rows_are_the_checkpoint_s_tensors_in_order(tmp_path: Path) -> None:
    folder = make_tiny("llama3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    model = load(folder)
    names = [f"model.layers.2.self_attn.{x}_proj.weight" for x in "qkv"]
    fused = data(model.weights.by_name[names[0]])
    assert torch.equal(fused, torch.cat([tensors[name] for name in names]))


def test_dtype_is_converted(tmp_path: Path) -> None:
    folder = rewrite(
        make_tiny("llama2", tmp_path), lambda t: t.update({k: v.bfloat16() for k, v in t.items()})
    )
    name = "model.norm.weight"
    expected = load_file(folder / "model.safetensors")[name].float()
    assert torch.equal(data(load(folder).weights.by_name[name]), expected)
    assert data(load(folder, dtype=torch.float16).weights.by_name[name]).dtype == torch.float16


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    load(rewrite(make_tiny("llama2", tmp_path, tie_word_embeddings=True), add))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "needs tensor lm_head.weight, which .* lacks"),
        (
            lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"),
            r"needs tensor .*layers\.1\.self_attn\.k_proj\.weight",
        ),
        (
            lambda t: t.update({"model.layers.3.x": torch.ones(1)}),
            r"no place for .*model\.layers\.3\.x",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(65)}),
            r"model\.norm\.weight has shape \[65\].*\[64\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            r"model\.norm\.weight is I8 in the checkpoint",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
            r"model\.norm\.weight is F8_E4M3 in the checkpoint",
        ),
    ],
    ids=["lm_head", "part-of-fused", "extra", "shape", "int8", "fp8"],
)
def test_every_tensor_is_accounted_for(
    change: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    folder = rewrite(make_tiny("llama2", tmp_path), change)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_name_in_two_files_is_an_error(tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path, max_shard_size="50KB")
    first, *_, last = sorted(folder.glob("*.safetensors"))
    tensors = load_file(last)
    name = sorted(load_file(first))[0]
    tensors[name] = load_file(first)[name]
    save_file(tensors, last)
    with pytest.raises(ValueError, match=f"{name} is in two files .*{first.name} and {last.name}"):
        load(folder)


def test_the_bytes_reported_are_those_of_the_files(tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path, max_shard_size="50KB")
    said: list[tuple[int, int]] = []
    spec = read_spec(str(folder))
    load_model(
        str(folder),
        spec,
        torch.float32,
        CPU,
        ops_for(CPU),
        report=lambda done, total: said.append((done, total)),
    )
    done, total = zip(*said, strict=True)
    assert list(done) == sorted(set(done)) and len(done) > 20
    headers = total[0] - done[-1]
    assert set(total) == {total[0]} and 0 < headers < total[0] // 10


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    folder = rewrite(
        make_tiny("llama2", tmp_path), lambda t: [t.pop(k) for k in list(t) if "mlp" in k]
    )
    with pytest.raises(ValueError, match=r"needs the tensors .* and 1 more, which"):
        load(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path, max_shard_size="50KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"missing {shard.name}"):
        load(folder)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    file = make_tiny("llama2", tmp_path) / "model.safetensors"
    content = file.read_bytes()
    for kept in (len(content) - 100, 50, 3):
        file.write_bytes(content[:kept])
        with pytest.raises(
            ValueError, match=r"model\.safetensors is (cut short|not a complete safetensors file)"
        ):
            load(tmp_path)


def dummy_folder(tmp_path: Path, family: str = "qwen3") -> Path:
    folder = make_tiny(family, tmp_path / "full")
    only_config = tmp_path / "config-only"
    only_config.mkdir()
    (only_config / "config.json").write_text((folder / "config.json").read_text())
    return only_config


def test_dummy_needs_config_alone_and_follows_the_seed(tmp_path: Path) -> None:
    folder = dummy_folder(tmp_path)
    a, b, c = (load(folder, "dummy", seed) for seed in (5, 5, 6))
    matrices = [i for i, weight in enumerate(a.weights.all) if data(weight).dim() == 2]
    assert not a.weights.missing() and matrices
    for i in matrices:
        assert torch.equal(data(a.weights.all[i]), data(b.weights.all[i]))
        assert not torch.equal(data(a.weights.all[i]), data(c.weights.all[i]))


def test_dummy_activations_keep_their_scale(tmp_path: Path) -> None:
    folder = dummy_folder(tmp_path, "llama2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 24}))
    model = load(folder, "dummy")
    ids = torch.arange(32)
    scales: list[float] = []

    def attend(
        layer: int,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: RopeTables,
        norms: HeadNorms | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        scales.extend(x.std().item() for x in (q, k, v))
        return v

    step = StepContext(attend)
    hidden = model.hidden(model.forward(model.embed(ids, step), step))
    scales.append(model.logits(hidden).std().item())
    assert len(scales) == 73 and all(0.5 < scale < 2 for scale in scales)


def test_normal_numbers_are_normal_enough() -> None:
    x = torch.empty(1000, 1000)
    fill_normal(x, 0.5, "key")
    assert abs(x.mean()) < 0.002 and abs(x.std() - 0.5) < 0.002
    rows = torch.corrcoef(x[:200]) - torch.eye(200)
    assert rows.abs().max() < 0.2


def test_normal_numbers_depend_on_key_and_index_alone() -> None:
    """An element equals splitmix64 of its index in Python integers, across two chunks and in
    bfloat16."""
    x = torch.empty(CPU_CHUNK + 8, dtype=torch.bfloat16)
    fill_normal(x, 1.0, "7/name")
    for index in (0, 1, CPU_CHUNK - 1, CPU_CHUNK, CPU_CHUNK + 7):
        assert x[index] == torch.tensor(expected_normal("7/name", index)).bfloat16()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_normal_numbers_are_those_of_the_cpu() -> None:
    on_cpu = torch.empty(100_003)
    on_gpu = torch.empty(100_003, device="cuda")
    fill_normal(on_cpu, 0.02, "key")
    fill_normal(on_gpu, 0.02, "key")
    assert torch.equal(on_cpu, on_gpu.cpu())


def expected_normal(key: str, index: int) -> float:
    mask = (1 << 64) - 1
    start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    z = (start + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    total = sum((z >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
    std = (4 * ((1 << 32) - 1) / 12) ** 0.5
    return (total - 2 * 65535) / std


def test_layers_for_more_tokens_at_once_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3's checkpoints have them behind the last; others are missed nowhere."""
    folder = make_tiny("deepseek-v3", tmp_path, num_nextn_predict_layers=0)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    behind = f"model.layers.{config['num_hidden_layers']}."
    for name in ("eh_proj.weight", "enorm.weight", "mlp.experts.0.up_proj.weight"):
        tensors[behind + name] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"no place for the tensors .*layers\.3\.eh_proj"):
        load(folder)
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    load(folder)
