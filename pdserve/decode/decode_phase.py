"""What a worker does in the decode phase: reserve blocks, pull P's rows into them, join the running batch; or
recompute.

Knows the engine and a KVReceiver; nothing of the prefill phase, of sockets or of routers. Driven by worker.loop on its
one thread.

    Prepare --> WAITING --blocks reserved--> FOLLOWING P's parts --lost, or blocks wanted by others--> IDLE (holds none)
                   \\____________________________|________________________________________________________|
                                               Submit, with the ticket
    Submit  --> WAITING --blocks reserved--> PULLING --all bytes and generations good--> joined (source "p2p")
                   |  \\--everything cached here--> joined (source "cache")
                   |                            \\--any failure--> the engine computes the prompt (source "recompute")
                   \\--no blocks before the deadline, or a ticket for other content--> the same

A Prepare is a hint, and what it holds is the first to go: running sequences and submitted imports come before it. What
of a failed pull was verified stays as cached blocks. After an unsettled failure the other destination blocks wait in
quarantine for PullSettled; the request does not wait for them.
"""

import itertools
import time
from collections import OrderedDict
from dataclasses import dataclass, replace

from pdserve.engine.engine import Engine
from pdserve.engine.reservations import Reservation
from pdserve.engine.scheduling.sequence import ComputeHere, Request
from pdserve.kvtransfer.connector import KVReceiver, PullDone, PullFailed, PullSettled
from pdserve.protocol.commands import Prepare, Start, Submit
from pdserve.protocol.events import Arrived, Event, PeerStatus
from pdserve.protocol.handoff import Source, Ticket
from pdserve.protocol.request_key import RequestKey

PREPARED_S = 60.0  # a Prepare may overtake the Submit and find its request over: nobody would end it

Events = list[tuple[RequestKey, Event]]


@dataclass(eq=False)
class KVImport:
    """A request whose rows are to be pulled. ticket: None until its Submit. started: when that came, or the Prepare
    (monotonic seconds). began: the newest pull (None: none yet). pull_id: while a pull is under way; is_hint: begun
    before the Submit; is_revoked: ended for its blocks.
    """

    request: Request
    starts: tuple[Start, ...]
    source: Source
    started: float
    ticket: Ticket | None = None
    began: float | None = None
    pull_id: int | None = None
    is_hint: bool = False
    is_revoked: bool = False

    @property
    def key(self) -> RequestKey:
        return self.request.key

    def spent(self) -> tuple[float, float]:
        """Seconds since the Submit, and how many of them it waited for blocks."""
        now = time.monotonic()
        return now - self.started, max(0.0, (now if self.began is None else self.began) - self.started)


@dataclass(frozen=True)
class _Pull:
    """What a pull fills, and for whom; None: nobody waits for it any more."""

    reservation: Reservation
    item: KVImport | None
    engine_id: str


