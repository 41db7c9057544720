"""KvScales: the numbers by which rows of a KV cache in e4m3 are divided. They come from a
checkpoint, or from a file that `pdserve calibrate-kv` wrote.

They are powers of two. So scaling is exact, and a row's bytes do not depend on where it is scaled.
A scale from elsewhere is rounded up to a power of two. This file needs no torch.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from pdserve.models.checkpoint import TensorEntry

PerHead = tuple[float, ...]
LARGEST = 448.0  # of e4m3
# Which of k and v a tensor scales, by the names that the tools write. "": it scales something else.
NAMES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(rf"\.{name}$"), planes)
    for name, planes in (
        (r"(?:self_attn|attn)\.k_scale", "k"),
        (r"(?:self_attn|attn)\.v_scale", "v"),
        (r"(?:self_attn|attn)\.kv_scale", "kv"),
        (r"(?:self_attn|attn)\.(?:q_scale|prob_scale)", ""),
        (r"(?:k_proj|qkv_proj)\.k_scale", "k"),
        (r"(?:v_proj|qkv_proj)\.v_scale", "v"),
        (r"k_proj\.output_scale", "k"),
        (r"v_proj\.output_scale", "v"),
        (r"(?:k_proj\.v_scale|v_proj\.k_scale|qkv_proj\.output_scale)", ""),
    )
)
LAYER = re.compile(r"\.layers\.(\d+)\.")
DECODERS: dict[str, tuple[int, Callable[[bytes], float]]] = {
    "F32": (4, lambda raw: float(struct.unpack("<f", raw)[0])),
    "F16": (2, lambda raw: float(struct.unpack("<e", raw)[0])),
    "BF16": (2, lambda raw: float(struct.unpack("<f", b"\0\0" + raw)[0])),
}


class KvScales(BaseModel):
    """The scales by layer, and then by KV head of the whole model. A stored number times its scale
    is the true number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    k: tuple[PerHead, ...]
    v: tuple[PerHead, ...]

    @classmethod
    def of_largest(cls, k: Iterable[Iterable[float]], v: Iterable[Iterable[float]]) -> Self:
        """Makes scales that can just hold these magnitudes, given by layer and head."""

        def scales(rows: Iterable[Iterable[float]]) -> tuple[PerHead, ...]:
            return tuple(tuple(power_of_two(x / LARGEST) for x in row) for row in rows)

        return cls(k=scales(k), v=scales(v))


def power_of_two(scale: float) -> float:
    """Returns the least power of two that is not below scale. For 0 (nothing was seen) it is 1."""
    if scale == 0:
        return 1.0
    return 2.0 ** max(min(math.ceil(math.log2(scale)), 64), -64)


def scaled_planes(name: str) -> str | None:
    """Returns what a tensor of this name scales: "k", "v", both ("kv"), or something else of
    attention (""). Returns None if it belongs to a matrix."""
    if not name.endswith("_scale"):
        return None
    return next((planes for pattern, planes in NAMES if pattern.search(name)), None)


def scales_of_checkpoint(
    entries: Iterable[TensorEntry], num_layers: int, num_kv_heads: int
) -> KvScales | None:
    """Reads the scales of a checkpoint, with 1 for layers that have none. Returns None if no layer
    has any. ValueError names a tensor that cannot be a scale."""
    found: dict[str, dict[int, PerHead]] = {"k": {}, "v": {}}
    for entry in entries:
        planes = scaled_planes(entry.name)
        layer = LAYER.search(entry.name)
        if planes and layer is not None and int(layer[1]) < num_layers:
            values = tuple(map(power_of_two, _read(entry, num_kv_heads)))
            for plane in planes:
                found[plane][int(layer[1])] = values
    if not any(found.values()):
        return None
    ones = (1.0,) * num_kv_heads
    k, v = (tuple(found[x].get(layer, ones) for layer in range(num_layers)) for x in "kv")
    return KvScales(k=k, v=v)


def scales_of_file(path: str, weights: str, num_layers: int, num_kv_heads: int) -> KvScales:
    """Reads a file that save_scales wrote. It must have been made for `weights`, which is
    ModelSpec's. ValueError names the file and the cure."""
    file = Path(path)
    cure = "make it with pdserve calibrate-kv"
    try:
        said = json.loads(file.read_text())
        scales = KvScales.model_validate(said["scales"])
        made_for = said["weights"]
    except OSError as error:
        raise ValueError(f"model.kv_scales: {file} cannot be read ({error}): {cure}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"model.kv_scales: {file} holds no scales ({error}): {cure}") from error
    shapes = {(len(rows), *{len(row) for row in rows}) for rows in (scales.k, scales.v)}
    if made_for != weights or shapes != {(num_layers, num_kv_heads)}:
        raise ValueError(f"model.kv_scales: {file} belongs to another model: {cure}")
    every = [x for rows in (*scales.k, *scales.v) for x in rows]
    if not all(math.isfinite(x) and x > 0 and power_of_two(x) == x for x in every):
        raise ValueError(f"model.kv_scales: {file} has scales that are not powers of two: {cure}")
    return scales


def save_scales(file: Path, scales: KvScales, weights: str, facts: Mapping[str, object]) -> None:
    """Writes a file of scales. facts: how they were found, for people to read."""
    said = {"weights": weights, **facts, "scales": scales.model_dump()}
    file.write_text(json.dumps(said, indent=1) + "\n")


def _read(entry: TensorEntry, num_kv_heads: int) -> PerHead:
    count = math.prod(entry.shape)
    problem = f"{entry.file}: tensor {entry.name} scales the KV cache"
    cure = "download the file again, or remove the tensor and calibrate again"
    if entry.dtype not in DECODERS or count not in (1, num_kv_heads):
        raise ValueError(
            f"{problem}, but is {entry.dtype} {list(entry.shape)}, not one number or one for each "
            f"of {num_kv_heads} KV heads, in F32, F16 or BF16: {cure}"
        )
    size, decode = DECODERS[entry.dtype]
    with entry.file.open("rb") as stream:
        stream.seek(entry.start)
        raw = stream.read(count * size)
    values = [decode(raw[at : at + size]) for at in range(0, len(raw), size)]
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"{problem}, but holds numbers that are not above 0: {cure}")
    return tuple(values * (num_kv_heads // count))
