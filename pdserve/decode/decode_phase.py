"""Runs a worker's decode phase: reserve blocks, pull P's rows into them and join the running batch,
or recompute.

Knows the engine and a KVReceiver; no prefill phase, no sockets and no routers. Driven by
worker.loop on its one thread.

    Prepare --> WAITING --blocks reserved--> FOLLOWING P's parts
                FOLLOWING --lost, or blocks wanted by others--> IDLE (holds none)

    A Submit brings the ticket, alone or in any of the three states after a Prepare:

    Submit  --> WAITING --blocks reserved--> PULLING
                PULLING --all bytes and generations good--> joined (source "p2p")
                PULLING --any failure--> the engine computes the prompt (source "recompute")
                WAITING --everything cached here--> joined (source "cache")
                WAITING --no blocks before the deadline, or a ticket for other content--> recompute

A Prepare is only a hint. Its blocks are the first to be given up: running sequences and submitted
imports come before it. The verified part of a failed pull stays as cached blocks. After an
unsettled failure, the other destination blocks wait in quarantine for PullSettled; the request does
not wait for them.
"""

import time
from collections import OrderedDict
from collections.abc import Collection

from pdserve.decode.kv_import import KVImport, arrived_by_recompute, source_of
from pdserve.decode.pulls import Pulls
from pdserve.engine.engine import Engine
from pdserve.engine.grammars.grammar import Grammar
from pdserve.engine.reservations import Reservation
from pdserve.engine.scheduling.sequence import ComputeHere, Request
from pdserve.kvtransfer.connector import KVReceiver, PullDone, PullFailed, PullSettled
from pdserve.protocol.commands import Prepare, Start, Submit
from pdserve.protocol.events import Event, PeerStatus
from pdserve.protocol.handoff import Ticket
from pdserve.protocol.request_key import RequestKey

# A Prepare may come after its request is over, and then nobody else would end it.
PREPARED_S = 60.0

Events = list[tuple[RequestKey, Event]]


