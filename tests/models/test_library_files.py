"""Our writers of quantised matrices against files that the formats' own libraries wrote
(tests/models/data/README.md)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.library_files import example, signed
from tests.support.quantised import WAYS, Tensors, dequantise

DATA = Path(__file__).parent / "data"
# file, case: packing of SourceFormat
CASES = {
    ("autoawq", "awq"): "awq",
    ("auto-gptq", "gptq"): "gptq",
    ("auto-gptq", "gptq-zeros"): "gptq",
    ("compressed-tensors", "ct-int4"): "compressed",
    ("compressed-tensors", "ct-int4-rows"): "compressed",
    ("compressed-tensors", "ct-int4-zeros"): "compressed",
    ("compressed-tensors", "ct-fp8-tensor"): "plain",
    ("compressed-tensors", "ct-fp8-rows"): "plain",
    ("compressed-tensors", "ct-fp8-blocks"): "plain",
}


def read(library: str, case: str) -> tuple[Tensors, torch.Tensor]:
    """The library's tensors, and what it makes of them."""
    tensors = load_file(DATA / f"{library}.safetensors")
    stored = {
        name.removeprefix(f"{case}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{case}.")
    }
    return stored, stored.pop("dequantised")


@pytest.mark.parametrize(("library", "case"), CASES)
def test_our_writer_stores_what_the_library_does(library: str, case: str) -> None:
    theirs, _ = read(library, case)
    matrix = signed(example()) if library == "auto-gptq" else example()
    ours = WAYS[case].store(matrix)
    ours.pop("input_scale", None)  # not of the weights
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.shape == ours[name].shape and tensor.dtype == ours[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), ours[name].contiguous().view(torch.uint8)), (
            name
        )


@pytest.mark.parametrize(("library", "case"), CASES)
def test_our_reader_makes_of_it_what_the_library_does(library: str, case: str) -> None:
    stored, theirs = read(library, case)
    ours = torch.from_numpy(dequantise(stored, CASES[library, case]))
    assert torch.equal(ours.to(theirs.dtype), theirs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(32, 64), (160, 192), (8, 320)])
def test_what_is_stored_is_near_the_matrix(way: str, shape: tuple[int, int]) -> None:
    """A number is off by at most half a step of its scale."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)
    matrix[3] = matrix[3].abs()
    packing = {"awq": "awq", "gptq": "gptq", "ct-int4": "compressed"}
    named = next((p for name, p in packing.items() if way.startswith(name)), "plain")
    if way == "gptq-v2":
        named = "gptq_v2"
    error = np.abs(dequantise(WAYS[way].store(matrix), named) - matrix.double().numpy())
    largest = matrix.abs().amax(1, keepdim=True).numpy()
    if named == "plain":
        step = 2.0**-4 * np.abs(matrix.numpy()) + matrix.abs().max().item() * 2.0**-17
    else:
        step = largest * (0.51 / 7 + 1e-3)
    assert (error <= step).all() and error.max() > 0
