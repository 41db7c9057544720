"""Tiny checkpoints of every way of storing weights that pdserve knows, and what their weights are.

demo/storing.py writes them. `dequantise` reads in float64 and shares no code with the writers: it
looks up each number by its own index, where writers shift and join.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo.storing import BLOCK
from pdserve.models.checkpoint import LoadFormat
from pdserve.models.config import read_spec

LOAD_FORMATS: tuple[LoadFormat, ...] = ("auto", "dummy")


def change_config(folder: Path, path: tuple[str, ...], value: object) -> None:
    """Changes what config.json says of the quantisation."""
    config = json.loads((folder / "config.json").read_text())
    below = config["quantization_config"]
    for key in path[:-1]:
        below = below[key]
    if value is None:
        below.pop(path[-1], None)
    else:
        below[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(config))


def refused(folder: Path, load_format: LoadFormat = "auto") -> str:
    """Returns the error by which the model is refused."""
    with pytest.raises(ValueError) as caught:
        read_spec(str(folder), load_format)
    return str(caught.value)


# --- reading, in float64 ---


def dequantise(stored: Mapping[str, Tensor], packing: str) -> np.ndarray:
    """The matrix [out, in] in float64 that these tensors stand for. packing: SourceFormat's."""
    if packing == "plain":
        return _read_fp8(stored)
    numbers, scales = _read_int4(stored, packing)
    return numbers * scales


def dequantise_rounded(stored: Mapping[str, Tensor], packing: str) -> np.ndarray:
    """The same for int4 that is written in e4m3, as for activations in fp8 (schemes/int4_fp8.py):
    each number's nearest multiple of a code, where 16 stands for the row's largest scale."""
    numbers, scales = _read_int4(stored, packing)
    steps = scales.max(1, keepdims=True) / 16
    return nearest_e4m3(numbers * (scales / steps)) * steps


def nearest_e4m3(values: np.ndarray) -> np.ndarray:
    """The number of e4m3 next to each value of at most 448; between two of them, the one whose
    mantissa is even."""
    exponent = np.clip(np.floor(np.log2(np.maximum(np.abs(values), 2.0**-20))), -6, 8)
    step = 2.0 ** (exponent - 3)
    return np.rint(values / step) * step  # rounds halves to even


def _read_int4(stored: Mapping[str, Tensor], packing: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers less their zero points, and the scale of each: both [out, in]."""
    if packing == "compressed":
        return _read_packed(stored)
    rows = stored["scales"].shape[1]
    word = _unsigned(stored["qweight"])
    zero_word = _unsigned(stored["qzeros"])
    row = np.arange(rows)
    if packing == "awq":
        # where each output's four bits are
        place = np.array([0, 4, 1, 5, 2, 6, 3, 7])[row % 8]
        numbers = _bits(word[:, row // 8], place).T
    else:
        place = row % 8
        column = np.arange(word.shape[0] * 8)
        numbers = _bits(word[column // 8], (column % 8)[:, None]).T
        if packing == "gptq":
            zero_word = (zero_word + 0x11111111) % 2**32
    zeros = _bits(zero_word[:, row // 8], place).T
    scales = stored["scales"].double().numpy().T
    return _spread(numbers, zeros, scales)


def _read_packed(stored: Mapping[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = stored["weight_shape"].tolist()
    column = np.arange(columns)
    numbers = _bits(_unsigned(stored["weight_packed"])[:, column // 8], column % 8)
    scales = stored["weight_scale"].double().numpy()
    zeros = np.full(scales.shape, 8, dtype=np.int64)
    if "weight_zero_point" in stored:
        row = np.arange(rows)
        zeros = _bits(_unsigned(stored["weight_zero_point"])[row // 8], (row % 8)[:, None])
    return _spread(numbers, zeros, scales)


def _spread(
    numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """All [out, ...]; zeros and scales for each group of columns."""
    group = np.arange(numbers.shape[1]) // (numbers.shape[1] // scales.shape[1])
    return (numbers - zeros[:, group]).astype(np.float64), scales[:, group]


def _unsigned(words: Tensor) -> np.ndarray:
    return words.numpy().astype(np.int64) % 2**32


def _bits(word: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Takes digit `place` of words to the base of 16."""
    return word // 16**place % 16


def _read_fp8(stored: Mapping[str, Tensor]) -> np.ndarray:
    byte = stored["weight"].view(torch.uint8).numpy().astype(np.int64)
    sign, exponent, mantissa = byte // 128, byte // 8 % 16, byte % 8
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    values = np.where(byte % 128 == 127, np.nan, values)
    [scale] = [s for name, s in stored.items() if name.startswith("weight_scale")]
    scales = scale.double().numpy()
    rows, columns = values.shape
    if scales.shape == (-(-rows // BLOCK), -(-columns // BLOCK)) and scales.size > 1:
        scales = scales[np.arange(rows) // BLOCK][:, np.arange(columns) // BLOCK]
    return (1 - 2 * sign) * values * scales


# --- scales of a KV cache ---


def write_kv_scales(
    folder: Path, seed: int = 0, low: float = 0.005, high: float = 0.055
) -> dict[str, Tensor]:
    """Gives the model in `folder` scales of keys and values, of every layer but the first, that
    differ by head and are no powers of two, between `low` and `high`."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(seed)
    scales = {
        f"model.layers.{layer}.self_attn.{plane}_scale": low
        * (high / low) ** torch.rand(heads, generator=generator)
        for layer in range(1, config["num_hidden_layers"])
        for plane in "kv"
    }
    file = folder / "model.safetensors"
    save_file({**load_file(file), **scales}, file, {"format": "pt"})
    return scales
