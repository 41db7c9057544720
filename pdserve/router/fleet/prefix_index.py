"""Tells which worker holds which prefix of a prompt.

`CachedBlocks` knows what one worker's cache holds, `PooledChunks` what a KV pool holds, and
`PromptBlocks` has the keys of a prompt to look up. The states of a worker's index:

    UNKNOWN --CacheState part 0--> FILLING --final part--> KNOWN --CacheChange number + 1--> KNOWN
       ^--------- a gap: missed change, part out of turn, Snapshot of another number ------'
                  (asks for a Resync)

Keys are the first bytes of the digests by which engines find their blocks. A wrong or missing key
makes a guess worse, never an answer (docs/design/prefix-index.md). Filled by `router.fleet.intake`,
read by `router.choosing.choose`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from pdserve.protocol.block_digests import BlockHasher, Tenant
from pdserve.protocol.events import CACHE_KEY_BYTES, CacheChange, CacheState, PoolChange

ASK_AGAIN_S = 5.0
MAX_KEYS = 1 << 21  # keys kept for one worker: 145 MB
EXPECTED_S = 10.0
MAX_EXPECTED = 4096
MAX_POOLED = 1 << 18  # chunks of one KV pool
FIRST_RUN = 8  # blocks hashed at once at first; then twice as many while a worker holds them

_hasher = lru_cache(maxsize=64)(BlockHasher)


class CachedBlocks:
    """Keys of one worker's cached blocks, on one stream. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._dropped: set[int] = set()  # while FILLING: keys that later parts must not bring back
        self._expected: OrderedDict[int, float] = OrderedDict()
        self._number: int | None = None
        self._next_part: int | None = None
        self._is_broken = False
        self._is_too_large = False
        self._asked_at = -ASK_AGAIN_S
        self._filled_at = 0.0

    def __len__(self) -> int:
        return len(self._keys)

    def num_held(self, keys: Sequence[int], start: int, end: int, now: float) -> int:
        """Returns the index of the first of keys[start:end] that is not held, or end."""
        held = self._keys
        expected = self._expected
        for index in range(start, end):
            key = keys[index]
            if key not in held and expected.get(key, 0.0) <= now:
                return index
        return end

    def expect(self, keys: Iterable[int], now: float) -> None:
        """Counts these blocks as held, because a prompt with them was sent there.

        They count until the worker must have reported them itself.
        """
        for key in keys:
            self._expected[key] = now + EXPECTED_S
            self._expected.move_to_end(key)
        while len(self._expected) > MAX_EXPECTED:
            self._expected.popitem(last=False)

    def changed(self, change: CacheChange) -> None:
        if self._number is None:
            return  # the state was asked for, or is on its way
        if change.number != self._number + 1:
            self._break()
            return
        self._number = change.number
        stored = _keys(change.stored)
        dropped = _keys(change.dropped)
        self._keys.update(stored)
        self._keys.difference_update(dropped)
        for key in dropped:
            self._expected.pop(key, None)
        if self._next_part is not None:
            self._dropped.difference_update(stored)
            self._dropped.update(dropped)
        self._check_size()

    def filled(self, state: CacheState, now: float) -> None:
        """Takes one part of the whole state; part 0 starts anew."""
        if state.part == 0:
            self._forget()
            self._is_broken = False
            self._number = state.number
            self._next_part = 0
        if state.part != self._next_part:
            if self._number is not None:
                self._break()
            return
        self._filled_at = now
        self._keys.update(_keys(state.stored))
        self._keys -= self._dropped
        self._next_part = None if state.final else state.part + 1
        if state.final:
            self._dropped.clear()
        self._check_size()

    def wants_resync(self, told_number: int | None, now: float) -> bool:
        """True if a new state must be asked for now; the caller must then ask.

        `told_number` is the number of the worker's last change, as it reports; None if it did not.
        """
        if self._is_too_large:
            return False
        is_behind = told_number is not None and told_number != self._number
        is_stuck = self._next_part is not None and now >= self._filled_at + ASK_AGAIN_S
        if is_behind or is_stuck:
            self._break()
        if not self._is_broken or now < self._asked_at + ASK_AGAIN_S:
            return False
        self._asked_at = now
        return True

    def _break(self) -> None:
        self._forget()
        self._is_broken = True

    def _forget(self) -> None:
        self._keys.clear()
        self._dropped.clear()
        self._number = self._next_part = None

    def _check_size(self) -> None:
        if len(self._keys) > MAX_KEYS:
            self._forget()
            self._is_too_large = True


