"""Floors of steps with quantised weights and an fp8 KV cache: bytes as the device allocates them,
and steps counted by hand."""

import pytest
import torch
from support.tiny_models import DEMO

from benchmarks.costs.matrix_bytes import FEW_ROWS, MODULES, formats_of, matrix_bytes
from benchmarks.engine.step_floor import Ceilings, Chunk, Stored, step_floor
from benchmarks.engine.step_profile import stored_by
from benchmarks.support.places import SHAPES
from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine.build import build_engine
from pdserve.kernels.linear.int4 import products as int4_products
from pdserve.kernels.linear.schemes.scheme import Cut
from pdserve.models.config import ModelSpec, read_spec
from pdserve.models.formats.source_format import DENSE, SourceFormat
from pdserve.models.sources.storage import DENSE_STORAGE, SCHEMES

BYTES = Ceilings(1.0, 1e30)  # a floor in "seconds" is its bytes
OPERATIONS = Ceilings(1e30, 1.0)
FORMATS = {
    "dense": DENSE,
    "fp8 rows": SourceFormat(kind="fp8"),
    "fp8 blocks": SourceFormat(kind="fp8_block", group=(128, 128)),
    **{
        f"int4 {columns}": SourceFormat(kind="int4", group=(1, columns), has_zeros=True)
        for columns in (32, 64, 128, 0)
    },
    "int4 rounded": SourceFormat(kind="int4_fp8", group=(1, 64)),
}
UNEVEN = "int4 128", 192  # int4 has whole groups only
# columns and rows of the matrices of a layer of Llama-8B: qkv, o, gate-up, down
LAYER = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
NUMBERS = sum(num_in * num_out for num_in, num_out in LAYER)


def spec_of(name: str) -> ModelSpec:
    return read_spec(str(SHAPES / name), "dummy")


@pytest.mark.parametrize(
    ("name", "num_in"),
    [(name, size) for name in FORMATS for size in (4096, 1408, 192) if (name, size) != UNEVEN],
)
@pytest.mark.parametrize("num_out", [2048, 200])
def test_bytes_are_those_that_the_device_holds(name: str, num_in: int, num_out: int) -> None:
    format = FORMATS[name]
    make = SCHEMES.get(format.kind)
    scheme = DENSE_STORAGE.scheme if make is None else make(format)
    cut = Cut(slice(0, num_out), num_out, slice(0, num_in), num_in)
    matrix = scheme.allocate([cut], torch.bfloat16, torch.device("cpu"))
    tensors = (matrix.data, matrix.scales, matrix.zeros, matrix.row_scales)
    held = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    assert matrix_bytes(format, num_in, num_out, 2) == held


@pytest.mark.parametrize(
    ("name", "bytes_per_number", "scales"),
    [
        ("llama-3.1-8b", 2, 0),
        # a float32 for each row
        ("llama-3.1-8b-fp8", 1, 4 * sum(num_out for _, num_out in LAYER)),
        # a float32 and four zero points of 8 bits for each row and 128 columns
        ("llama-3.1-8b-awq", 0.5, NUMBERS / 128 * 8),
        ("llama-3.1-8b-gptq", 0.5, NUMBERS / 128 * 8),
    ],
)
def test_the_weights_of_one_row(name: str, bytes_per_number: float, scales: float) -> None:
    """The row itself is read in 8 bits by products in fp8, and written in 16 by all."""
    spec = spec_of(name)
    floor = step_floor(spec, Stored(formats=formats_of(spec)), BYTES, [Chunk(127, 1)])
    layers = sum(floor[part] for part in ("qkv", "o", "gate-up", "down"))
    read = 1 if name.endswith("fp8") else 2
    row = sum(read * num_in + 2 * num_out for num_in, num_out in LAYER)
    assert layers == 32 * (bytes_per_number * NUMBERS + scales + row)
    # the head stays in 16 bits
    assert floor["head"] == pytest.approx(2 * 4096 * 128256, rel=1e-3)


def test_experts_in_blocks_of_fp8() -> None:
    """8 of 128 experts of 3 x 2,048 x 768 in each of 48 layers, with a float32 for 128 x 128."""
    spec = spec_of("qwen3-30b-a3b-fp8")
    floor = step_floor(spec, Stored(formats=formats_of(spec)), BYTES, [Chunk(127, 1)])
    numbers = 48 * 8 * 3 * 2048 * 768
    assert floor["experts"] == pytest.approx(numbers * (1 + 4 / 128**2), rel=1e-3)
    assert floor["router"] == pytest.approx(48 * 2 * 2048 * 128, rel=0.02)


def test_products_in_fp8_take_half_the_time_and_those_in_int4_do_not() -> None:
    floors = {}
    for name in ("llama-3.1-8b", "llama-3.1-8b-fp8", "llama-3.1-8b-awq"):
        spec = spec_of(name)
        stored = Stored(formats=formats_of(spec))
        floors[name] = step_floor(spec, stored, OPERATIONS, [Chunk(0, 8192)])
    whole, fp8, int4 = floors.values()
    assert int4 == whole
    for part in MODULES:
        assert fp8[part] == whole[part] / 2
    assert fp8["attention"] == whole["attention"] and fp8["head"] == whole["head"]


def test_int4_with_rounded_activations_takes_half_the_time_for_many_rows() -> None:
    plain, rounded = (spec_of(name) for name in ("llama-3.1-8b-awq", "llama-3.1-8b-int4-fp8"))
    assert FEW_ROWS == int4_products.FEW_ROWS
    for num_rows, factor in ((FEW_ROWS, 1), (FEW_ROWS + 1, 2)):
        whole, half = (
            step_floor(s, Stored(formats=formats_of(s)), OPERATIONS, [Chunk(0, num_rows)])
            for s in (plain, rounded)
        )
        assert all(whole[part] == factor * half[part] for part in MODULES)


def test_an_fp8_kv_cache_halves_what_is_cached_and_nothing_else() -> None:
    """64 decodes after 1,023 tokens: keys and values of 8 x 128 numbers, of 32 layers. Queries and
    results of 32 x 128 numbers keep 16 bits."""
    spec = spec_of("llama-3.1-8b")
    chunks = [Chunk(1023, 1)] * 64
    plain, rounded = (step_floor(spec, Stored(cached=cached), BYTES, chunks) for cached in (2, 1))
    rows = 32 * 64 * 2 * 32 * 128 * 2
    for floor, cached in ((plain, 2), (rounded, 1)):
        assert floor["attention"] == 32 * 64 * 1024 * 2 * 8 * 128 * cached + rows
    written = 32 * 64 * 2 * 8 * 128
    assert plain["rope + KV write"] - rounded["rope + KV write"] == written
    others = plain.keys() - {"attention", "rope + KV write"}
    assert all(plain[part] == rounded[part] for part in others)


def test_what_an_engine_stores() -> None:
    model = ModelConfig(path=str(DEMO), quantization="fp8", dtype="bfloat16")
    config = EngineConfig(device="cpu", kv_cache_dtype="fp8", num_kv_blocks=8)
    stored = stored_by(build_engine(model, config))
    assert (stored.item, stored.cached) == (2, 1)
    assert {format.kind for format in stored.formats.values()} == {"fp8"}
    plain = stored_by(build_engine(ModelConfig(path=str(DEMO)), EngineConfig(device="cpu")))
    assert (plain.item, plain.cached, plain.formats) == (4, 4, {})
