"""Letters between a sender and its receivers, in addition to the reads: what is published, who
wants it, who is done.

A letter names the engine process that it is meant for. If it outlives that process and reaches
another one (a port used again), it is dropped. Letters may be lost; none carries anything that a
request cannot do without. Carried by `mailbox.py`.
"""

import msgspec

from pdserve.protocol.handoff import Ticket
from pdserve.protocol.request_key import RequestKey


class Party(msgspec.Struct, frozen=True, array_like=True):
    """An engine process; see KVCacheMeta. mailbox: the address where it reads its letters."""

    engine_id: str
    incarnation: int
    mailbox: str


class Follow(msgspec.Struct, frozen=True, array_like=True, tag="follow"):
    """Asks P to send each Part of this prompt, and the newest existing one. key: the key of P's
    Submit, here and in the letters below."""

    key: RequestKey


class Part(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """Tells D that the ticket's blocks are written. The ticket names all blocks from the first on,
    so the newest part is enough."""

    ticket: Ticket


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Tells P that every byte is verified here."""

    key: RequestKey


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """Tells P that nobody will read the ticket's blocks (any more)."""

    key: RequestKey


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """Tells P that these tickets are still wanted; their leases start again."""

    keys: tuple[RequestKey, ...]


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """Asks a holder which of these blocks, from the first on, are in its prefix cache.

    - digests: in the holder's block size.
    - number: chosen by the asker, and repeated in the answer.
    """

    number: int
    digests: tuple[bytes, ...]


class Lend(msgspec.Struct, frozen=True, array_like=True, tag="lend"):
    """Answers a Want with a ticket that pins nothing; it has no blocks if none is there."""

    number: int
    ticket: Ticket


Notice = Follow | Part | Done | Rejected | Renew | Want | Lend


class Letter(msgspec.Struct, frozen=True, array_like=True):
    """A notice with its envelope. to: (engine id, incarnation)."""

    to: tuple[str, int]
    sender: Party
    notice: Notice


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Letter)


def encode_letter(letter: Letter) -> bytes:
    return _encoder.encode(letter)


def decode_letter(data: bytes) -> Letter:
    """Decode a letter. Raises msgspec.DecodeError (or its ValidationError) on anything else."""
    return _decoder.decode(data)