class DecodePhase:
    """Moves the imports of one worker on.

    - `max_reserved_blocks`, `max_quarantined_blocks`: see `Pulls`.
    - `deadline_s`: deadline of each pull, and of waiting for blocks.
    - `compute_here`: gives the engine a request whose rows could not be pulled.
    - `pulls`: the blocks of pulls. Tests read it too, and so they do deadline_s and imports.
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
        self.pulls = Pulls(engine, max_reserved_blocks, max_quarantined_blocks)
        self.deadline_s = deadline_s
        self._imports: OrderedDict[RequestKey, KVImport] = OrderedDict()
        self._waiting: OrderedDict[RequestKey, KVImport] = OrderedDict()
        self._renewed = 0.0

    @property
    def waits_for_blocks(self) -> bool:
        return any(item.ticket is not None for item in self._waiting.values())

    @property
    def imports(self) -> dict[RequestKey, KVImport]:
        """All imports that are under way."""
        return dict(self._imports)

    @property
    def owned(self) -> list[tuple[int, list[int]]]:
        """The home and the blocks of everything that is under way."""
        return self.pulls.owned

    def prepare(self, prepare: Prepare) -> None:
        """Begins an import before its prompt is computed.

        If the request can never run here, its Submit will report that.
        """
        try:
            request = self._engine.make_request(prepare.submit)
        except ValueError:
            return
        if request.key not in self._imports:
            item = KVImport(request, prepare.submit.starts, prepare.source, time.monotonic())
            self._imports[item.key] = self._waiting[item.key] = item

    def submit(self, submit: Submit, grammar: Grammar | None = None) -> Events:
        """Begins an import, or goes on with the prepared one. Returns events to send.

        Raises ValueError if the request can never run here. For `grammar` see
        `Engine.make_request`.
        """
        prepared = self._imports.pop(submit.key, None)
        try:
            request = self._engine.make_request(submit, grammar)
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
        item = prepared or KVImport(request, submit.starts, source_of(ticket), 0.0)
        item.request = request
        item.starts = submit.starts
        item.ticket = ticket
        item.started = time.monotonic()
        self._imports[item.key] = item
        if item.pull_id is not None and item.source == source_of(ticket):
            if not item.is_revoked:
                self._receiver.complete(item.pull_id, ticket, self.deadline_s)
            return []
        if item.pull_id is not None:  # it was prepared for another source
            self._detach(item)
        item.source = source_of(ticket)
        # It moves from its place as a prepared import to the end of those with a ticket.
        self._waiting.pop(item.key, None)
        self._waiting[item.key] = item
        return []

    def poll(self) -> tuple[Events, list[PeerStatus]]:
        """Advances all imports. Returns (events of requests, news of peers)."""
        events: Events = []
        peers: list[PeerStatus] = []
        for event in self._receiver.poll():
            if isinstance(event, PeerStatus):
                peers.append(event)
            elif self.pulls.keep_for_fetch(event):
                continue
            elif isinstance(event, PullSettled):
                self.pulls.settle(event.pull_id)
            elif isinstance(event, PullDone):
                events += self._done(event)
            elif isinstance(event, PullFailed):
                events += self._failed(event)
        events += self._start_submitted()
        self._end_forgotten()
        self._start_prepared()
        self._yield_to_others()
        self._renew_leases()
        return events, peers

    def cancel(self, key: RequestKey, choices: tuple[int, ...] | None) -> None:
        """Stops an import, or leaves out some of its choices. Calling it twice is allowed.

        The engine aborts what has already joined.
        """
        item = self._imports.get(key)
        if item is None:
            return
        item.starts = (
            () if choices is None else tuple(s for s in item.starts if s.choice not in choices)
        )
        if not item.starts:
            del self._imports[key]
            self._let_go(item)

    def cancel_prepared(self, router_id: str, session: int) -> None:
        """Stops the imports of a lost router that were not submitted."""
        for key, item in list(self._imports.items()):
            if item.ticket is None and (key.router_id, key.session) == (router_id, session):
                self.cancel(key, None)

    def keys(self) -> set[RequestKey]:
        """Returns the requests that wait for their rows."""
        return {key for key, item in self._imports.items() if item.ticket is not None}

    # --- blocks ---

    def _start_submitted(self) -> Events:
        """Reserves blocks by priority and arrival, and starts the pulls.

        A request that has waited beyond the deadline computes its prompt instead.
        """
        events: Events = []
        lacks_blocks = False
        now = time.monotonic()
        submitted = [item for item in self._waiting.values() if item.ticket is not None]
        for item in sorted(submitted, key=lambda item: item.request.priority):
            if self.pulls.is_shunned(item.source.engine_id):
                events += self._give_up(
                    item, "quarantine-full", f"reads from {item.source.engine_id} do not end"
                )
                continue
            reservation = None if lacks_blocks else self.pulls.reserve(item)
            if reservation is not None:
                events += self._start(item, reservation)
            elif now - item.started > self.deadline_s:
                detail = (
                    f"{self.pulls.num_blocks(item)} blocks did not become free within "
                    f"{self.deadline_s:g} s"
                )
                events += self._give_up(item, "no-blocks", detail)
            else:
                # No request overtakes this one because it is smaller. The others are only checked
                # for their deadlines.
                lacks_blocks = True
        if lacks_blocks:
            self._revoke_one(range(len(self._engine.homes)))
        return events

    def _start_prepared(self) -> None:
        """Starts pulls for prepared imports, with blocks that nobody else waits for."""
        if self.waits_for_blocks or self._engine.scheduler.waiting:
            return
        for item in list(self._waiting.values()):
            if self.pulls.is_shunned(item.source.engine_id):
                continue
            reservation = self.pulls.reserve_early(item)
            if reservation is None:
                return
            if not reservation.destination:  # all is cached, so only its Submit is left
                self._engine.cancel_reservation(reservation, settled=True)
                del self._waiting[item.key]
                continue
            content = item.request.content_digest(self._engine.hasher)
            del self._waiting[item.key]
            pull_id = self.pulls.begin(item, reservation)
            item.is_hint = True
            self._receiver.follow(
                pull_id,
                item.source,
                content,
                reservation.destination,
                reservation.num_cached,
                self.deadline_s,
                reservation.home,
            )

    def _end_forgotten(self) -> None:
        limit = time.monotonic() - PREPARED_S
        for key, item in list(self._imports.items()):
            if item.ticket is None and item.started < limit:
                self.cancel(key, None)

    def _yield_to_others(self) -> None:
        """Gives up prepared pulls for sequences that run, or would run if there were blocks."""
        for home in self._engine.homes:
            if home.wants_blocks or home.num_spare_blocks < 0:
                self._revoke_one({home.number})

    def _revoke_one(self, homes: Collection[int]) -> None:
        """Ends the newest pull in these homes that was only prepared, one at a time.

        Its blocks are free when the link has answered.
        """
        prepared = [
            item
            for item in self._imports.values()
            if item.ticket is None and self.pulls.home_of(item) in homes
        ]
        if prepared and not any(item.is_revoked for item in prepared):
            item = prepared[-1]
            item.is_revoked = True
            assert item.pull_id is not None
            self._receiver.cancel(item.pull_id)

    # --- pulls ---

    def _start(self, item: KVImport, reservation: Reservation) -> Events:
        assert item.ticket is not None
        del self._waiting[item.key]
        pull_id = self.pulls.begin(item, reservation)
        blocks = reservation.destination
        self._receiver.pull(
            pull_id,
            item.ticket,
            blocks,
            reservation.num_cached,
            self.deadline_s,
            reservation.home,
        )
        if blocks:
            return []
        self.pulls.forget(pull_id)  # the pull only tells P that D needs nothing
        return self._join(item, reservation, "cache")

    def _done(self, event: PullDone) -> Events:
        waiting = self.pulls.finish(event.pull_id)
        return self._join(*waiting, "p2p", event) if waiting is not None else []

    def _failed(self, event: PullFailed) -> Events:
        item = self.pulls.fail(event)
        if item is None:
            return []
        ended_as_hint = item.is_hint and not event.was_complete
        item.pull_id = None
        item.is_hint = False
        if item.ticket is not None and not ended_as_hint:
            del self._imports[item.key]
            return self._recompute(
                item.request, item.starts, event.reason, event.detail, item.spent()
            )
        item.began = None
        if item.ticket is not None:  # its Submit came meanwhile, so it pulls the sequential way
            self._waiting[item.key] = item
        return []

    def _join(
        self, item: KVImport, reservation: Reservation, source: str, done: PullDone | None = None
    ) -> Events:
        del self._imports[item.key]
        reservation.request = item.request
        reservation.starts = item.starts
        self._engine.join(reservation)
        return [(item.key, item.arrived(source, done))]

    def _let_go(self, item: KVImport) -> None:
        """Drops an item that nobody waits for any more, and that is no longer in `_imports`."""
        self._waiting.pop(item.key, None)
        if item.pull_id is not None:
            self._detach(item)
        if item.ticket is not None:
            self._receiver.reject(item.ticket)

    def _detach(self, item: KVImport) -> None:
        """Ends the item's pull; its blocks are given back when the link has answered."""
        self._receiver.cancel(self.pulls.detach(item))

    def _give_up(self, item: KVImport, reason: str, detail: str) -> Events:
        """Computes a waiting import's prompt here."""
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
        """Computes the prompt here. `spent` is as in `KVImport.spent`."""
        self._compute_here(request, starts)
        return [(request.key, arrived_by_recompute(request.key, reason, detail, spent))]

    def _belongs(self, ticket: Ticket, request: Request) -> bool:
        """True if the ticket is well-formed and its rows are those of this prompt."""
        num_blocks = -(-request.num_prompt_tokens // max(ticket.block_size, 1))
        return (
            ticket.content == request.content_digest(self._engine.hasher)
            and ticket.num_tokens == request.num_prompt_tokens
            and len(ticket.block_ids) == len(ticket.generations) == num_blocks
        )

    def _renew_leases(self) -> None:
        """Renews the leases of imports that wait or pull, three times per lease."""
        tickets = [item.ticket for item in self._imports.values() if item.ticket is not None]
        if not tickets:
            return
        now = time.monotonic()
        if now - self._renewed > min(ticket.lease_s for ticket in tickets) / 3:
            self._renewed = now
            self._receiver.renew(tickets)
