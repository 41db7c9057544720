"""Names the content of KV blocks by keyed digests over tokens, chained so that equal digests mean
equal prefixes.

Digests are the same in all processes and on all hosts. Engines find cached blocks by them, and
routers, which read the same tokens, guess what engines hold. There are two keys. `model` names what
is computed (weights and dtype). `rows` also names how rows are stored (dtype and scales of the KV
cache). Content digests use the first key, block digests the second. Torch-free; knows no blocks.
"""

from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import numpy as np


class Tenant(msgspec.Struct, frozen=True, array_like=True):
    """Who may share blocks: only equal tenants.

    `salt` is that of a group of users. `adapter` is the digest of the adapter that computes the
    rows, or "".
    """

    salt: str = ""
    adapter: str = ""

    @property
    def name(self) -> str:
        """A text that is equal only for equal tenants; the salt's length says where the salt
        ends."""
        return f"{len(self.salt)}:{self.salt}{self.adapter}"


NOBODY = Tenant()


class ContentPart(msgspec.Struct, frozen=True, array_like=True):
    """Something that a prompt holds in place of some tokens, for example an image.

    It covers the positions from start to start + length. `digest` is 16 bytes over its content.
    """

    start: int
    length: int
    digest: bytes


class BlockHasher:
    """Computes 128-bit keyed digests of full blocks.

    Each digest covers its parent, so two are equal only for equal prefixes. `rows` and `model` are
    the two keys; only `content` needs `model`. Unlike Python's `hash()`, digests are the same in
    all processes and on all hosts.
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
        """Appends the digests of the full blocks of `tokens` that `hashes` does not hold yet.

        A part counts in each block that it overlaps, with its place there.
        """
        first = len(hashes)
        end = len(tokens) // self.block_size
        if first >= end:
            return
        key = self._rows_key
        parent = hashes[-1] if hashes else _root(tenant, key)
        # All ids are converted at once. One array per block would take longer than the hashing.
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
        """Returns the digest of all of `tokens` with tenant, parts and model; it names a ticket's
        content."""
        ids = np.asarray(tokens, dtype="<i4").tobytes()
        key = self._model_key
        salt = _salt_of(parts, 0, len(tokens)) if parts else b""
        whole = _root(tenant, key) + ids
        return blake2b(whole, digest_size=16, key=key, salt=salt, person=b"content").digest()


def _root(tenant: Tenant, key: bytes) -> bytes:
    """Returns the parent of a first block.

    It is personalised. Otherwise a salt that spells out another tenant's (parent, block) would give
    that block's digest.
    """
    return blake2b(tenant.name.encode(), digest_size=16, key=key, person=b"tenant").digest()


def _salt_of(parts: Sequence[ContentPart], start: int, end: int) -> bytes:
    """Returns a salt for the parts in the positions from `start` to before `end`; b"" for tokens
    alone.

    The salt is no part of the hashed bytes, so no tokens can spell it out.
    """
    found = b"".join(
        part.digest + (part.start - start).to_bytes(8, "little", signed=True)
        for part in parts
        if part.start < end and start < part.start + part.length
    )
    return blake2b(found, digest_size=16).digest() if found else b""
