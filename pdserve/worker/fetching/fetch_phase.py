"""Fetches prefixes that other workers have cached before a prompt is computed here, and lends this
worker's own.

Knows the engine, a KVReceiver, and the pulls that it shares with the decode phase; no sockets and
no routers. Driven by worker.loop on its one thread, after the decode phase, which reads the
receiver's events.

    compute --a hint, and worth it--> ASKED: the holder is asked what it has; nothing is reserved
    ASKED   --a ticket, blocks free--> PULLING: in pieces, each verified
    PULLING --all pieces good, or any failure--> the verified pieces are cached
    ASKED   --nothing there, no answer in time, no blocks--> nothing is cached
    in every case: the engine computes what is missing

The ticket pins nothing: the holder may reuse its blocks at any time, and the generations show that,
as in a hand-off. A request waits for its prefix until the deadline and no longer. A later request
for the same prefix waits with it, even without a hint, because its router counts the prefixes that
it has sent here as held here. When somebody else lacks blocks, fetches give way, the newest first.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry

from pdserve.decode.pulls import Pulls
from pdserve.engine.engine import Engine
from pdserve.engine.scheduling.sequence import ComputeHere, Request
from pdserve.kvtransfer.connector import (
    KVReceiver,
    KVSender,
    Lent,
    PullDone,
    PullFailed,
    PullSettled,
)
from pdserve.protocol.block_digests import BlockHasher
from pdserve.protocol.commands import Start
from pdserve.protocol.events import Arrived, Event
from pdserve.protocol.handoff import KVCacheMeta, Ticket
from pdserve.protocol.prompt_work import prompt_work
from pdserve.protocol.request_key import RequestKey
from pdserve.worker.fetching.fetch import Fetch, FetchMetrics, Waiter, patience_s

ASSUMED_BYTES_PER_S = 1e9  # for a link without a self-test
OVERHEAD_S = 0.003  # for question, answer, reservation and generations
# A shorter prediction says little: the engine's thread may be in a step when the answer comes.
LEAST_PATIENCE_S = 0.05

Events = list[tuple[RequestKey, Event]]


class Links(Protocol):
    """See `worker.peers.PeerStatuses`."""

    def link(self, engine_id: str, incarnation: int) -> tuple[KVCacheMeta, float] | None: ...

    def used(self, engine_id: str) -> None: ...

    def close_idle(self, busy: set[str]) -> None: ...


class FetchPhase:
    """Fetches and lends prefixes. `pulls` are the decode phase's, and `deadline_s` is the longest
    time of a fetch. `speed` returns the prompts' work computed here per second, 0 while unknown.
    `compute_here` gives a request to the engine, maybe after asking the KV pool: no request waits
    for both. Any fetch may take `least_patience_s`, which tests change."""

    def __init__(
        self,
        engine: Engine,
        sender: KVSender,
        receiver: KVReceiver,
        pulls: Pulls,
        links: Links,
        deadline_s: float,
        speed: Callable[[], float],
        compute_here: ComputeHere,
        registry: CollectorRegistry,
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._pulls = pulls
        self._links = links
        self._deadline_s = deadline_s
        self._speed = speed
        self._compute_here = compute_here
        self._metrics = FetchMetrics(registry)
        self.least_patience_s = LEAST_PATIENCE_S
        self._fetches: dict[int, Fetch] = {}
        self._by_name: dict[bytes, Fetch] = {}
        # Digests that were lent, with their home. The mailbox's thread appends to it.
        self._lent: deque[tuple[int, Sequence[bytes]]] = deque(maxlen=1024)
        engine.homes.keep_written()
        sender.lend(self._find_written)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a prefix."""
        return sum(len(fetch.waiters) for fetch in self._fetches.values())

    def queued_work(self, pair_tokens: float) -> float:
        """Work (protocol.prompt_work) that is left to compute here after the prefixes have come."""
        fetches = self._fetches.values()
        waits = [(w.request.num_prompt_tokens, f.num_tokens) for f in fetches for w in f.waiters]
        return sum(prompt_work(total - known, known, pair_tokens) for total, known in waits)

    @property
    def due(self) -> float:
        """Monotonic time at which `poll` has something to do even if no event comes."""
        return min(
            (fetch.deadline for fetch in self._fetches.values() if not fetch.is_pulling),
            default=float("inf"),
        )

    def compute(self, request: Request, starts: tuple[Start, ...]) -> None:
        """Gives the request to the engine, after fetching the prefix that its hint names."""
        fetch = self._worth_it(request)
        waiter = Waiter(request, starts)
        same = self._by_name.get(fetch.name) if fetch is not None else self._under_way(request)
        if same is not None:
            same.waiters.append(waiter)
            return
        if fetch is None:
            self._compute_here(request, starts)
            return
        fetch.pull_id = self._pulls.begin_fetch()
        fetch.waiters.append(waiter)
        self._fetches[fetch.pull_id] = self._by_name[fetch.name] = fetch
        holder = fetch.holder
        self._links.used(holder.engine_id)
        self._receiver.ask(fetch.pull_id, holder.engine_id, holder.incarnation, fetch.digests)

    def poll(self, blocks_are_wanted: bool) -> Events:
        """Advances all fetches. `blocks_are_wanted` means that a submitted import lacks blocks."""
        events: Events = []
        fetched, self._pulls.fetched = self._pulls.fetched, []
        for event in fetched:
            fetch = self._fetches.get(event.pull_id)
            if isinstance(event, PullSettled):
                self._pulls.settle(event.pull_id)
            elif fetch is None:
                self._pulls.end_fetch(event.pull_id)
                if not isinstance(event, Lent):  # nobody waits for this fetch any more
                    self._give_back(event)
            elif isinstance(event, Lent):
                self._answered(fetch, event.ticket)
            else:
                events += self._pulled(fetch, event)
        now = time.monotonic()
        for fetch in list(self._fetches.values()):
            if not fetch.is_pulling and now >= fetch.deadline:
                self._receiver.cancel(fetch.pull_id)
                self._end(fetch, "deadline")
        self._give_way(blocks_are_wanted)
        self._touch_lent()
        busy = {fetch.holder.engine_id for fetch in self._fetches.values()}
        busy |= {pull.engine_id for pull in self._pulls.under_way.values()}
        self._links.close_idle(busy)
        return events

    def cancel(self, key: RequestKey, choices: tuple[int, ...] | None) -> bool:
        """Stops a request that waits for a prefix, or leaves out some of its choices; True if it
        was here. A fetch that nobody waits for is ended."""
        for fetch in self._fetches.values():
            for waiter in fetch.waiters:
                if waiter.request.key == key:
                    waiter.starts = (
                        ()
                        if choices is None
                        else tuple(s for s in waiter.starts if s.choice not in choices)
                    )
                    if not waiter.starts:
                        fetch.waiters.remove(waiter)
                        self._leave(fetch)
                    return True
        return False

    def keys(self) -> set[RequestKey]:
        """Returns the requests that wait for a prefix."""
        return {waiter.request.key for fetch in self._fetches.values() for waiter in fetch.waiters}

    # --- what to fetch ---

    def _worth_it(self, request: Request) -> Fetch | None:
        """Returns the fetch to begin; None if the request should be computed at once. The last
        token is always computed, because its logits are needed."""
        hint = request.prefix
        engine = self._engine
        if hint is None or request.wants_prompt_logprobs or request.parts:
            return None
        link = self._links.link(hint.engine_id, hint.incarnation)
        if link is None or self._pulls.is_shunned(hint.engine_id):
            return None
        if not engine.config.enable_prefix_caching:
            return None
        holder, rate = link
        size = engine.config.block_size
        step = max(size, holder.block_size)
        num_tokens = min(hint.num_tokens, request.num_prompt_tokens - 1) // step * step
        hashes = request.prompt_hashes(engine.hasher)[: num_tokens // size]
        num_cached = self._num_cached(hashes)
        missing = num_tokens - num_cached * size
        if missing <= 0:
            return None
        num_bytes = missing * holder.token_bytes
        fetch = Fetch(
            pull_id=-1,
            name=hashes[-1],
            holder=holder,
            num_tokens=num_tokens,
            digests=self._digests(request, num_tokens, holder.block_size, hashes),
            num_bytes=num_bytes,
            deadline=0.0,
            waiters=[],
        )
        fetch.deadline = fetch.began + self._patience(fetch, missing, rate or ASSUMED_BYTES_PER_S)
        return fetch

    def _under_way(self, request: Request) -> Fetch | None:
        """Returns the fetch of the longest prefix of this prompt that others wait for. Returns None
        if there is none, or if the caches here hold the prefix by now."""
        if not self._by_name or request.wants_prompt_logprobs or request.parts:
            return None
        size = self._engine.config.block_size
        hashes = request.prompt_hashes(self._engine.hasher)
        findable = hashes[: (request.num_prompt_tokens - 1) // size]
        found = [name for name in findable if name in self._by_name]
        if not found:
            return None
        fetch = self._by_name[found[-1]]
        num_blocks = fetch.num_tokens // size
        return None if self._num_cached(hashes[:num_blocks]) == num_blocks else fetch

    def _num_cached(self, hashes: list[bytes]) -> int:
        """Number of leading blocks that are cached here, in the home that has most of them."""
        return max(len(home.blocks.match(hashes)) for home in self._engine.homes)

    def _digests(
        self, request: Request, num_tokens: int, block_size: int, ours: list[bytes]
    ) -> list[bytes]:
        if block_size == self._engine.config.block_size:
            return ours
        theirs: list[bytes] = []
        hasher = BlockHasher(self._engine.rows_digest, block_size)
        hasher.extend(theirs, request.prompt_token_ids[:num_tokens], request.tenant)
        return theirs

    def _patience(self, fetch: Fetch, missing: int, rate: float) -> float:
        """Returns how many seconds a fetch may take, see `fetch.patience_s`."""
        others = [other for other in self._fetches.values() if other.holder is fetch.holder]
        num_bytes = fetch.num_bytes + sum(other.num_bytes for other in others)
        predicted = num_bytes / rate + OVERHEAD_S
        speed = self._speed()
        computing = missing / speed if speed > 0 else None
        return min(patience_s(predicted, computing, self.least_patience_s), self._deadline_s)

    # --- how it goes on ---

    def _answered(self, fetch: Fetch, ticket: Ticket) -> None:
        """Reserves blocks for what the holder has, and pulls it."""
        size = self._engine.config.block_size
        found = len(ticket.block_ids)
        theirs = fetch.holder.block_size
        if (
            fetch.is_pulling
            or not found
            or found > len(fetch.digests)
            or (ticket.block_size, ticket.num_tokens) != (theirs, found * theirs)
            or ticket.content != fetch.digests[found - 1]
        ):
            self._end(fetch, "miss")
            return
        num_tokens = found * theirs // max(size, theirs) * max(size, theirs)
        waiter = fetch.waiters[0]
        if not num_tokens:
            self._end(fetch, "miss")
            return
        reservation = self._pulls.reserve_prefix(waiter.request, waiter.starts, num_tokens // size)
        if reservation is None:
            self._end(fetch, "no-blocks")
            return
        if not reservation.destination:
            self._engine.cancel_reservation(reservation, settled=True)
            self._end(fetch, "miss")
            return
        holder = fetch.holder
        fetch.is_pulling = True
        fetch.num_cached = reservation.num_cached
        fetch.home = reservation.home
        self._pulls.fill_prefix(fetch.pull_id, reservation, holder.engine_id)
        blocks = num_tokens // theirs
        ticket = msgspec.structs.replace(
            ticket,
            block_ids=ticket.block_ids[:blocks],
            generations=ticket.generations[:blocks],
            num_tokens=num_tokens,
        )
        self._receiver.pull(
            fetch.pull_id,
            ticket,
            reservation.destination,
            reservation.num_cached,
            max(0.0, fetch.deadline - time.monotonic()),
            reservation.home,
        )

    def _pulled(self, fetch: Fetch, event: PullDone | PullFailed) -> Events:
        """Caches what was verified; the engine finds it like rows that were computed here."""
        num_filled = self._give_back(event)
        outcome = event.reason if isinstance(event, PullFailed) else "done"
        waiters = list(fetch.waiters)
        size = self._engine.config.block_size
        num_tokens = num_filled * size
        num_bytes = num_tokens * fetch.holder.token_bytes
        self._end(fetch, "gave-way" if fetch.gave_way else outcome, num_tokens, num_bytes)
        if not num_filled:
            return []
        seconds = time.monotonic() - fetch.began
        return [
            (
                waiter.request.key,
                Arrived(
                    request_id=waiter.request.key.request_id,
                    attempt=waiter.request.key.attempt,
                    source="prefix",
                    num_bytes=int(num_bytes),
                    seconds=seconds,
                    cached_tokens=fetch.num_cached * size + num_tokens,
                ),
            )
            for waiter in waiters[:1]
        ]

    def _give_back(self, event: PullDone | PullFailed) -> int:
        """Gives the reservation back with its verified blocks cached. Returns their number."""
        pull = self._pulls.under_way[event.pull_id]
        if isinstance(event, PullFailed):
            self._pulls.fail(event)
            return event.num_verified
        self._pulls.finish(event.pull_id)
        return len(pull.reservation.destination)

    def _end(self, fetch: Fetch, outcome: str, num_tokens: int = 0, num_bytes: float = 0.0) -> None:
        """Lets the engine compute what is missing, for all that wait; the KV pool is not asked."""
        self._forget(fetch, outcome, num_tokens, num_bytes)
        self._pulls.end_fetch(fetch.pull_id)
        for waiter in fetch.waiters:
            self._engine.add(waiter.request, waiter.starts)

    def _forget(
        self, fetch: Fetch, outcome: str, num_tokens: int = 0, num_bytes: float = 0.0
    ) -> None:
        del self._fetches[fetch.pull_id], self._by_name[fetch.name]
        seconds = time.monotonic() - fetch.began
        self._metrics.ended(outcome, num_tokens, num_bytes, seconds)

    def _leave(self, fetch: Fetch) -> None:
        """Ends a fetch that nobody waits for. Its blocks are given back when the link has
        answered."""
        if fetch.waiters:
            return
        self._forget(fetch, "left")
        self._receiver.cancel(fetch.pull_id)
        if not fetch.is_pulling:
            self._pulls.end_fetch(fetch.pull_id)

    def _give_way(self, blocks_are_wanted: bool) -> None:
        """Ends the newest pull in a home where somebody else lacks blocks, one at a time."""
        pulling = [fetch for fetch in self._fetches.values() if fetch.is_pulling]
        if not pulling or any(fetch.gave_way for fetch in pulling):
            return
        short = {
            home.number
            for home in self._engine.homes
            if blocks_are_wanted or home.wants_blocks or home.num_spare_blocks < 0
        }
        newest = [fetch for fetch in pulling if fetch.home in short][-1:]
        for fetch in newest:
            fetch.gave_way = True
            self._receiver.cancel(fetch.pull_id)

    # --- what is lent ---

    def _find_written(self, digests: Sequence[bytes]) -> tuple[int, list[tuple[int, int]]]:
        """Finds blocks to lend. It runs on the mailbox's thread."""
        home, found = self._engine.homes.find_written(digests)
        if found:
            self._lent.append((home, digests[: len(found)]))
        return home, found

    def _touch_lent(self) -> None:
        """Marks lent blocks as just used, so that the reader still finds them."""
        while self._lent:
            home, digests = self._lent.popleft()
            self._engine.homes[home].blocks.match(digests, touch=True)
