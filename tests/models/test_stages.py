"""Stages of a model, one after the other, are the model: every rank loads its layers and ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.dense_model import dense_attend, dense_attend_latent, our_logits
from support.tiny_models import FAMILIES, make_tiny

from pdserve.kernels.ops import ops_for
from pdserve.models.checkpoint import LoadFormat
from pdserve.models.config import read_spec
from pdserve.models.loader import load_model
from pdserve.models.registry import CausalLM
from pdserve.models.step_context import StepContext
from pdserve.parallel.dims import ParallelDims

CPU = torch.device("cpu")
NUM_LAYERS = 3


def load(folder: Path, dims: ParallelDims, load_format: LoadFormat = "auto") -> CausalLM:
    spec = read_spec(str(folder), load_format)
    return load_model(
        str(folder), spec, torch.float32, CPU, ops_for(CPU), load_format=load_format, dims=dims
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_they_make_the_whole(family: str, pp: int, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path, num_hidden_layers=NUM_LAYERS)
    whole = load(folder, ParallelDims())
    ids = torch.randint(0, whole.spec.vocab_size, (32,))
    stages = sorted(
        (ParallelDims(pp=pp, rank=rank) for rank in range(pp)), key=lambda dims: dims.stage
    )
    models = [load(folder, dims) for dims in stages]
    assert sum(len(model.attention) for model in models) == NUM_LAYERS
    places: list[list[int]] = []

    def attend_at(layer: int, *others: Any) -> torch.Tensor:
        places[-1].append(layer)
        return dense_attend()(layer, *others)

    def attend_latent_at(layer: int, *others: Any) -> torch.Tensor:
        places[-1].append(layer)
        return dense_attend_latent(layer, *others)

    step = StepContext(attend_at, attend_latent=attend_latent_at)
    with torch.inference_mode():
        stream = models[0].embed(ids, step)
        for model in models:
            places.append([])
            stream = model.forward(stream, step)
        logits = models[-1].logits(models[-1].hidden(stream))
    assert places == [list(model.attention) for model in models]
    assert torch.equal(logits, our_logits(whole, ids))
    loads = [layer for model in models for layer in model.expert_load]
    assert loads == list(whole.expert_load)


def test_dummy_weights_of_a_stage_are_those_of_the_whole(tmp_path: Path) -> None:
    folder = make_tiny("llama3", tmp_path, num_hidden_layers=NUM_LAYERS)
    whole = load(folder, ParallelDims(), "dummy")
    ids = torch.randint(0, whole.spec.vocab_size, (16,))
    first, last = (load(folder, ParallelDims(pp=2, rank=rank), "dummy") for rank in (1, 0))
    step = StepContext(dense_attend())
    with torch.inference_mode():
        stream = last.forward(first.forward(first.embed(ids, step), step), step)
        assert torch.equal(last.logits(last.hidden(stream)), our_logits(whole, ids))


def test_a_stage_that_lacks_a_tensor_says_so(tmp_path: Path) -> None:
    folder = make_tiny("llama3", tmp_path, num_hidden_layers=2)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    load(folder, ParallelDims(pp=2, rank=1))
    with pytest.raises(ValueError, match=r"needs tensor model\.layers\.1\.mlp\.down"):
        load(folder, ParallelDims(pp=2, rank=0))
