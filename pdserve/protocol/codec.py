"""Messages to bytes and back, in msgpack."""

import msgspec

from pdserve.protocol.commands import Command
from pdserve.protocol.events import EventBatch, RoutedBatch

# A field added at the end of an array, with a default, does not change it: older readers skip it,
# newer ones do without.
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
    """`decode_batch`, but a prompt's log-probabilities are passed over: some 200 KB in an event."""
    return _routed_decoder.decode(data)
