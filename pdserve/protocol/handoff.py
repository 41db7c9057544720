"""Everything that one engine needs to read another's KV cache: a description of the engine, needed
once, and a ticket for each hand-off.

Routers pass these on without reading them.
"""

import msgspec

from pdserve.protocol.request_key import RequestKey


class GroupMemory(msgspec.Struct, frozen=True, array_like=True):
    """The place of some layers' rows in each block of a rank.

    They begin at byte `offset`, KV head by KV head, with head_bytes each. `layers` are global ids
    in storage order, and `heads` the global ids of the KV heads.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    offset: int
    head_bytes: int


class RankMemory(msgspec.Struct, frozen=True, array_like=True):
    """One rank's registered memory, made of blocks of `block_bytes`.

    `memory` is NIXL's "DRAM" or "VRAM". `home` is the home whose blocks it holds.
    """

    agent_name: str
    agent_metadata: bytes
    address: int
    memory: str
    device_id: int
    block_bytes: int
    groups: tuple[GroupMemory, ...]
    home: int = 0


class KVCacheMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a peer needs once to read from an engine's KV caches, one for each of its
    homes."""

    engine_id: str
    # Start of the engine process in ns of its host's clock. If two have one engine_id, the higher
    # one is alive.
    incarnation: int
    connector: str
    # The keys of BlockHasher. Rows that differ may be converted under one model, and never under
    # different models.
    model: str
    rows: str
    block_size: int  # Tokens per block; the reader's may differ.
    num_blocks: int  # Blocks of each home.
    generation_address: int  # Address of home 0's table; those of the other homes follow it.
    mailbox: str  # Address for letters to the engine.
    ranks: tuple[RankMemory, ...]

    @property
    def num_homes(self) -> int:
        return 1 + max(rank.home for rank in self.ranks)

    @property
    def token_bytes(self) -> float:
        """Bytes of KV that a token takes, on all ranks of a home together."""
        return sum(rank.block_bytes for rank in self.ranks if not rank.home) / self.block_size


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to read published blocks, valid while the generations match and the incarnation
    lives."""

    engine_id: str
    incarnation: int
    key: RequestKey  # Key of P's Submit; D's has another attempt (and session).
    # Digest of the tokens, salt and model of these rows. D computes its own, and refuses a ticket
    # with another one.
    content: bytes
    block_size: int
    # P's blocks, of block_size tokens each, in order of position from token 0. The last one may be
    # partly filled.
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]  # One per block, as they were when its rows were written.
    num_tokens: int  # Rows published; 0 for a part of a prompt, of whole blocks.
    lease_s: float  # P unpins the blocks after this time unless the lease is renewed.
    # Seconds since the epoch by P's clock, when its engine knew that the last row was written.
    written_at: float
    home: int = 0  # The KV cache of P that holds the blocks.

    @property
    def is_pinned(self) -> bool:
        return self.lease_s > 0


class Source(msgspec.Struct, frozen=True, array_like=True):
    """The place where a prompt is being computed, and its key there: that of P's Submit."""

    engine_id: str
    incarnation: int
    key: RequestKey
