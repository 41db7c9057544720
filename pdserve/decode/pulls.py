"""Keeps the blocks that pulls fill: how many there may be, for whom, and which wait in quarantine.

Knows the engine's blocks and who asked for them. It neither talks to a receiver nor decides which
import is next. Used by `decode_phase.DecodePhase`, and by `worker.fetching.fetch_phase`, whose
prefixes share ids, budget and quarantine with the imports. Events of fetches wait in `fetched`.

    reserved -> done: the engine's sequence has them, or they are cached if nobody waits any more.
             -> failed: the blocks are free, and the verified ones cached.
                If unsettled, they are in quarantine until settled.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdserve.decode.kv_import import KVImport
from pdserve.engine.engine import Engine
from pdserve.engine.reservations import Reservation
from pdserve.engine.scheduling.home import Home
from pdserve.engine.scheduling.sequence import Request
from pdserve.kvtransfer.connector import Lent, PullDone, PullFailed, PullSettled
from pdserve.protocol.commands import Start


@dataclass(frozen=True)
class Pull:
    """A reservation that a pull fills, and the import that waits for it.

    The import is None if nobody waits any more, or if the pull fetches a prefix.
    """

    reservation: Reservation
    item: KVImport | None
    engine_id: str


@dataclass(frozen=True)
class _Quarantine:
    """Blocks of a failed pull in which bytes of the peer may still land."""

    engine_id: str
    home: int
    blocks: list[int]


class Pulls:
    """The pulls under way, by id.

    - `max_reserved_blocks`: budget of blocks that pulls may hold in each home. A single pull may
      exceed it.
    - `max_quarantined_blocks`: with more than that in a home, nothing is pulled from peers whose
      reads do not end.
    - `fetched`: events of fetches, which their phase takes.
    """

    def __init__(
        self, engine: Engine, max_reserved_blocks: int, max_quarantined_blocks: int
    ) -> None:
        self._max_reserved = max_reserved_blocks
        self._engine = engine
        self._max_quarantined = max_quarantined_blocks
        self._pulls: dict[int, Pull] = {}
        self._quarantined: dict[int, _Quarantine] = {}
        self._pull_ids = itertools.count()
        self._fetches: set[int] = set()
        self.fetched: list[Lent | PullDone | PullFailed | PullSettled] = []

    @property
    def under_way(self) -> dict[int, Pull]:
        """The pulls by id, in the order in which they began."""
        return dict(self._pulls)

    @property
    def owned(self) -> list[tuple[int, list[int]]]:
        """The home of each pull, and its block table."""
        reservations = [pull.reservation for pull in self._pulls.values()]
        return [(reservation.home, reservation.block_table) for reservation in reservations]

    def num_blocks(self, item: KVImport) -> int:
        """Returns the number of blocks that the import's prompt needs, including cached ones."""
        return self._engine.layout.num_blocks_for(item.request.num_prompt_tokens)

    def home_of(self, item: KVImport) -> int | None:
        """Returns the home whose blocks the import's pull fills; None while it has no pull."""
        return None if item.pull_id is None else self._pulls[item.pull_id].reservation.home

    def is_shunned(self, engine_id: str) -> bool:
        """True if reads from this peer do not end and already hold too many blocks."""
        held = Counter[int]()
        for waiting in self._quarantined.values():
            held[waiting.home] += len(waiting.blocks)
        return max(held.values(), default=0) > self._max_quarantined and any(
            waiting.engine_id == engine_id for waiting in self._quarantined.values()
        )

    def reserve(self, item: KVImport) -> Reservation | None:
        """Reserves blocks for an import; None while the budget or the free blocks of no home allow
        it.

        Each running sequence keeps a block to grow into.
        """
        return self._reserve(item, lambda home: self._has_budget(home, item))

    def reserve_early(self, item: KVImport) -> Reservation | None:
        """Reserves blocks before the Submit.

        Such pulls have half of the budget, so that submitted ones find room at once.
        """
        wanted = self.num_blocks(item)

        def has_room(home: Home) -> bool:
            early = self._num_early(home) + wanted
            return early <= self._max_reserved // 2 and self._has_budget(home, item)

        return self._reserve(item, has_room)

    def reserve_prefix(
        self, request: Request, starts: tuple[Start, ...], num_blocks: int
    ) -> Reservation | None:
        """Reserves the first blocks of a prompt that will be computed here anyway.

        Prefixes share that half of the budget, which a single one may exceed.
        """

        def has_room(home: Home) -> bool:
            held = sum(len(pull.reservation.destination) for pull in self._in(home))
            early = self._num_early(home)
            return held + num_blocks <= self._max_reserved and (
                not early or early + num_blocks <= self._max_reserved // 2
            )

        return self._engine.reserve(request, starts, num_blocks, keeps_room=True, may_use=has_room)

    def _reserve(self, item: KVImport, may_use: Callable[[Home], bool]) -> Reservation | None:
        return self._engine.reserve(item.request, item.starts, keeps_room=True, may_use=may_use)

    def _has_budget(self, home: Home, item: KVImport) -> bool:
        reserved = [len(pull.reservation.destination) for pull in self._in(home)]
        return not reserved or sum(reserved) + self.num_blocks(item) <= self._max_reserved

    def _num_early(self, home: Home) -> int:
        """Returns the number of blocks of prepared pulls and of prefixes."""
        hints = [pull.item for pull in self._in(home) if pull.item and pull.item.is_hint]
        prefixes = [
            pull.reservation
            for pull_id, pull in self._pulls.items()
            if pull_id in self._fetches and pull.reservation.home == home.number
        ]
        return sum(self.num_blocks(hint) for hint in hints) + sum(
            len(reservation.destination) for reservation in prefixes
        )

    def _in(self, home: Home) -> list[Pull]:
        return [pull for pull in self._pulls.values() if pull.reservation.home == home.number]

    def begin(self, item: KVImport, reservation: Reservation) -> int:
        """Returns the id of a new pull, which the caller starts."""
        pull_id = item.pull_id = next(self._pull_ids)
        item.is_hint = item.is_revoked = False
        item.began = time.monotonic()
        self._pulls[pull_id] = Pull(reservation, item, item.source.engine_id)
        return pull_id

    def begin_fetch(self) -> int:
        """Returns the id of a new fetch, used for its question and for its pull."""
        pull_id = next(self._pull_ids)
        self._fetches.add(pull_id)
        return pull_id

    def fill_prefix(self, pull_id: int, reservation: Reservation, engine_id: str) -> None:
        """Notes the pull of a fetch, which the caller starts."""
        self._pulls[pull_id] = Pull(reservation, None, engine_id)

    def end_fetch(self, pull_id: int) -> None:
        self._fetches.discard(pull_id)

    def keep_for_fetch(self, event: Lent | PullDone | PullFailed | PullSettled) -> bool:
        """Keeps an event of a fetch that has not ended in `fetched`, and returns True.

        A PullSettled must not overtake the failure that waits there: the quarantine would never
        end.
        """
        if event.pull_id not in self._fetches:
            return False
        self.fetched.append(event)
        return True

    def forget(self, pull_id: int) -> None:
        """Removes a pull without blocks: nothing depends on its outcome."""
        del self._pulls[pull_id]

    def detach(self, item: KVImport) -> int:
        """Notes that nobody waits for the import's pull any more. Returns the pull's id.

        Its blocks are given back at its end.
        """
        assert item.pull_id is not None
        pull_id = item.pull_id
        self._pulls[pull_id] = replace(self._pulls[pull_id], item=None)
        item.pull_id = None
        item.began = None
        item.is_hint = False
        return pull_id

    def finish(self, pull_id: int) -> tuple[KVImport, Reservation] | None:
        """Ends a pull whose rows are all here. Returns who waits for them.

        If nobody waits, the rows are cached and None is returned.
        """
        pull = self._pulls.pop(pull_id, None)
        if pull is None:
            return None
        if pull.item is None:
            self._engine.cancel_reservation(
                pull.reservation, True, len(pull.reservation.destination)
            )
            return None
        return pull.item, pull.reservation

    def fail(self, event: PullFailed) -> KVImport | None:
        """Gives the blocks back, or puts them in quarantine. Returns who waited for them."""
        pull = self._pulls.pop(event.pull_id, None)
        if pull is None:
            return None
        blocks = self._engine.cancel_reservation(
            pull.reservation, event.settled, event.num_verified
        )
        if not event.settled:
            home = pull.reservation.home
            self._quarantined[event.pull_id] = _Quarantine(pull.engine_id, home, blocks)
        return pull.item

    def settle(self, pull_id: int) -> None:
        """Frees the blocks of a failed pull in which nothing can land any more."""
        waiting = self._quarantined.pop(pull_id, None)
        if waiting is not None:
            self._engine.homes[waiting.home].blocks.settle(waiting.blocks)
