"""Encodes messages as msgpack, and decodes them."""

import msgspec

from pdserve.protocol.commands import Command
from pdserve.protocol.events import EventBatch, RoutedBatch

# The version stays when a field with a default is added at the end of an array: older readers skip
# it, and newer readers use its default.
PROTOCOL_VERSION = 10


_command_decoder = msgspec.msgpack.Decoder(Command)
_batch_decoder = msgspec.msgpack.Decoder(EventBatch)
_routed_decoder = msgspec.msgpack.Decoder(RoutedBatch)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Command | EventBatch) -> bytes:
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Raises msgspec.DecodeError on anything that is not a well-formed command."""
    return _command_decoder.decode(data)


def decode_batch(data: bytes) -> EventBatch:
    """Raises msgspec.DecodeError on anything that is not a well-formed batch."""
    return _batch_decoder.decode(data)


def decode_routed(data: bytes) -> RoutedBatch:
    """Decodes a batch without the log-probabilities of prompts, which may take 200 KB per event."""
    return _routed_decoder.decode(data)
