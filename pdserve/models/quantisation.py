"""The schemes of storing weights, by `quant_method` in config.json's quantization_config: a line
for each.

Torch-free: a scheme's file is imported when a model of it is loaded.
"""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve.kernels.linear.schemes.scheme import Scheme

Quantization = Mapping[str, Any]
"""config.json's quantization_config."""

# quant_method -> module under kernels/linear/schemes, and class there: made of the Quantization
SCHEMES: dict[str, str] = {}


def scheme_of(quantization: Quantization | None, module: str) -> "Scheme | None":
    """How the weights of a checkpoint's module are stored; None: as they are."""
    if quantization is None or module in (quantization.get("modules_to_not_convert") or ()):
        return None
    place = SCHEMES[quantization["quant_method"]]
    return resolve_name(f"pdserve.kernels.linear.schemes.{place}")(quantization)
