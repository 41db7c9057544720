"""Reports to routers which chunks the KV pool is known to hold: chunks that this worker stored or
read there, and chunks that it missed.

A host's workers share the pool's server, which reports nothing of what it drops. So these are hints
without numbers; a wrong one costs a guess (docs/design/prefix-index.md). Kept by
`worker.pool_phase`, sent by `worker.loop`.
"""

from collections import OrderedDict
from collections.abc import Iterable

from pdserve.protocol.events import CACHE_KEY_BYTES, PoolChange

MAX_KNOWN = 8192  # digests to report to a new router: 64 KB


class PoolReport:
    """The known chunks. Digests are those of the blocks that end a chunk
    (`protocol.block_digests`)."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._changes: dict[bytes, bool] = {}

    def found(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if digest not in self._known:
                self._changes[digest] = True
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def missed(self, digests: Iterable[bytes]) -> None:
        """Notes missed chunks, even unknown ones: another worker may have reported them as
        found."""
        for digest in digests:
            self._known.pop(digest, None)
            self._changes[digest] = False

    def everything(self) -> PoolChange:
        return PoolChange(found=_keys(self._known), missed=b"")

    def changes(self) -> PoolChange | None:
        """Returns the changes since the last call; None if there are none."""
        if not self._changes:
            return None
        found = _keys(digest for digest, is_found in self._changes.items() if is_found)
        missed = _keys(digest for digest, is_found in self._changes.items() if not is_found)
        self._changes.clear()
        return PoolChange(found=found, missed=missed)


def _keys(digests: Iterable[bytes]) -> bytes:
    return b"".join([digest[:CACHE_KEY_BYTES] for digest in digests])
