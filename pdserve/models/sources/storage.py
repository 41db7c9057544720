"""Decides how the matrix of each module is read (by a source) and held (by a scheme)."""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

from pdserve.configs.engine import OnlineScheme
from pdserve.kernels.linear.schemes.dense import Dense
from pdserve.kernels.linear.schemes.fp8 import Fp8, Fp8Block
from pdserve.kernels.linear.schemes.int4 import Int4
from pdserve.kernels.linear.schemes.int4_fp8 import Int4Fp8
from pdserve.kernels.linear.schemes.scheme import Scheme
from pdserve.models.config import ModelSpec
from pdserve.models.formats.source_format import DENSE, Kind, Packing, SourceFormat
from pdserve.models.sources.dense import DenseSource
from pdserve.models.sources.fp8 import Fp8Source
from pdserve.models.sources.int4 import AwqSource, GptqSource, PackedSource
from pdserve.models.sources.source import Source


@dataclass(frozen=True)
class Storage:
    """The way in which a checkpoint holds a matrix, and the way in which the device does."""

    source: Source
    scheme: Scheme


DENSE_STORAGE = Storage(DenseSource(), Dense())
SOURCES: dict[Packing, Callable[[SourceFormat], Source]] = {
    "plain": Fp8Source,
    "awq": AwqSource,
    "gptq": GptqSource,
    "gptq_v2": GptqSource,
    "compressed": PackedSource,
}
SCHEMES: dict[Kind, Callable[[SourceFormat], Scheme]] = {
    "fp8": lambda format: Fp8(),
    "fp8_block": lambda format: Fp8Block(),
    "int4": lambda format: Int4(format.group[1]),
    "int4_fp8": lambda format: Int4Fp8(format.group[1]),
}


def storage_of(spec: ModelSpec, module: str) -> Storage:
    """Returns the storage of a module that may be quantised; not of embeddings, routers or output
    matrices."""
    if spec.online_quantization is not None:
        return Storage(DENSE_STORAGE.source, _online(spec.online_quantization))
    format = DENSE if spec.formats is None else spec.formats.of(module)
    if format == DENSE:
        return DENSE_STORAGE
    return Storage(SOURCES[format.packing](format), SCHEMES[format.kind](format))


def _online(name: OnlineScheme) -> Scheme:
    """Makes the online scheme of the file with this name among the schemes."""
    scheme: Scheme = resolve_name(f"pdserve.kernels.linear.schemes.{name}:online")()
    return scheme
