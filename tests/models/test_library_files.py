"""Our writers of quantised matrices against files that the formats' own libraries wrote
(tests/models/data/README.md)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.library_files import signed
from support.quantised import dequantise

from demo.storing import WAYS, Tensors

DATA = Path(__file__).parent / "data"
# what was stored: packing of SourceFormat
CASES = {
    "awq": "awq",
    "gptq": "gptq",
    "gptq-zeros": "gptq",
    "ct-int4": "compressed",
    "ct-int4-rows": "compressed",
    "ct-int4-zeros": "compressed",
    "ct-fp8-tensor": "plain",
    "ct-fp8-rows": "plain",
    "ct-fp8-blocks": "plain",
}


def read(case: str) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """The library's tensors, the matrix, and what the library makes of its tensors."""
    stored = load_file(DATA / f"{case}.safetensors")
    return stored, stored.pop("matrix").float(), stored.pop("dequantised")


@pytest.mark.parametrize("case", CASES)
def test_our_writer_stores_what_the_library_does(case: str) -> None:
    theirs, matrix, _ = read(case)
    ours = WAYS[case].store(signed(matrix) if case.startswith("gptq") else matrix)
    ours.pop("input_scale", None)  # not of the weights
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        is_as_given = name == "scales"  # AutoGPTQ leaves it to the caller to halve them
        assert tensor.dtype == ours[name].dtype or is_as_given, name
        assert torch.equal(tensor.double(), ours[name].double()), name


@pytest.mark.parametrize("case", CASES)
def test_our_reader_makes_of_it_what_the_library_does(case: str) -> None:
    stored, _, theirs = read(case)
    ours = torch.from_numpy(dequantise(stored, CASES[case]))
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
