"""A checkpoint of tens of thousands of tensors in several files: each is read once, in seconds."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.tiny_models import make_tiny

from pdserve.kernels.experts.placement import place_experts
from pdserve.kernels.ops import ops_for
from pdserve.models import loader
from pdserve.models.config import read_spec
from pdserve.models.loader import load_model
from pdserve.parallel.dims import ParallelDims

pytestmark = pytest.mark.lengthy

CPU = torch.device("cpu")
LAYERS, EXPERTS, FILES = 64, 128, 7
HIDDEN, WIDTH, HEADS, HEAD_DIM, VOCAB = 8, 4, 2, 4, 16
WITHIN_S = 15.0  # CPU time; it takes 3


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a Qwen3-MoE model."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in "qkv":
            yield f"{prefix}.self_attn.{name}_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        for name in "qk":
            yield f"{prefix}.self_attn.{name}_norm.weight", (HEAD_DIM,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", (HIDDEN,)
        yield f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name in ("gate", "up"):
                yield f"{prefix}.mlp.experts.{expert}.{name}_proj.weight", (WIDTH, HIDDEN)
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (HIDDEN, WIDTH)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tensors go to the files in turn, so each module is in several of them."""
    folder = make_tiny(
        "qwen3-moe",
        tmp_path_factory.mktemp("many"),
        num_hidden_layers=1,
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        intermediate_size=WIDTH,
        num_experts=EXPERTS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        decoder_sparse_step=1,
    )
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    places = {}
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in range(FILES)]
    for number, (name, shape) in enumerate(shapes()):
        tensors[number % FILES][name] = torch.full(shape, number % 100, dtype=torch.bfloat16)
        places[name] = f"model-{number % FILES}.safetensors"
    for number, held in enumerate(tensors):
        save_file(held, folder / f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each tensor was read."""
    found: Counter[str] = Counter()

    class Counted(loader._Tensor):
        def read(self, window: tuple[slice, ...]) -> torch.Tensor:
            found[self._name] += 1
            return super().read(window)

    monkeypatch.setattr(loader, "_Tensor", Counted)
    return found


def load(folder: Path, dims: ParallelDims) -> list[tuple[int, int]]:
    """Loads a rank's part, and returns what was reported: bytes done, and in all."""
    spec = read_spec(str(folder))
    placements = None
    if dims.ep > 1:
        placements = {layer: place_experts(EXPERTS, dims.ep) for layer in range(LAYERS)}
    said: list[tuple[int, int]] = []
    load_model(
        str(folder),
        spec,
        torch.bfloat16,
        CPU,
        ops_for(CPU),
        dims=dims,
        report=lambda done, total: said.append((done, total)),
        placements=placements,
    )
    return said


def test_each_tensor_is_read_once(folder: Path, reads: Counter[str]) -> None:
    began = time.process_time()
    said = load(folder, ParallelDims())
    assert time.process_time() - began < WITHIN_S
    names = [name for name, _ in shapes()]
    assert len(names) > 25_000 and reads == Counter(names)
    done, total = zip(*said, strict=True)
    assert len(done) == len(names) + 1 and list(done) == sorted(done)
    assert done[0] == 0 and done[-1] == sum(2 * torch.Size(shape).numel() for _, shape in shapes())
    files = folder.glob("*.safetensors")
    assert set(total) == {sum(file.stat().st_size for file in files)}


@pytest.mark.slow
def test_each_expert_is_read_by_one_rank(folder: Path, reads: Counter[str]) -> None:
    for rank in range(2):
        load(folder, ParallelDims(dp=2, ep=2, rank=rank))
    assert reads == Counter({name: 1 if ".experts." in name else 2 for name, _ in shapes()})
