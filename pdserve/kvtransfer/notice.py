"""The one message from a receiver to a sender: this ticket is done with."""

from typing import Literal

import msgspec

from pdserve.engine.protocol import RequestKey

Outcome = Literal["done", "rejected"]


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """outcome "done": every byte is verified at the receiver; "rejected": nobody will read the ticket's blocks."""

    outcome: Outcome
    key: RequestKey


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Notice)


def encode_notice(notice: Notice) -> bytes:
    return _encoder.encode(notice)


def decode_notice(data: bytes) -> Notice:
    """Raises msgspec.DecodeError (or its ValidationError) on anything else."""
    return _decoder.decode(data)
