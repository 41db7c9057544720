"""Writes a model in the formats of quantised checkpoints: `WAYS`.

The writers follow the layouts that their libraries document. Tests compare them with files that
those libraries wrote (tests/models/data). Numbers are rounded to the nearest, group by group. There
is no calibration with a text, which the libraries' default tools do. demo/quantise.py and the tests
call this module.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
E4M3_MAX = 448.0
BLOCK = 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # index of the output in each four bits, from the lowest
DENSE_NAMES = ("embed_tokens", "lm_head", "gate", "shared_expert_gate")


@dataclass(frozen=True)
class Written:
    """A way of storing weights."""

    config: dict[str, Any]  # quantization_config of config.json
    # matrix [out, in] -> its tensors, by the part of the name after the module's
    store: Callable[[Tensor], Tensors]


def write_quantised(plain: Path, folder: Path, way: Written, dense: tuple[str, ...] = ()) -> Path:
    """Copies the model in `plain` to `folder`, and stores its matrices in this way. Embeddings,
    routers, lm_head and modules with a name part in `dense` are copied unchanged."""
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    tensors: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module, _, last = name.rpartition(".")
        is_matrix = last == "weight" and tensor.dim() == 2
        if not is_matrix or module.endswith(DENSE_NAMES) or any(part in name for part in dense):
            tensors[name] = tensor
            continue
        for each, stored in way.store(tensor.float()).items():
            tensors[f"{module}.{each}"] = stored.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = way.config
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


# --- fp8 ---


def fp8(matrix: Tensor, scale: Tensor) -> Tensor:
    """Rounds a matrix to e4m3 by a scale that broadcasts over it."""
    return (matrix / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def store_fp8_tensor(matrix: Tensor, is_static: bool = False) -> Tensors:
    scale = matrix.abs().amax() / E4M3_MAX
    static = {"input_scale": torch.tensor(0.03)} if is_static else {}
    return {"weight": fp8(matrix, scale), "weight_scale": scale, **static}


def store_fp8_rows(matrix: Tensor) -> Tensors:
    scale = matrix.abs().amax(1, keepdim=True) / E4M3_MAX
    return {"weight": fp8(matrix, scale), "weight_scale": scale}


def store_fp8_blocks(matrix: Tensor, name: str = "weight_scale_inv") -> Tensors:
    rows, columns = matrix.shape
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = matrix[part].abs().amax() / E4M3_MAX
            weight[part] = fp8(matrix[part], scales[i, j])
    return {"weight": weight, name: scales}


# --- int4 ---


def int4(matrix: Tensor, group: int, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns numbers 0 to 15 [out, in], zeros [out, groups] and float16 scales [out, groups]. A
    group of -1 has all inputs."""
    parts = matrix.unflatten(1, (-1, matrix.shape[1] if group == -1 else group))
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    if is_symmetric:
        scales = torch.maximum(-low / 8, high / 7).half()
        zeros = torch.full_like(low, 8, dtype=torch.int32)
    else:
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15).int()
    numbers = (
        ((parts + (zeros * scales.float())[..., None]) / scales.float()[..., None]).round().int()
    )
    return numbers.clamp(0, 15).flatten(1), zeros, scales


