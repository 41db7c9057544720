"""Names the content of KV blocks: keyed digests over tokens, chained so that equal digests mean
equal prefixes.

Torch-free and stable over processes and hosts: engines find cached blocks by them, and routers,
which read the same tokens, guess what engines hold. Knows no blocks.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np


class BlockHasher:
    """128-bit keyed hashes of full blocks, each over its parent, so two are equal only for equal
    prefixes.

    model: the fingerprint of weights and adapter. Stable over processes and hosts, unlike Python's
    `hash()`.
    """

    def __init__(self, model: str, block_size: int) -> None:
        self.block_size = block_size
        self._key = blake2b(model.encode(), digest_size=32).digest()

    def extend(self, hashes: list[bytes], tokens: Sequence[int], salt: str) -> None:
        """Append the digests of the full blocks of `tokens` that `hashes` does not hold yet. salt
        separates tenants."""
        first = len(hashes)
        end = len(tokens) // self.block_size
        if first >= end:
            return
        parent = hashes[-1] if hashes else self._root(salt)
        # all at once: an array of its own for each block would take longer than the hashing
        ids = np.asarray(
            tokens[first * self.block_size : end * self.block_size], dtype="<i4"
        ).tobytes()
        size = 4 * self.block_size  # bytes of a block's ids
        for start in range(0, len(ids), size):
            parent = blake2b(
                parent + ids[start : start + size], digest_size=16, key=self._key
            ).digest()
            hashes.append(parent)

    def content(self, tokens: Sequence[int], salt: str) -> bytes:
        """Digest of all of `tokens` with salt and model: what a hand-off ticket's rows hold."""
        ids = np.asarray(tokens, dtype="<i4").tobytes()
        return blake2b(
            self._root(salt) + ids, digest_size=16, key=self._key, person=b"content"
        ).digest()

    def _root(self, salt: str) -> bytes:
        """The parent of a first block. Personalised: else a salt that spells out another tenant's
        (parent, block) would give that block's digest."""
        return blake2b(salt.encode(), digest_size=16, key=self._key, person=b"salt").digest()
