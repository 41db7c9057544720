"""KVSender over a TransferAgent: tickets, parts of prompts, leases, and peers' reports about them.

A ticket is frozen when it is made, with the generations of that moment. A peer that asks late gets
that ticket. A new one could have the generations of the blocks' next owner. Letters are handled on
the mailbox's thread; one more thread waits for leases. Made by `build.py`, driven by the engine
loop.

    prompt:  followed or not -> parts, each replaces the previous one
             -> published -> done | rejected | expired (Unpinned each)
             |  revoked at any time (silent)
"""

import heapq
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pdserve.background.threads import KeptThread
from pdserve.kvtransfer.connector import FindWritten, Outcome, Unpinned, Wake
from pdserve.kvtransfer.p2p.letters import (
    Done,
    Follow,
    Lend,
    Part,
    Party,
    Rejected,
    Renew,
    Want,
)
from pdserve.kvtransfer.p2p.mailbox import Mailbox
from pdserve.kvtransfer.p2p.metrics import TransferMetrics
from pdserve.kvtransfer.transport.agent import TransferAgent
from pdserve.protocol.handoff import KVCacheMeta, RankMemory, Ticket
from pdserve.protocol.request_key import RequestKey

EARLY_S = 60.0  # a follower may ask while P is in a long step and has not read the Submit yet
MAX_EARLY = 1024


@dataclass
class _Prompt:
    """A prompt that is published or followed. ticket: of the newest part, or the complete one; only
    that has a deadline."""

    ticket: Ticket | None = None
    deadline: float | None = None
    followers: dict[Party, None] = field(default_factory=dict)