class DecodePhase:
    """max_reserved_blocks: budget of blocks that pulls may hold; a single pull may exceed it. max_quarantined_blocks:
    with more than that, nothing is pulled from peers whose reads do not end. deadline_s: of each pull, and of waiting
    for blocks. compute: gives a request whose rows could not be pulled to the engine.
    """

    def __init__(
        self,
        engine: Engine,
        receiver: KVReceiver,
        max_reserved_blocks: int,
        max_quarantined_blocks: int,
        deadline_s: float,
        compute_here: ComputeHere,
    ) -> None:
        self._engine = engine
        self._compute_here = compute_here
        self._receiver = receiver
        self._max_reserved = max_reserved_blocks
        self._max_quarantined = max_quarantined_blocks
        self._deadline_s = deadline_s
        self._imports: OrderedDict[RequestKey, KVImport] = OrderedDict()
        self._waiting: OrderedDict[RequestKey, KVImport] = OrderedDict()
        self._pulls: dict[int, _Pull] = {}
        self._quarantined: dict[int, tuple[str, list[int]]] = {}
        self._pull_ids = itertools.count()
        self._renewed = 0.0

    @property
    def waits_for_blocks(self) -> bool:
        return any(item.ticket is not None for item in self._waiting.values())

    @property
    def num_reserved_blocks(self) -> int:
        return sum(len(pull.reservation.destination) for pull in self._pulls.values())

    @property
    def owned(self) -> list[list[int]]:
        """The blocks of everything that is under way."""
        return [pull.reservation.block_table for pull in self._pulls.values()]

    def prepare(self, prepare: Prepare) -> None:
        """Begin an import before its prompt is computed. One that can never run here is left to its Submit to say."""
        try:
            request = self._engine.make_request(prepare.submit)
        except ValueError:
            return
        if request.key not in self._imports:
            item = KVImport(request, prepare.submit.starts, prepare.source, time.monotonic())
            self._imports[item.key] = self._waiting[item.key] = item

    def submit(self, submit: Submit) -> Events:
        """Begin an import, or go on with the prepared one; ValueError when the request can never run here. Returns
        events to send."""
        prepared = self._imports.pop(submit.key, None)
        try:
            request = self._engine.make_request(submit)
        except ValueError:
            if prepared is not None:
                self._let_go(prepared)
            raise
        request.prompt_reported = True
        if prepared is not None and not request.adopt(prepared.request):
            self._let_go(prepared)
            prepared = None
        ticket = submit.ticket
        if ticket is None or not self._belongs(ticket, request):
            if prepared is not None:
                self._let_go(prepared)
            if ticket is None:
                return self._recompute(request, submit.starts, "no-ticket")
            self._receiver.reject(ticket)
            return self._recompute(request, submit.starts, "ticket-for-other-content")
        item = prepared or KVImport(request, submit.starts, _source_of(ticket), 0.0)
        item.request, item.starts, item.ticket, item.started = request, submit.starts, ticket, time.monotonic()
        self._imports[item.key] = item
        if item.pull_id is not None and item.source == _source_of(ticket):
            if not item.is_revoked:
                self._receiver.complete(item.pull_id, ticket, self._deadline_s)
            return []
        if item.pull_id is not None:  # prepared for another source
            self._detach(item)
        item.source = _source_of(ticket)
        self._waiting.pop(item.key, None)  # from where it was prepared to the end of those with a ticket
        self._waiting[item.key] = item
        return []

    def poll(self) -> tuple[Events, list[PeerStatus]]:
        """Advance all imports: (events of requests, news of peers)."""
        events: Events = []
        peers: list[PeerStatus] = []
        for event in self._receiver.poll():
            if isinstance(event, PeerStatus):
                peers.append(event)
            elif isinstance(event, PullSettled):
                _, blocks = self._quarantined.pop(event.pull_id, ("", []))
                self._engine.blocks.settle(blocks)
            elif isinstance(event, PullDone):
                events += self._done(event)
            else:
                events += self._failed(event)
        events += self._start_submitted()
        self._end_forgotten()
        self._start_prepared()
        self._yield_to_others()
        self._renew_leases()
        return events, peers

    def cancel(self, key: RequestKey, choices: tuple[int, ...] | None) -> None:
        """Stop an import, or leave out some of its choices; idempotent. (The engine aborts what has joined.)"""
        item = self._imports.get(key)
        if item is None:
            return
        item.starts = () if choices is None else tuple(s for s in item.starts if s.choice not in choices)
        if not item.starts:
            del self._imports[key]
            self._let_go(item)

    def cancel_prepared(self, router_id: str, session: int) -> None:
        """Stop the imports of a lost router that were not submitted."""
        for key, item in list(self._imports.items()):
            if item.ticket is None and (key.router_id, key.session) == (router_id, session):
                self.cancel(key, None)

    def keys(self) -> set[RequestKey]:
        """Requests that wait for their rows."""
        return {key for key, item in self._imports.items() if item.ticket is not None}

    # --- blocks ---

    def _start_submitted(self) -> Events:
        """Reserve by priority and arrival, and post; whoever waits beyond the deadline computes its prompt instead."""
        events: Events = []
        lacks_blocks, now = False, time.monotonic()
        submitted = [item for item in self._waiting.values() if item.ticket is not None]
        for item in sorted(submitted, key=lambda item: item.request.priority):
            if self._is_shunned(item.source.engine_id):
                events += self._give_up(item, "quarantine-full", f"reads from {item.source.engine_id} do not end")
                continue
            reservation = None if lacks_blocks else self._reserve(item)
            if reservation is not None:
                events += self._start(item, reservation)
            elif now - item.started > self._deadline_s:
                detail = f"{self._num_blocks(item)} blocks were not to be had within {self._deadline_s:g} s"
                events += self._give_up(item, "no-blocks", detail)
            else:
                lacks_blocks = True  # nobody overtakes by being small; the others are only given up in time
        if lacks_blocks:
            self._revoke_one()
        return events

    def _start_prepared(self) -> None:
        """Give what nobody else waits for to those that may need it soon: half of the budget, so that submitted ones
        find room at once."""
        if self.waits_for_blocks or self._engine.scheduler.waiting:
            return
        room = self._max_reserved // 2 - sum(self._num_blocks(item) for item in self._imports.values() if item.is_hint)
        for item in list(self._waiting.values()):
            if self._is_shunned(item.source.engine_id):
                continue
            reservation = self._reserve(item) if self._num_blocks(item) <= room else None
            if reservation is None:
                return
            if not reservation.destination:  # all is cached: nothing to do before its Submit
                self._engine.cancel_reservation(reservation, settled=True)
                del self._waiting[item.key]
                continue
            content = self._engine.content(item.request)
            pull_id = self._begin(item, reservation)
            item.is_hint = True
            room -= self._num_blocks(item)
            blocks, skip = reservation.destination, reservation.num_cached
            self._receiver.follow(pull_id, item.source, content, blocks, skip, self._deadline_s)

    def _num_blocks(self, item: KVImport) -> int:
        return self._engine.layout.num_blocks_for(item.request.num_prompt_tokens)

    def _end_forgotten(self) -> None:
        limit = time.monotonic() - PREPARED_S
        for key, item in list(self._imports.items()):
            if item.ticket is None and item.started < limit:
                self.cancel(key, None)

    def _reserve(self, item: KVImport) -> Reservation | None:
        """None while the budget or the blocks do not allow it; running sequences keep a block each to grow into."""
        wanted = self._num_blocks(item)
        growth = len(self._engine.scheduler.running)
        if self._pulls and self.num_reserved_blocks + wanted > self._max_reserved:
            return None
        if growth and self._engine.blocks.num_free < wanted + growth:
            return None
        return self._engine.reserve(item.request, item.starts)

    def _yield_to_others(self) -> None:
        """Sequences that run, or would if there were blocks, come before what is only prepared."""
        scheduler = self._engine.scheduler
        if scheduler.wants_blocks or self._engine.blocks.num_free < len(scheduler.running):
            self._revoke_one()

    def _revoke_one(self) -> None:
        """End the newest pull that was only prepared; its blocks are free when the link has answered. One at a
        time."""
        prepared = [item for item in self._imports.values() if item.pull_id is not None and item.ticket is None]
        if prepared and not any(item.is_revoked for item in prepared):
            item = prepared[-1]
            item.is_revoked = True
            assert item.pull_id is not None
            self._receiver.cancel(item.pull_id)

    def _is_shunned(self, engine_id: str) -> bool:
        """Whether reads from this peer do not end, and hold too much already."""
        held = sum(len(blocks) for _, blocks in self._quarantined.values())
        return held > self._max_quarantined and any(peer == engine_id for peer, _ in self._quarantined.values())

    # --- pulls ---

    def _begin(self, item: KVImport, reservation: Reservation) -> int:
        del self._waiting[item.key]
        pull_id = item.pull_id = next(self._pull_ids)
        item.is_hint = item.is_revoked = False
        item.began = time.monotonic()
        self._pulls[pull_id] = _Pull(reservation, item, item.source.engine_id)
        return pull_id

    def _start(self, item: KVImport, reservation: Reservation) -> Events:
        assert item.ticket is not None
        pull_id, blocks = self._begin(item, reservation), reservation.destination
        self._receiver.pull(pull_id, item.ticket, blocks, reservation.num_cached, self._deadline_s)
        if blocks:
            return []
        del self._pulls[pull_id]  # the pull only tells P; nothing depends on its outcome
        return self._join(item, reservation, "cache")

    def _done(self, event: PullDone) -> Events:
        pull = self._pulls.pop(event.pull_id, None)
        if pull is None:
            return []
        if pull.item is None:
            self._engine.cancel_reservation(pull.reservation, True, len(pull.reservation.destination))
            return []
        return self._join(pull.item, pull.reservation, "p2p", event)

    def _failed(self, event: PullFailed) -> Events:
        pull = self._pulls.pop(event.pull_id, None)
        if pull is None:
            return []
        blocks = self._engine.cancel_reservation(pull.reservation, event.settled, event.num_verified)
        if not event.settled:
            self._quarantined[event.pull_id] = pull.engine_id, blocks
        item = pull.item
        if item is None:
            return []
        ended_as_hint = item.is_hint and not event.was_complete
        item.pull_id, item.is_hint = None, False
        if item.ticket is not None and not ended_as_hint:
            del self._imports[item.key]
            return self._recompute(item.request, item.starts, event.reason, event.detail, item.spent())
        item.began = None
        if item.ticket is not None:  # its Submit came meanwhile: the sequential way
            self._waiting[item.key] = item
        return []

    def _join(self, item: KVImport, reservation: Reservation, source: str, done: PullDone | None = None) -> Events:
        del self._imports[item.key]
        reservation.request, reservation.starts = item.request, item.starts
        self._engine.join(reservation)
        assert item.ticket is not None
        seconds, wait_s = item.spent()
        arrived = Arrived(
            request_id=item.key.request_id,
            attempt=item.key.attempt,
            source=source,
            num_bytes=done.num_bytes if done else 0,
            num_early_bytes=done.num_early_bytes if done else 0,
            num_descriptors=done.num_descriptors if done else 0,
            transport=done.transport if done else "",
            seconds=seconds,
            wait_s=wait_s,
            read_s=done.read_s if done else 0.0,
            lag_s=done.ended_at - item.ticket.written_at if done else 0.0,
            cached_tokens=item.request.cached_tokens,
        )
        return [(item.key, arrived)]

    def _let_go(self, item: KVImport) -> None:
        """Nobody waits for the item any more, which is in `_imports` no longer."""
        self._waiting.pop(item.key, None)
        if item.pull_id is not None:
            self._detach(item)
        if item.ticket is not None:
            self._receiver.reject(item.ticket)

    def _detach(self, item: KVImport) -> None:
        """End the item's pull; what it holds is given back when the link has answered."""
        assert item.pull_id is not None
        self._pulls[item.pull_id] = replace(self._pulls[item.pull_id], item=None)
        self._receiver.cancel(item.pull_id)
        item.pull_id, item.began, item.is_hint = None, None, False

    def _give_up(self, item: KVImport, reason: str, detail: str) -> Events:
        """ComputeHere a waiting import's prompt here."""
        del self._waiting[item.key], self._imports[item.key]
        assert item.ticket is not None
        self._receiver.reject(item.ticket)
        return self._recompute(item.request, item.starts, reason, detail, item.spent())

    def _recompute(
        self,
        request: Request,
        starts: tuple[Start, ...],
        reason: str,
        detail: str = "",
        spent: tuple[float, float] = (0.0, 0.0),
    ) -> Events:
        """spent: as `KVImport.spent`."""
        self._compute_here(request, starts)
        arrived = Arrived(
            request_id=request.key.request_id,
            attempt=request.key.attempt,
            source="recompute",
            seconds=spent[0],
            wait_s=spent[1],
            reason=reason,
            detail=detail,
        )
        return [(request.key, arrived)]

    def _belongs(self, ticket: Ticket, request: Request) -> bool:
        """Whether the ticket's rows are those of this prompt, and the ticket is well-formed."""
        num_blocks = -(-request.num_prompt_tokens // max(ticket.block_size, 1))
        return (
            ticket.content == self._engine.content(request)
            and ticket.num_tokens == request.num_prompt_tokens
            and len(ticket.block_ids) == len(ticket.generations) == num_blocks
        )

    def _renew_leases(self) -> None:
        """Three times a lease: of those that still wait or pull."""
        tickets = [item.ticket for item in self._imports.values() if item.ticket is not None]
        if not tickets:
            return
        now = time.monotonic()
        if now - self._renewed > min(ticket.lease_s for ticket in tickets) / 3:
            self._renewed = now
            self._receiver.renew(tickets)


def _source_of(ticket: Ticket) -> Source:
    return Source(ticket.engine_id, ticket.incarnation, ticket.key)