def words(numbers: Tensor, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Joins numbers 0 to 15 along `axis`, eight per int32. Place i, counted from the lowest four
    bits, has number order[i]. The last word is filled up with zeros."""
    moved = numbers.movedim(axis, -1).long()
    moved = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % 8)).unflatten(-1, (-1, 8))
    joined = torch.zeros(moved.shape[:-1], dtype=torch.int64)
    for place, number in enumerate(order):
        joined |= moved[..., number] << (4 * place)
    return _as_int32(joined).movedim(-1, axis).contiguous()


def _as_int32(joined: Tensor) -> Tensor:
    """Converts int64 numbers to int32, modulo 2**32."""
    joined = joined & 0xFFFFFFFF
    return torch.where(joined >= 1 << 31, joined - (1 << 32), joined).int()


def store_awq(matrix: Tensor, group: int = 32) -> Tensors:
    numbers, zeros, scales = int4(matrix, group, is_symmetric=False)
    return {
        "qweight": words(numbers.t(), 1, AWQ_ORDER),
        "qzeros": words(zeros.t(), 1, AWQ_ORDER),
        "scales": scales.t(),
    }


def store_gptq(
    matrix: Tensor, group: int = 32, is_symmetric: bool = True, is_v2: bool = False
) -> Tensors:
    numbers, zeros, scales = int4(matrix, group, is_symmetric)
    qzeros = words(zeros.t(), 1)
    if not is_v2:
        qzeros = _as_int32(qzeros.long() - 0x11111111)
    size = matrix.shape[1] if group == -1 else group
    return {
        "qweight": words(numbers.t(), 0),
        "qzeros": qzeros,
        "scales": scales.t(),
        "g_idx": torch.arange(matrix.shape[1], dtype=torch.int32) // size,
    }


def store_packed(matrix: Tensor, group: int = 32, is_symmetric: bool = True) -> Tensors:
    numbers, zeros, scales = int4(matrix, group, is_symmetric)
    stored = {
        "weight_packed": words(numbers, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(matrix.shape),
    }
    return stored if is_symmetric else {**stored, "weight_zero_point": words(zeros, 0)}


# --- quantization_config of config.json ---


def packed_config(weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the quantization_config of compressed-tensors: one group of all modules except
    lm_head."""
    is_float = weights["type"] == "float"
    form = "float-quantized" if is_float else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$"],
    }


def _float(strategy: str, **more: object) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


def _int(group: int, is_symmetric: bool) -> dict[str, Any]:
    strategy = "channel" if group == -1 else "group"
    said = {"num_bits": 4, "type": "int", "symmetric": is_symmetric, "strategy": strategy}
    return {**said, "group_size": None if group == -1 else group}


DYNAMIC = _float("token", dynamic=True)
STATIC = _float("tensor", dynamic=False)
AWQ_CONFIG = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
}
GPTQ_CONFIG = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "checkpoint_format": "gptq",
}
BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}

WAYS: dict[str, Written] = {
    "fp8": Written({"quant_method": "fp8", "activation_scheme": "dynamic"}, store_fp8_tensor),
    "fp8-static": Written(
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda matrix: store_fp8_tensor(matrix, is_static=True),
    ),
    "fbgemm": Written({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200}, store_fp8_rows),
    "fp8-blocks": Written(BLOCKS, store_fp8_blocks),
    "ct-fp8-tensor": Written(
        packed_config(_float("tensor"), STATIC),
        lambda matrix: store_fp8_tensor(matrix, is_static=True),
    ),
    "ct-fp8-rows": Written(packed_config(_float("channel"), DYNAMIC), store_fp8_rows),
    "ct-fp8-blocks": Written(
        packed_config(_float("block", block_structure=[BLOCK, BLOCK]), DYNAMIC),
        lambda matrix: store_fp8_blocks(matrix, "weight_scale"),
    ),
    "ct-int4": Written(packed_config(_int(32, True), None), store_packed),
    "ct-int4-rows": Written(
        packed_config(_int(-1, True), None), lambda matrix: store_packed(matrix, -1)
    ),
    "ct-int4-zeros": Written(
        packed_config(_int(32, False), None), lambda matrix: store_packed(matrix, 32, False)
    ),
    "ct-int4-fp8": Written(packed_config(_int(32, True), DYNAMIC), store_packed),
    "awq": Written(AWQ_CONFIG, store_awq),
    "awq-rows": Written({**AWQ_CONFIG, "group_size": -1}, lambda matrix: store_awq(matrix, -1)),
    "gptq": Written(GPTQ_CONFIG, store_gptq),
    "gptq-zeros": Written(
        {**GPTQ_CONFIG, "sym": False}, lambda matrix: store_gptq(matrix, is_symmetric=False)
    ),
    "gptq-rows": Written(
        {**GPTQ_CONFIG, "group_size": -1, "desc_act": True}, lambda matrix: store_gptq(matrix, -1)
    ),
    "gptq-v2": Written(
        {**GPTQ_CONFIG, "checkpoint_format": "gptq_v2", "sym": False},
        lambda matrix: store_gptq(matrix, is_symmetric=False, is_v2=True),
    ),
}