class PooledChunks:
    """Keys of the chunks that workers found in the KV pool that they share.

    A chunk that the pool has dropped is removed once a worker misses it.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def changed(self, change: PoolChange) -> None:
        for key in _keys(change.missed):
            self._keys.pop(key, None)
        for key in _keys(change.found):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MAX_POOLED:
            self._keys.popitem(last=False)


class PromptBlocks:
    """The keys of a prompt's full blocks, for each kind of worker, made only as far as needed.

    The last token is always computed, so a block that ends with it does not count. `holders` says
    which workers hold how much, and when that was looked up; `router.choosing.holders` stores it.
    """

    def __init__(self, token_ids: Sequence[int], tenant: Tenant) -> None:
        self.num_tokens = len(token_ids)
        self.holders: tuple[float, list[Any]] | None = None
        self._token_ids = token_ids
        self._tenant = tenant
        self._chains: dict[tuple[str, int], tuple[list[bytes], list[int]]] = {}

    def forget(self) -> None:
        """Drops the token ids, and the keys, which take as much memory; nobody will ask again."""
        self._token_ids = ()
        self._chains = {}
        self.holders = None

    def num_cached_tokens(
        self, cached: CachedBlocks, rows: str, block_size: int, now: float
    ) -> int:
        """Number of tokens in the longest prefix that is held there.

        `rows` and `block_size` are those of the worker's Hello.
        """
        last = (self.num_tokens - 1) // block_size
        found = 0
        while found < last:
            keys = self._chain(rows, block_size, found + 1)
            end = min(last, len(keys))
            found = cached.num_held(keys, found, end, now)
            if found < end:
                break
        return found * block_size

    def num_pooled_tokens(
        self, pooled: PooledChunks, rows: str, block_size: int, chunk_tokens: int
    ) -> int:
        """Number of tokens in the longest prefix of whole chunks that the pool holds."""
        per_chunk = chunk_tokens // block_size
        found = 0
        last = (self.num_tokens - 1) // block_size // per_chunk
        while (
            found < last
            and self._chain(rows, block_size, end := (found + 1) * per_chunk)[end - 1] in pooled
        ):
            found += 1
        return found * chunk_tokens

    def keys(self, rows: str, block_size: int, limit: int) -> list[int]:
        """Returns the keys of the first blocks, at most `limit` of them."""
        count = min(limit, (self.num_tokens - 1) // block_size)
        return self._chain(rows, block_size, count)[:count]

    def _chain(self, rows: str, block_size: int, count: int) -> list[int]:
        """Returns the keys of at least `count` blocks."""
        digests, keys = self._chains.setdefault((rows, block_size), ([], []))
        if count > len(keys):
            upto = max(FIRST_RUN, 2 * len(keys), count) * block_size
            _hasher(rows, block_size).extend(digests, self._token_ids[:upto], self._tenant)
            keys += _keys(b"".join([digest[:CACHE_KEY_BYTES] for digest in digests[len(keys) :]]))
        return keys


def _keys(data: bytes) -> list[int]:
    """Reads keys in native byte order, as they never leave the process."""
    whole = len(data) - len(data) % CACHE_KEY_BYTES
    return memoryview(data)[:whole].cast("Q").tolist()
