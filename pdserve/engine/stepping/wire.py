"""Encodes the messages of a group: rank 0's orders to the other ranks of an engine.

Numbers and arrays go through msgpack; nothing is pickled. SampleWork is not among the messages,
because rank 0 samples alone (docs/design/parallel.md). Written by `execution.group_executor`, read
by `execution.follower`.
"""

from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import numpy as np

from pdserve.engine.stepping.work import ForwardWork


@dataclass(frozen=True)
class WarmPrefill:
    """See Executor.warm_prefill."""

    num_rows: int


@dataclass(frozen=True)
class TellExpertLoad:
    """See Executor.expert_load. phase: names the RankGroup.agree that collects the counts."""

    phase: str


@dataclass(frozen=True)
class ClearExpertLoad:
    """See Executor.clear_expert_load."""


@dataclass(frozen=True)
class Reset:
    """See Executor.reset."""


@dataclass(frozen=True)
class Stop:
    """Tells a rank to end its process; no message follows."""


GroupWork = ForwardWork | WarmPrefill | TellExpertLoad | ClearExpertLoad | Reset | Stop
_KINDS: tuple[type[Any], ...] = get_args(GroupWork)


def encode_work(work: GroupWork) -> bytes:
    body = _encoder.encode(work)
    return bytes([_KINDS.index(type(work))]) + body


def decode_work(data: bytes) -> GroupWork:
    """Decode a message. Its arrays are writable."""
    work: GroupWork = _decoders[data[0]].decode(memoryview(data)[1:])
    return work


def _encode_array(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"a message holds a {type(array).__name__}")
    return [array.dtype.str, array.shape, np.ascontiguousarray(array).data]


def _decode_array(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoders = [msgspec.msgpack.Decoder(kind, dec_hook=_decode_array) for kind in _KINDS]
