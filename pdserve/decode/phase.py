"""What a worker does in the decode phase: reserve blocks, pull P's rows into them, join the running batch; or
recompute.

Knows the engine and a KVReceiver; nothing of the prefill phase, of sockets or of routers. Driven by worker.loop on its
one thread.

    QUEUED --blocks reserved--> PULLING --all bytes and generations good--> joined (source "p2p")
       |  \\--everything cached here--> joined (source "cache")
       |                          \\--any failure--> the engine computes the prompt (source "recompute")
       \\--no blocks before the deadline, or a ticket for other content--> the same
    After an unsettled failure the destination blocks wait in quarantine for PullSettled; the request does not wait for
    them.
"""

import itertools
import time
from collections import OrderedDict
from dataclasses import dataclass

from pdserve.engine.engine import Engine, Reservation
from pdserve.engine.protocol import Arrived, Event, PeerStatus, RequestKey, Start, Submit, Ticket
from pdserve.engine.sequence import Request
from pdserve.kvtransfer.connector import KVReceiver, PullDone, PullFailed, PullSettled


@dataclass(eq=False)
class _Import:
    """A request whose rows are to be pulled. started: monotonic seconds when it was submitted."""

    request: Request
    starts: tuple[Start, ...]
    ticket: Ticket
    started: float
    cancelled: bool = False

    @property
    def key(self) -> RequestKey:
        return self.request.key


