"""Names the content of KV blocks: keyed digests over tokens, chained so that equal digests mean
equal prefixes.

Torch-free and stable over processes and hosts: engines find cached blocks by them, and routers,
which read the same tokens, guess what engines hold. Two keys: `model` names what is computed
(weights and dtype), `rows` also how its rows are stored (dtype and scales of the KV cache). Content
is the model's; blocks are the rows'. Knows no blocks.
"""

from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import numpy as np


class Tenant(msgspec.Struct, frozen=True, array_like=True):
    """Who may share blocks: equal ones only. salt: of a group of users; adapter: digest of the
    adapter that computes the rows, "" for none."""

    salt: str = ""
    adapter: str = ""

    @property
    def name(self) -> str:
        """Equal for equal tenants alone; the salt's length tells where it ends."""
        return f"{len(self.salt)}:{self.salt}{self.adapter}"


NOBODY = Tenant()


class ContentPart(msgspec.Struct, frozen=True, array_like=True):
    """What a prompt holds in place of some tokens, an image for one: positions start to start +
    length, digest 16 bytes of what stands there."""

    start: int
    length: int
    digest: bytes


class BlockHasher:
    """128-bit keyed hashes of full blocks, each over its parent, so two are equal only for equal
    prefixes.

    rows, model: the two keys; model is needed for `content` alone. Stable over processes and hosts,
    unlike Python's `hash()`.
    """

    def __init__(self, rows: str, block_size: int, model: str = "") -> None:
        self.block_size = block_size
        self._rows_key = blake2b(rows.encode(), digest_size=32).digest()
        self._model_key = blake2b(model.encode(), digest_size=32).digest()

    def extend(
        self,
        hashes: list[bytes],
        tokens: Sequence[int],
        tenant: Tenant,
        parts: Sequence[ContentPart] = (),
    ) -> None:
        """Append the digests of the full blocks of `tokens` that `hashes` does not hold yet. A part
        counts in each block that it overlaps, by where it lies there."""
        first = len(hashes)
        end = len(tokens) // self.block_size
        if first >= end:
            return
        key = self._rows_key
        parent = hashes[-1] if hashes else _root(tenant, key)
        # all at once: an array of its own for each block would take longer than the hashing
        ids = np.asarray(
            tokens[first * self.block_size : end * self.block_size], dtype="<i4"
        ).tobytes()
        size = 4 * self.block_size  # bytes of a block's ids
        salt = b""
        for at in range(0, len(ids), size):
            if parts:
                start = first * self.block_size + at // 4
                salt = _salt_of(parts, start, start + self.block_size)
            block = parent + ids[at : at + size]
            parent = blake2b(block, digest_size=16, key=key, salt=salt).digest()
            hashes.append(parent)

    def content(
        self, tokens: Sequence[int], tenant: Tenant, parts: Sequence[ContentPart] = ()
    ) -> bytes:
        """Digest of all of `tokens` with tenant, parts and model: what a hand-off ticket's rows
        hold."""
        ids = np.asarray(tokens, dtype="<i4").tobytes()
        key = self._model_key
        salt = _salt_of(parts, 0, len(tokens)) if parts else b""
        whole = _root(tenant, key) + ids
        return blake2b(whole, digest_size=16, key=key, salt=salt, person=b"content").digest()


def _root(tenant: Tenant, key: bytes) -> bytes:
    """The parent of a first block. Personalised: else a salt that spells out another tenant's
    (parent, block) would give that block's digest."""
    return blake2b(tenant.name.encode(), digest_size=16, key=key, person=b"tenant").digest()


def _salt_of(parts: Sequence[ContentPart], start: int, end: int) -> bytes:
    """Of the positions from start to before end: what of which part lies where; b"" for tokens
    alone. Not a part of the hashed bytes, so no tokens can spell it out."""
    found = b"".join(
        part.digest + (part.start - start).to_bytes(8, "little", signed=True)
        for part in parts
        if part.start < end and start < part.start + part.length
    )
    return blake2b(found, digest_size=16).digest() if found else b""
