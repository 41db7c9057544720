"""The schemes of storing weights, by `quant_method` in config.json's quantization_config: a line
for each.

Torch-free: a scheme's file is imported when a model of it is loaded.
"""

from collections.abc import Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pdserve.kernels.linear.schemes.source import Storage
    from pdserve.models.config import ModelSpec

Quantization = Mapping[str, Any]
"""config.json's quantization_config."""

OnlineScheme = Literal["fp8"]
"""Into what 16-bit weights may be quantised while they are loaded: model.quantization."""

ROOM = "pdserve.kernels.linear.schemes"

# quant_method -> module under kernels/linear/schemes, and function there: Quantization -> Storage
SCHEMES: dict[str, str] = {}
# module, and class of a Scheme
ONLINE: dict[OnlineScheme, str] = {"fp8": "fp8:Fp8"}


def check_quantization(quantization: Quantization) -> None:
    """ValueError for a scheme that is not known."""
    method = quantization.get("quant_method")
    if method not in SCHEMES:
        known = f" (known: {', '.join(sorted(SCHEMES))})" if SCHEMES else ""
        raise ValueError(
            f"quantization_config: quantised checkpoints are not supported yet{known}; use the "
            "16-bit weights"
        )


def check_online(quantization: Quantization | None, online: OnlineScheme | None) -> None:
    """ValueError where weights that are quantised already should be quantised."""
    if online is not None and quantization:
        raise ValueError(
            f"model.quantization: {online} quantises 16-bit weights while they are loaded, and "
            "those of this model are quantised already (quantization_config in its config.json): "
            "leave it out"
        )


def storage_of(spec: "ModelSpec", module: str) -> "Storage":
    """How the checkpoint stores the matrix of a module, and how the device shall hold it. Asked for
    modules that may be quantised: no embeddings, routers, or output matrices."""
    dense: Storage = resolve_name(f"{ROOM}.dense:DENSE")
    if spec.online_quantization is not None:
        scheme = resolve_name(f"{ROOM}.{ONLINE[spec.online_quantization]}")
        return replace(dense, scheme=scheme())
    quantization = spec.quantization
    if quantization is None or module in (quantization.get("modules_to_not_convert") or ()):
        return dense
    made: Storage = resolve_name(f"{ROOM}.{SCHEMES[quantization['quant_method']]}")(quantization)
    return made
