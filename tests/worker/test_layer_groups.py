"""A model whose layers store rows of two widths: computed as by hand, and handed over as any."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.dense_model import our_logits
from support.pair import Pair, expected, prompt_of
from support.tiny_models import make_tiny

from pdserve.engine.llm import LLM
from pdserve.kernels.ops import ops_for
from pdserve.models.architectures.llama import Layer, Llama
from pdserve.models.config import read_spec
from pdserve.models.layers.context import LayerContext
from pdserve.models.loader import load_model
from pdserve.models.rope import rope_tables
from pdserve.models.step_context import RopeTables
from pdserve.protocol.events import Arrived
from pdserve.protocol.sampling_params import SamplingParams

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=20, seed=11, n=3)
NARROW, WIDE = 16, 48


class AlternatingLayer(Layer):
    """Odd layers have heads of WIDE."""

    def __init__(self, context: LayerContext, layer: int, rope: RopeTables) -> None:
        if layer % 2:
            spec = context.spec.model_copy(update={"head_dim": WIDE})
            context = replace(context, spec=spec)
            rope = rope_tables(spec.rope, WIDE, spec.max_position, context.weights.device)
        super().__init__(context, layer, rope)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama3 whose second layer's heads are of WIDE."""
    path = make_tiny("llama3", tmp_path_factory.mktemp("two"), head_dim=NARROW)
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name, tensor in weights.items():
        if ".layers.1.self_attn." in name:
            rows, columns = tensor.shape
            shape = (rows, columns * 3) if "o_proj" in name else (rows * 3, columns)
            weights[name] = 0.2 * torch.randn(shape, generator=generator)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(autouse=True)
def alternating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Llama, "layer", AlternatingLayer)


@pytest.fixture
def engine(folder: Path) -> LLM:
    return LLM(str(folder), tokenizer=False, num_kv_blocks=128, device="cpu")


def test_tokens_are_those_of_dense_attention(engine: LLM, folder: Path) -> None:
    layout = engine.engine.layout
    assert [(group.layers, group.row_width) for group in layout.groups] == [
        ((0, 2), NARROW),
        ((1,), WIDE),
    ]
    model = load_model(str(folder), read_spec(str(folder)), torch.float32, CPU, ops_for(CPU))
    for length in (1, 40, 100):
        prompt = prompt_of(length)
        ids = torch.tensor(prompt)
        for _ in range(24):
            ids = torch.cat([ids, our_logits(model, ids)[-1].argmax().view(1)])
        assert expected(engine, prompt, GREEDY) == {0: ids[length:].tolist()}
    assert len(set(ids[100:].tolist())) > 8, "a model that repeats itself proves little"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (64, 16)], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_split_equals_one_engine(
    engine: LLM, folder: Path, sizes: tuple[int, int], sampling: SamplingParams
) -> None:
    ring = 8 * 128 * engine.engine.layout.token_bytes
    p, d = ({"block_size": size} for size in sizes)
    pair = Pair(folder, p=p, d=d, staging_bytes=ring)
    try:
        for length in (1, 31, 64, 203):
            prompt = prompt_of(length)
            assert pair.split(prompt, sampling) == expected(engine, prompt, sampling)
        arrived = [event for event in pair.d.events if isinstance(event, Arrived)]
        assert {event.source for event in arrived} == {"p2p"}
        if sizes[0] == sizes[1]:  # whole blocks, whatever stands in them
            assert arrived[-1].num_bytes == 13 * pair.d.engine.layout.block_bytes
        pair.assert_empty()
    finally:
        pair.close()
