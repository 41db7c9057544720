"""Ranks that hold some experts of a layer whole: each loads those, and knows the others' names."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.stored_weights import Stored
from support.tiny_models import make_tiny

from pdserve.kernels.experts.ops import Experts
from pdserve.kernels.experts.placement import Placement, place_experts
from pdserve.kernels.ops import TORCH
from pdserve.models.config import ModelSpec, read_spec
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.experts import ExpertMlp, ExpertNames
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.weights import WeightSet
from pdserve.parallel.dims import ParallelDims

CPU = torch.device("cpu")
LAYER = 1
MLP = f"model.layers.{LAYER}.mlp"
NUM_EXPERTS = 8
Tensors = dict[str, torch.Tensor]


def experts_of(
    spec: ModelSpec,
    dims: ParallelDims,
    placement: Placement | None,
    stored: Tensors | None,
) -> Experts:
    """The experts of a rank's layer. stored: the checkpoint's tensors of its mixture; None: drawn
    numbers."""
    weights = WeightSet(torch.float32, CPU)
    placements = None if placement is None else {LAYER: placement}
    context = LayerContext(spec, TORCH, weights, dims, placements=placements)
    norm = RmsNorm(context, f"model.layers.{LAYER}.post_attention_layernorm", spec.hidden_size)
    names = ExpertNames(shared="mlp.shared_experts")
    mlp = ExpertMlp(context, LAYER, f"model.layers.{LAYER}", names, norm)
    for weight in weights.all:
        weight.draw(0)
    if stored is not None:
        assert not weights.find_unknown(stored)
        assert weights.find_unknown([f"{MLP}.experts.{NUM_EXPERTS}.up_proj.weight"])
        for name in stored.keys() & weights.by_name.keys():
            weights.by_name[name].load(name, Stored(stored[name]))
    weights.finish()
    return mlp._experts.value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("deepseek-v2", tmp_path_factory.mktemp("mixture"), num_hidden_layers=2)


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_each_rank_has_its_experts_whole_and_all_shared_ones(
    folder: Path, tp: int, dp: int, is_drawn: bool
) -> None:
    spec = read_spec(str(folder))
    assert spec.experts is not None and spec.experts.routing.num_experts == NUM_EXPERTS
    num_shared = spec.experts.routing.num_shared
    assert num_shared == 2
    file = load_file(folder / "model.safetensors")
    stored = {name: tensor for name, tensor in file.items() if name.startswith(f"{MLP}.")}
    assert stored
    given = None if is_drawn else stored
    whole = experts_of(spec, ParallelDims(), None, given)
    placement = place_experts(NUM_EXPERTS, tp * dp, 3, [5, 0, 0, 9, 1, 1, 1, 1])
    for rank in range(tp * dp):
        dims = ParallelDims(tp=tp, dp=dp, ep=tp * dp, rank=rank)
        part = experts_of(spec, dims, placement, given)
        index = [*placement.experts[rank], *range(NUM_EXPERTS, NUM_EXPERTS + num_shared)]
        assert torch.equal(part.gate_up.data, whole.gate_up.data[index])
        assert torch.equal(part.down.data, whole.down.data[index])
    if not is_drawn:
        first = torch.cat(
            [stored[f"{MLP}.experts.0.{name}_proj.weight"] for name in ("gate", "up")]
        )
        assert torch.equal(whole.gate_up.data[0], first)
