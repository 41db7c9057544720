"""Reports to routers what the engine's prefix cache holds: everything to a new router, then
numbered changes to all.

    subscribe, resync -> CacheState in parts, one per turn
    changes -> CacheChange, at most one per period

Nothing happens per token: the block manager notes the latest state of each digest, and this reads
the notes now and then. Knows no sockets and no policies (docs/design/prefix-index.md). Used by
`worker.loop`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pdserve.engine.memory.block_manager import BlockManager
from pdserve.protocol.events import CACHE_KEY_BYTES, CacheChange, CacheState

PERIOD_S = 0.1
KEYS_PER_MESSAGE = 8192  # 64 KB of stored keys and 64 KB of dropped ones

Session = tuple[str, int]


class CacheReport:
    """Makes the block managers of all homes note their changes.

    The worker holds what any of its homes holds. Times are monotonic seconds.
    """

    def __init__(self, homes: Sequence[BlockManager]) -> None:
        self._homes = homes
        self._changes: dict[bytes, bool] = {}
        for blocks in homes:
            blocks.cache_changes = self._changes
        self._states: OrderedDict[Session, _State] = OrderedDict()
        self._last_told = 0.0
        self.number = 0

    @property
    def has_parts(self) -> bool:
        """True while a state is being sent, so that the next turn has more to do."""
        return bool(self._states)

    def begin(self, session: Session) -> CacheState:
        """Returns the first part of the whole state; the others follow in the next turns.

        If a state is already being sent to the session, it starts again.
        """
        self._states.pop(session, None)
        digests = {digest: None for blocks in self._homes for digest in blocks.cached_digests()}
        state = _State(self.number, list(digests))
        part = state.next_part()
        if not part.final:
            self._states[session] = state
        return part

    def forget(self, session: Session) -> None:
        self._states.pop(session, None)

    def next_part(self) -> tuple[Session, CacheState] | None:
        """Returns one part for one router; routers take turns."""
        if not self._states:
            return None
        session, state = self._states.popitem(last=False)
        part = state.next_part()
        if not part.final:
            self._states[session] = state
        return session, part

    def changes(self, now: float, anyone: bool) -> list[CacheChange]:
        """Returns the changes that are due now.

        If `anyone` is False nobody listens, and the changes are forgotten: each new router gets a
        state.
        """
        if not self._changes or now < self.due():
            return []
        self._last_told = now
        noted = [(digest, self._is_held(digest)) for digest in self._changes]
        self._changes.clear()
        return (
            [self._change(noted[i : i + KEYS_PER_MESSAGE]) for i in _starts(noted)]
            if anyone
            else []
        )

    def due(self) -> float:
        """Returns when changes are reported next; infinite if there are none."""
        if not self._changes:
            return float("inf")
        return 0.0 if len(self._changes) >= KEYS_PER_MESSAGE else self._last_told + PERIOD_S

    def _is_held(self, digest: bytes) -> bool:
        return any(blocks.match([digest]) for blocks in self._homes)

    def _change(self, noted: list[tuple[bytes, bool]]) -> CacheChange:
        self.number += 1
        stored = _keys(digest for digest, is_stored in noted if is_stored)
        dropped = _keys(digest for digest, is_stored in noted if not is_stored)
        return CacheChange(number=self.number, stored=stored, dropped=dropped)


class _State:
    """One router's state on its way.

    `digests` are those after change `number`. Changes that were noted but not yet reported are
    included and will be reported again, which does no harm.
    """

    def __init__(self, number: int, digests: list[bytes]) -> None:
        self._number = number
        self._digests = digests
        self._part = 0

    def next_part(self) -> CacheState:
        start = self._part * KEYS_PER_MESSAGE
        end = start + KEYS_PER_MESSAGE
        stored = _keys(self._digests[start:end])
        part = CacheState(
            number=self._number, part=self._part, final=end >= len(self._digests), stored=stored
        )
        self._part += 1
        return part


def _keys(digests: Iterable[bytes]) -> bytes:
    return b"".join([digest[:CACHE_KEY_BYTES] for digest in digests])


def _starts(noted: list[tuple[bytes, bool]]) -> range:
    return range(0, len(noted), KEYS_PER_MESSAGE)