class DecodePhase:
    """max_reserved_blocks: budget of blocks that pulls may hold; a single pull may exceed it. deadline_s: of each pull,
    and of waiting for blocks."""

    def __init__(self, engine: Engine, receiver: KVReceiver, max_reserved_blocks: int, deadline_s: float) -> None:
        self._engine = engine
        self._receiver = receiver
        self._max_reserved = max_reserved_blocks
        self._deadline_s = deadline_s
        self._queue: OrderedDict[RequestKey, _Import] = OrderedDict()
        self._pulling: dict[int, tuple[_Import, Reservation]] = {}
        self._quarantined: dict[int, list[int]] = {}
        self._pull_ids = itertools.count()

    @property
    def waits_for_blocks(self) -> bool:
        return bool(self._queue)

    @property
    def num_reserved_blocks(self) -> int:
        return sum(len(reservation.destination) for _, reservation in self._pulling.values())

    @property
    def reservations(self) -> list[Reservation]:
        return [reservation for _, reservation in self._pulling.values()]

    def submit(self, submit: Submit) -> list[tuple[RequestKey, Event]]:
        """Begin an import; ValueError when the request can never run here. Returns events to send."""
        request = self._engine.make_request(submit)
        request.prompt_reported = True
        ticket = submit.ticket
        if ticket is None:
            return self._recompute(request, submit.starts, "no-ticket")
        if not self._belongs(ticket, request):
            self._receiver.reject(ticket)
            return self._recompute(request, submit.starts, "ticket-for-other-content")
        self._queue[request.key] = _Import(request, submit.starts, ticket, time.monotonic())
        return []

    def poll(self) -> tuple[list[tuple[RequestKey, Event]], list[PeerStatus]]:
        """Advance all imports: (events of requests, news of peers)."""
        events: list[tuple[RequestKey, Event]] = []
        peers: list[PeerStatus] = []
        for event in self._receiver.poll():
            if isinstance(event, PeerStatus):
                peers.append(event)
            elif isinstance(event, PullSettled):
                self._engine.blocks.settle(self._quarantined.pop(event.pull_id, []))
            elif isinstance(event, PullDone):
                events += self._done(event)
            else:
                events += self._failed(event)
        events += self._start_pulls()
        return events, peers

    def cancel(self, key: RequestKey, choices: tuple[int, ...] | None) -> None:
        """Stop an import, or leave out some of its choices; idempotent. (The engine aborts what has joined.)"""
        for item in [*self._queue.values(), *(item for item, _ in self._pulling.values())]:
            if item.key == key and not item.cancelled:
                item.starts = () if choices is None else tuple(s for s in item.starts if s.choice not in choices)
                if not item.starts:
                    self._cancel(item)

    def keys(self) -> set[RequestKey]:
        """Requests that wait for their rows."""
        return {*self._queue, *(item.key for item, _ in self._pulling.values() if not item.cancelled)}

    def _cancel(self, item: _Import) -> None:
        item.cancelled = True
        if self._queue.pop(item.key, None) is not None:
            self._receiver.reject(item.ticket)
            return
        pull_id = next(pull_id for pull_id, (pulling, _) in self._pulling.items() if pulling is item)
        self._receiver.cancel(pull_id)

    def _belongs(self, ticket: Ticket, request: Request) -> bool:
        """Whether the ticket's rows are those of this prompt, and the ticket is well-formed."""
        num_blocks = self._engine.layout.num_blocks_for(request.num_prompt_tokens)
        return (
            ticket.content == self._engine.hasher.content(request.prompt_token_ids, request.cache_salt)
            and ticket.num_tokens == request.num_prompt_tokens
            and len(ticket.block_ids) == len(ticket.generations) == num_blocks
        )

    def _start_pulls(self) -> list[tuple[RequestKey, Event]]:
        """Reserve in order of arrival and post; whoever waits beyond the deadline computes its prompt instead."""
        events: list[tuple[RequestKey, Event]] = []
        while self._queue:
            item = next(iter(self._queue.values()))
            reservation = self._reserve(item)
            if reservation is not None:
                del self._queue[item.key]
                events += self._start(item, reservation)
            elif time.monotonic() - item.started > self._deadline_s:
                del self._queue[item.key]
                self._receiver.reject(item.ticket)
                events += self._recompute(item.request, item.starts, "no-blocks")
            else:
                break
        return events

    def _reserve(self, item: _Import) -> Reservation | None:
        """None while the budget or the blocks do not allow it; running sequences keep a block each to grow into."""
        wanted = len(item.ticket.block_ids)
        growth = len(self._engine.scheduler.running)
        if self._pulling and self.num_reserved_blocks + wanted > self._max_reserved:
            return None
        if growth and self._engine.blocks.num_free < wanted + growth:
            return None
        return self._engine.reserve(item.request, item.starts)

    def _start(self, item: _Import, reservation: Reservation) -> list[tuple[RequestKey, Event]]:
        pull_id = next(self._pull_ids)
        ticket = item.ticket
        self._receiver.pull(pull_id, ticket, reservation.destination, reservation.num_cached, self._deadline_s)
        if reservation.destination:
            self._pulling[pull_id] = item, reservation
            return []
        return self._join(item, reservation, "cache")  # the pull only tells P; nothing depends on its outcome

    def _join(
        self, item: _Import, reservation: Reservation, source: str, done: PullDone | None = None
    ) -> list[tuple[RequestKey, Event]]:
        reservation.starts = item.starts
        self._engine.join(reservation)
        arrived = Arrived(
            request_id=item.key.request_id,
            attempt=item.key.attempt,
            source=source,
            num_bytes=done.num_bytes if done else 0,
            num_descriptors=done.num_descriptors if done else 0,
            transport=done.transport if done else "",
            seconds=time.monotonic() - item.started,
            cached_tokens=item.request.cached_tokens,
        )
        return [(item.key, arrived)]

    def _done(self, event: PullDone) -> list[tuple[RequestKey, Event]]:
        entry = self._pulling.pop(event.pull_id, None)
        if entry is None:
            return []
        item, reservation = entry
        if item.cancelled:
            self._engine.cancel_reservation(reservation, settled=True)
            return []
        return self._join(item, reservation, "p2p", event)

    def _failed(self, event: PullFailed) -> list[tuple[RequestKey, Event]]:
        entry = self._pulling.pop(event.pull_id, None)
        if entry is None:
            return []
        item, reservation = entry
        blocks = self._engine.cancel_reservation(reservation, event.settled)
        if not event.settled:
            self._quarantined[event.pull_id] = blocks
        if item.cancelled:
            return []
        return self._recompute(item.request, item.starts, event.reason)

    def _recompute(self, request: Request, starts: tuple[Start, ...], reason: str) -> list[tuple[RequestKey, Event]]:
        self._engine.add(request, starts)
        arrived = Arrived(
            request_id=request.key.request_id, attempt=request.key.attempt, source="recompute", reason=reason
        )
        return [(request.key, arrived)]
