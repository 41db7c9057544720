"""Gathers the events for routers per session, and sends one batch for each when the loop flushes.

A session is one connection of one router. Knows which sessions are open and the name of this
worker; neither where events come from nor how a batch is carried. Used by `loop.WorkerLoop`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from pdserve.protocol.events import Event, EventBatch, PromptScored
from pdserve.protocol.request_key import RequestKey

Session = tuple[str, int]
Send = Callable[[str, EventBatch], None]

ALL_ROUTERS = "*"


class Outbox:
    """Calls `send(target, batch)`; target is "router_id/session" or "*"."""

    def __init__(self, send: Send, worker_id: str, incarnation: int) -> None:
        self._send = send
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._sessions: set[Session] = set()
        self._outgoing: dict[Session, list[Event]] = defaultdict(list)

    @property
    def has_readers(self) -> bool:
        return bool(self._sessions)

    def open(self, session: Session) -> None:
        self._sessions.add(session)

    def close(self, session: Session) -> None:
        """Forgets a session and the events gathered for it."""
        self._sessions.discard(session)
        self._outgoing.pop(session, None)

    def is_open(self, session: Session) -> bool:
        return session in self._sessions

    def add(self, key: RequestKey, event: Event) -> None:
        """Adds an event of a request; called once per token. The event is dropped if its session is
        closed.

        A prompt's log-probabilities are large. They leave at once, with the events before them.
        """
        session = (key.router_id, key.session)
        if session in self._sessions:
            self._outgoing[session].append(event)
            if isinstance(event, PromptScored) and event.logprobs is not None:
                self._send_outgoing(session, self._outgoing.pop(session))

    def add_to(self, session: Session, *events: Event) -> None:
        self._outgoing[session] += events

    def add_to_all(self, event: Event) -> None:
        """Adds an event for every open session."""
        for session in self._sessions:
            self._outgoing[session].append(event)

    def flush(self) -> None:
        for session, events in self._outgoing.items():
            self._send_outgoing(session, events)
        self._outgoing.clear()

    def broadcast(self, *events: Event) -> None:
        """Sends to all routers now, even to those that are not known yet."""
        self._send_to(ALL_ROUTERS, events)

    def _send_outgoing(self, session: Session, events: Sequence[Event]) -> None:
        self._send_to(f"{session[0]}/{session[1]}", events)

    def _send_to(self, target: str, events: Sequence[Event]) -> None:
        batch = EventBatch(
            worker_id=self._worker_id, incarnation=self._incarnation, events=tuple(events)
        )
        self._send(target, batch)
