"""The load of an engine's experts, gathered from all ranks when somebody asks for it.

    router --AskExpertLoad--> rank 0 --ask--> every other rank
    router <--ExpertCounts--- sum    <------- its counts

Each rank copies its own counts from the device, after the steps that are queued. No step waits for
that: rank 0 looks between steps whether all counts are there, and another rank answers on its
link's thread. Of the ranks that share the rows of a home and stage, which count the same, one
reports. So the counts of different layers and homes may be a few steps apart. Knows no routers but
by their sessions. `EngineHost` and `FollowerHost` make the two ends; `loop.WorkerLoop` asks.
"""

from collections.abc import Mapping
from functools import partial

import msgspec
import numpy as np

from pdserve.engine.execution.expert_load import ExpertLoad, LoadCopy
from pdserve.parallel.rank_link import RankLink
from pdserve.protocol.events import ExpertCounts
from pdserve.worker.outbox import Session

ASK = b""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[int, list[int]])


class RankLoad:
    """Another rank's end: answers each question of rank 0 until rank 0 is gone.

    `load` is None if the rank's layers have no experts, or another rank reports the same.
    """

    def __init__(self, link: RankLink, load: ExpertLoad | None) -> None:
        self._link = link
        self._load = load
        link.read(self._answer, lambda: None)

    def close(self) -> None:
        self._link.close()

    def _answer(self, ask: bytes) -> None:
        counts = self._load.start_copy().counts() if self._load is not None else {}
        self._link.send(_encoder.encode({layer: rows.tolist() for layer, rows in counts.items()}))


class EngineLoad:
    """Rank 0's end, with a link to each other rank.

    `own` is None if rank 0's layers have no experts. All calls come from the engine's thread.
    """

    def __init__(self, own: ExpertLoad | None, links: Mapping[int, RankLink] | None = None) -> None:
        self._own = own
        self._links = links or {}
        self._waiting: list[Session] = []
        self._served: list[Session] = []  # those for whom the ranks were asked
        self._copy: LoadCopy | None = None
        self._answers: dict[int, bytes] = {}  # by rank
        for rank, link in self._links.items():
            link.read(partial(self._answers.__setitem__, rank), lambda: None)

    @property
    def is_asked(self) -> bool:
        """True if somebody waits for an answer."""
        return bool(self._waiting or self._served)

    def ask(self, session: Session) -> None:
        """Notes that a session wants the counts of all steps so far."""
        self._waiting.append(session)

    def poll(self) -> list[tuple[Session, ExpertCounts]]:
        """Advances what was asked and returns the answers that are complete. Never waits."""
        if not self._served and self._waiting:
            self._begin()
        if not self._served or not self._is_complete:
            return []
        answer = ExpertCounts(layers=self._sum())
        answered = [(session, answer) for session in self._served]
        self._served = []
        return answered

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _begin(self) -> None:
        self._served, self._waiting = self._waiting, []
        self._answers.clear()
        for link in self._links.values():
            link.send(ASK)
        self._copy = self._own.start_copy() if self._own is not None else None

    @property
    def _is_complete(self) -> bool:
        is_copied = self._copy is None or self._copy.ready()
        return is_copied and self._answers.keys() == self._links.keys()

    def _sum(self) -> dict[int, tuple[int, ...]]:
        found = dict(self._copy.counts()) if self._copy is not None else {}
        for answer in self._answers.values():
            for layer, counts in _decoder.decode(answer).items():
                rows = np.array(counts, np.int64)
                found[layer] = found[layer] + rows if layer in found else rows
        return {layer: tuple(found[layer].tolist()) for layer in sorted(found)}