class Sender:
    """Implements `connector.KVSender`. generations: the engine's tables, int64 `[homes,
    num_blocks]`, read when a ticket is made. agent, mailbox, lease_s: public for tests, too."""

    def __init__(
        self,
        agent: TransferAgent,
        mailbox: Mailbox,
        meta: KVCacheMeta,
        generations: np.ndarray,
        lease_s: float,
        wake: Wake,
        metrics: TransferMetrics,
    ) -> None:
        self.agent = agent
        self.mailbox = mailbox
        self._meta = meta
        self._generations = generations
        self.lease_s = lease_s
        self._wake = wake
        self._metrics = metrics
        self._changed = threading.Condition()
        self._prompts: dict[RequestKey, _Prompt] = {}
        self._early: OrderedDict[RequestKey, tuple[float, dict[Party, None]]] = OrderedDict()
        self._heap: list[tuple[float, int, RequestKey]] = []
        self._counter = itertools.count()
        self._unpinned: list[Unpinned] = []
        self._closed = False
        agent.attach()
        mailbox.attach()
        mailbox.on(Follow, self._follow)
        mailbox.on(Done, lambda _, notice: self._finish(notice.key, "done"))
        mailbox.on(Rejected, lambda _, notice: self._finish(notice.key, "rejected"))
        mailbox.on(Renew, lambda _, notice: self._renew(notice.keys))
        self._thread = KeptThread("kv leases", self._watch_leases)

    @property
    def newest(self) -> dict[RequestKey, Ticket | None]:
        """The newest ticket of each known prompt; for tests."""
        with self._changed:
            return {key: prompt.ticket for key, prompt in self._prompts.items()}

    def meta(self) -> KVCacheMeta:
        assert self._meta.num_homes == len(self._generations), "a home lacks its ranks"
        return self._meta

    def add_ranks(self, ranks: Sequence[RankMemory]) -> None:
        """Add the KV caches of an engine's other ranks, in order; their blocks are published with
        ours. Call it before anybody connects."""
        self._meta = msgspec.structs.replace(self._meta, ranks=(*self._meta.ranks, *ranks))

    def publish(
        self,
        key: RequestKey,
        block_ids: Sequence[int],
        num_tokens: int,
        content: bytes,
        written_at: float | None = None,
        home: int = 0,
    ) -> Ticket:
        """See `KVSender.publish`. ValueError if the key already has a ticket or a block does not
        exist."""
        ticket = self._ticket(key, block_ids, num_tokens, content, written_at, home)
        deadline = time.monotonic() + self.lease_s
        with self._changed:
            prompt = self._prompt(key)
            if prompt.deadline is not None:
                raise ValueError(
                    f"{key} already has a ticket: revoke it first or publish under another attempt"
                )
            prompt.ticket = ticket
            self._lease(key, prompt, deadline)
            followers = list(prompt.followers)
        self._tell(followers, ticket)
        self._metrics.tickets.labels("published").inc()
        return ticket

    def publish_part(
        self,
        key: RequestKey,
        block_ids: Sequence[int],
        content: bytes,
        written_at: float | None = None,
        home: int = 0,
    ) -> None:
        """See `KVSender.publish_part`."""
        ticket = self._ticket(key, block_ids, 0, content, written_at, home)
        with self._changed:
            prompt = self._prompt(key)
            if prompt.deadline is not None or _name_the_same(ticket, prompt.ticket):
                return
            prompt.ticket = ticket
            followers = list(prompt.followers)
        self._tell(followers, ticket)
        self._metrics.parts.inc()

    def revoke(self, key: RequestKey) -> None:
        with self._changed:
            prompt = self._prompts.pop(key, None)
            self._early.pop(key, None)
            self._unpinned = [event for event in self._unpinned if event.key != key]
        if prompt is not None and prompt.deadline is not None:
            self._metrics.tickets.labels("revoked").inc()

    def lend(self, find: FindWritten) -> None:
        def answer(asker: Party, want: Want) -> None:
            """Lend the found blocks. Runs on the mailbox's thread. The generations are those that
            `find` returns, because ones read now might be those of the blocks' next owners."""
            home, found = find(want.digests)
            ticket = Ticket(
                engine_id=self._meta.engine_id,
                incarnation=self._meta.incarnation,
                key=RequestKey(asker.engine_id, asker.incarnation, "", want.number),
                content=want.digests[len(found) - 1] if found else b"",
                block_size=self._meta.block_size,
                block_ids=tuple(block for block, _ in found),
                generations=tuple(generation for _, generation in found),
                num_tokens=len(found) * self._meta.block_size,
                lease_s=0.0,
                written_at=0.0,
                home=home,
            )
            self.mailbox.send(asker, Lend(want.number, ticket))

        self.mailbox.on(Want, answer)

    def poll(self) -> list[Unpinned]:
        with self._changed:
            events = self._unpinned
            self._unpinned = []
        return events

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
        self._thread.finish()
        self.mailbox.detach()
        self.agent.detach()

    def _ticket(
        self,
        key: RequestKey,
        block_ids: Sequence[int],
        num_tokens: int,
        content: bytes,
        written_at: float | None,
        home: int,
    ) -> Ticket:
        blocks = tuple(int(block) for block in block_ids)
        if any(not 0 <= block < self._meta.num_blocks for block in blocks):
            raise ValueError(f"block_ids must lie in [0, {self._meta.num_blocks}), not {blocks}")
        if not 0 <= home < len(self._generations):
            raise ValueError(f"home must lie in [0, {len(self._generations)}), not {home}")
        return Ticket(
            engine_id=self._meta.engine_id,
            incarnation=self._meta.incarnation,
            key=key,
            content=content,
            block_size=self._meta.block_size,
            block_ids=blocks,
            generations=tuple(self._generations[home, list(blocks)].tolist()),
            num_tokens=num_tokens,
            lease_s=self.lease_s,
            written_at=time.time() if written_at is None else written_at,
            home=home,
        )

    def _prompt(self, key: RequestKey) -> _Prompt:
        """Find or make a prompt, with the followers that asked earlier. Call it under the lock."""
        prompt = self._prompts.get(key)
        if prompt is None:
            _, followers = self._early.pop(key, (0.0, {}))
            prompt = self._prompts[key] = _Prompt(followers=followers)
        return prompt

    def _tell(self, followers: Sequence[Party], ticket: Ticket) -> None:
        for follower in followers:
            self.mailbox.send(follower, Part(ticket))

    def _follow(self, follower: Party, notice: Follow) -> None:
        with self._changed:
            prompt = self._prompts.get(notice.key)
            if prompt is not None:
                prompt.followers[follower] = None
                ticket = prompt.ticket
            else:
                ticket = None
                self._follow_early(follower, notice.key)
        if ticket is not None:
            self.mailbox.send(follower, Part(ticket))

    def _follow_early(self, follower: Party, key: RequestKey) -> None:
        now = time.monotonic()
        _, followers = self._early.pop(key, (now, {}))
        self._early[key] = now, {**followers, follower: None}
        while len(self._early) > MAX_EARLY or next(iter(self._early.values()))[0] < now - EARLY_S:
            self._early.popitem(last=False)

    def _renew(self, keys: Sequence[RequestKey]) -> None:
        deadline = time.monotonic() + self.lease_s
        with self._changed:
            for key in keys:
                prompt = self._prompts.get(key)
                if prompt is not None and prompt.deadline is not None:
                    self._lease(key, prompt, deadline)

    def _lease(self, key: RequestKey, prompt: _Prompt, deadline: float) -> None:
        prompt.deadline = deadline
        heapq.heappush(self._heap, (deadline, next(self._counter), key))
        self._changed.notify()

    def _watch_leases(self) -> None:
        """End the tickets whose lease is over. The heap keeps old entries of tickets that were
        renewed or have ended, until their time comes; they match no deadline then."""
        while True:
            with self._changed:
                now = time.monotonic()
                count = 0
                while self._heap and self._heap[0][0] <= now:
                    deadline, _, key = self._heap[0]
                    prompt = self._prompts.get(key)
                    if prompt is not None and prompt.deadline == deadline:
                        count += self._end(key, "expired")
                    heapq.heappop(self._heap)  # after the end, so that a failed one is retried
                if self._closed:
                    return
                if not count:
                    self._changed.wait(self._heap[0][0] - now if self._heap else None)
            if count:
                self._wake()

    def _finish(self, key: RequestKey, outcome: Outcome) -> None:
        with self._changed:
            ended = self._end(key, outcome)
        if ended:
            self._wake()

    def _end(self, key: RequestKey, outcome: Outcome) -> bool:
        """End a ticket. Call it under the lock. Returns False for a late notice about a ticket that
        is not out, or about a prompt that is still being computed."""
        prompt = self._prompts.get(key)
        if prompt is None or prompt.deadline is None:
            return False
        del self._prompts[key]
        self._unpinned.append(Unpinned(key, outcome))
        self._metrics.tickets.labels(outcome).inc()
        return True


def _name_the_same(ticket: Ticket, before: Ticket | None) -> bool:
    """True if two tickets of one prompt are for the same rows."""
    return before is not None and (ticket.home, ticket.block_ids, ticket.generations) == (
        before.home,
        before.block_ids,
        before.generations,
    )
