"""KVReceiver of an engine. It has one receiver per rank, each of which fills its own part of every
block, and it handles the letters.

The ranks of a home share block ids, so a pull is the same for all of them; each reads and verifies
its part. The pull is done when all ranks are, and has failed when one has. The sender is told
either. A failed pull settles when no rank's memory can be written any more. Ranks of other homes
have no part in it. Knows no transport. Driven by rank 0's engine loop. Parts, and answers to
questions for a prefix, come in on the mailbox's thread.

The pull of an unpinned ticket ends when every rank has reported the end of its part. What all of
them have verified is kept, so the smallest number counts. The sender is told nothing.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from pdserve.kvtransfer.connector import (
    Lent,
    PullDone,
    PullFailed,
    PullSettled,
    ReceiverEvent,
    Wake,
)
from pdserve.kvtransfer.p2p.letters import (
    Done,
    Follow,
    Lend,
    Notice,
    Part,
    Party,
    Rejected,
    Renew,
    Want,
)
from pdserve.kvtransfer.p2p.mailbox import Mailbox
from pdserve.kvtransfer.p2p.rank_receiver import RankReceiver
from pdserve.kvtransfer.p2p.remote_rank import RemoteRank
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta, Source, Ticket
from pdserve.protocol.request_key import RequestKey

Peer = tuple[str, int]


@dataclass
class _Pull:
    """The state of one pull, over all ranks of a home."""

    home: int  # our home, whose blocks it fills
    peer: Peer
    num_blocks: int  # blocks of the whole prompt, in our size
    num_local: int  # local blocks that it fills
    unquiet: set[int]  # ranks whose memory may still be written
    ticket: Ticket | None = None  # the complete one
    done: list[PullDone] = field(default_factory=list)
    failed: bool = False  # its failure was reported
    ended: list[PullDone | PullFailed] = field(default_factory=list)  # per rank, if all must end


@dataclass(frozen=True)
class _Followed:
    """A pull that waits for parts. home: our home. num_tokens: capacity of its blocks."""

    pull_id: int
    home: int
    peer: Peer
    content: bytes
    num_tokens: int


class EngineReceiver:
    """Implements `connector.KVReceiver`. rank: the first rank, which is in this process. wake: see
    `connector`."""

    def __init__(self, rank: RankReceiver, mailbox: Mailbox, wake: Wake) -> None:
        self.ranks: list[RankReceiver | RemoteRank] = [rank]
        self._mailbox = mailbox
        self._block_size = rank.block_size
        self._capacity = rank.num_blocks
        self._pulls: dict[int, _Pull] = {}
        self._statuses: dict[Peer, list[PeerStatus | None]] = {}
        self._parties: dict[Peer, Party] = {}
        self._followed: dict[RequestKey, _Followed] = {}
        self._asked: dict[int, Peer] = {}
        self._lock = threading.Lock()  # guards what the mailbox's thread reads
        self._lent: deque[Lent] = deque()
        self._wake = wake
        self._closed = False
        mailbox.attach()
        mailbox.on(Part, self._part)
        mailbox.on(Lend, self._take_lent)

    @property
    def local_ranks(self) -> list[RankReceiver]:
        """The receivers in this process."""
        return [rank for rank in self.ranks if isinstance(rank, RankReceiver)]

    def add_ranks(self, ranks: Sequence[RankReceiver | RemoteRank]) -> None:
        """Add the receivers of the engine's other ranks, before anybody connects."""
        self.ranks += ranks

    def connect(self, meta: KVCacheMeta) -> None:
        party = Party(meta.engine_id, meta.incarnation, meta.mailbox)
        self._parties[meta.engine_id, meta.incarnation] = party
        for rank in self.ranks:
            rank.connect(meta)

    def disconnect(self, engine_id: str, incarnation: int) -> None:
        for rank in self.ranks:
            rank.disconnect(engine_id, incarnation)
        party = self._parties.pop((engine_id, incarnation), None)
        if party is not None:
            self._mailbox.forget(party)

    def follow(
        self,
        pull_id: int,
        source: Source,
        content: bytes,
        local_blocks: Sequence[int],
        skip: int,
        deadline_s: float,
        home: int = 0,
    ) -> None:
        blocks = tuple(int(block) for block in local_blocks)
        peer = (source.engine_id, source.incarnation)
        self._begin(pull_id, home, peer, blocks, skip, deadline_s)
        with self._lock:
            num_tokens = (skip + len(blocks)) * self._block_size
            self._followed[source.key] = _Followed(pull_id, home, peer, content, num_tokens)
        self._send(peer, Follow(source.key))

    def complete(self, pull_id: int, ticket: Ticket, deadline_s: float) -> None:
        """ValueError if the ticket has another number of blocks than the pull."""
        self._unfollow(pull_id)
        pull = self._pulls.get(pull_id)
        if pull is not None:
            if self._num_blocks(ticket) != pull.num_blocks:
                raise ValueError(
                    f"ticket must fill {pull.num_blocks} blocks, not {self._num_blocks(ticket)}"
                )
            pull.ticket = ticket
            for rank in self._ranks_of(pull.home):
                rank.complete(pull_id, ticket, deadline_s)

    def pull(
        self,
        pull_id: int,
        ticket: Ticket,
        local_blocks: Sequence[int],
        skip: int,
        deadline_s: float,
        home: int = 0,
    ) -> None:
        """ValueError if the arguments do not fit together."""
        blocks = tuple(int(block) for block in local_blocks)
        num_blocks = self._num_blocks(ticket)
        if not 0 <= skip <= num_blocks or len(blocks) != num_blocks - skip:
            raise ValueError(
                f"local_blocks must hold the ticket's {ticket.num_tokens} tokens after the first "
                f"{skip} blocks: {num_blocks - skip} blocks, not {len(blocks)}"
            )
        peer = (ticket.engine_id, ticket.incarnation)
        self._begin(pull_id, home, peer, blocks, skip, deadline_s)
        self.complete(pull_id, ticket, deadline_s)

    def reject(self, ticket: Ticket) -> None:
        self._send((ticket.engine_id, ticket.incarnation), Rejected(ticket.key))

    def renew(self, tickets: Sequence[Ticket]) -> None:
        keys: dict[Peer, list[RequestKey]] = {}
        for ticket in tickets:
            keys.setdefault((ticket.engine_id, ticket.incarnation), []).append(ticket.key)
        for peer, named in keys.items():
            self._send(peer, Renew(tuple(named)))

    def ask(self, pull_id: int, engine_id: str, incarnation: int, digests: Sequence[bytes]) -> None:
        with self._lock:
            self._asked[pull_id] = engine_id, incarnation
        self._send((engine_id, incarnation), Want(pull_id, tuple(digests)))

    def cancel(self, pull_id: int) -> None:
        with self._lock:
            self._asked.pop(pull_id, None)
        self._unfollow(pull_id)
        pull = self._pulls.get(pull_id)
        if pull is not None:
            for rank in self._ranks_of(pull.home):
                rank.cancel(pull_id)

    def poll(self) -> list[ReceiverEvent]:
        events: list[ReceiverEvent] = []
        while self._lent:
            events.append(self._lent.popleft())
        for index, rank in enumerate(self.ranks):
            for event in rank.poll():
                if isinstance(event, PeerStatus):
                    events += self._peer(index, event)
                elif not isinstance(event, Lent):
                    events += self._take(index, event)
        return events

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for rank in self.ranks:
            rank.close()
        self._mailbox.detach()

    def _num_blocks(self, ticket: Ticket) -> int:
        """Local blocks needed to hold a complete ticket. ValueError if the ticket names more or
        fewer blocks than its rows need."""
        if len(ticket.block_ids) != -(-ticket.num_tokens // max(ticket.block_size, 1)):
            size = f"{len(ticket.block_ids)} blocks of {ticket.block_size} tokens"
            raise ValueError(
                f"ticket must name the blocks of its {ticket.num_tokens} tokens, not {size}"
            )
        return -(-ticket.num_tokens // self._block_size)

    def _ranks_of(self, home: int) -> list[RankReceiver | RemoteRank]:
        return [rank for rank in self.ranks if rank.home == home]

    def _begin(
        self,
        pull_id: int,
        home: int,
        peer: Peer,
        blocks: tuple[int, ...],
        skip: int,
        deadline_s: float,
    ) -> None:
        unquiet = {index for index, rank in enumerate(self.ranks) if rank.home == home}
        if not unquiet:
            raise ValueError(f"home must be one of the engine's, not {home}")
        if any(not 0 <= block < self._capacity for block in blocks):
            raise ValueError(f"local_blocks must lie in [0, {self._capacity}), not {blocks}")
        for rank in self._ranks_of(home):
            rank.begin(pull_id, *peer, blocks, skip, deadline_s)
        self._pulls[pull_id] = _Pull(home, peer, skip + len(blocks), len(blocks), unquiet)

    def _part(self, sender: Party, notice: Part) -> None:
        """Pass a new part to the ranks that pull it. Runs on the mailbox's thread."""
        ticket = notice.ticket
        with self._lock:
            followed = self._followed.get(ticket.key)
        if (
            followed is not None
            and (sender.engine_id, sender.incarnation)
            == followed.peer
            == (ticket.engine_id, ticket.incarnation)
            and ticket.content == followed.content
            and (len(ticket.block_ids) - 1) * ticket.block_size < followed.num_tokens
        ):
            for rank in self._ranks_of(followed.home):
                rank.extend(followed.pull_id, ticket)

    def _take_lent(self, sender: Party, notice: Lend) -> None:
        """Take the answer to a question. Each question has one answer, from the peer that was
        asked. Runs on the mailbox's thread."""
        ticket = notice.ticket
        with self._lock:
            peer = self._asked.get(notice.number)
            by = {(sender.engine_id, sender.incarnation), (ticket.engine_id, ticket.incarnation)}
            if by != {peer} or ticket.is_pinned:
                return
            del self._asked[notice.number]
        self._lent.append(Lent(notice.number, ticket))
        self._wake()

    def _unfollow(self, pull_id: int) -> None:
        with self._lock:
            self._followed = {
                key: each for key, each in self._followed.items() if each.pull_id != pull_id
            }

    def _send(self, peer: Peer, notice: Notice) -> None:
        party = self._parties.get(peer)
        if party is not None:
            self._mailbox.send(party, notice)

    def _take(self, rank: int, event: PullDone | PullFailed | PullSettled) -> list[ReceiverEvent]:
        pull = self._pulls[event.pull_id]
        if not isinstance(event, PullFailed) or event.settled:
            pull.unquiet.discard(rank)
        if not pull.unquiet:
            del self._pulls[event.pull_id]
        if pull.ticket is not None and not pull.ticket.is_pinned:
            return self._end_together(rank, event, pull)
        if isinstance(event, PullFailed) and not pull.failed:
            return [self._failed(rank, event, pull)]
        if isinstance(event, PullDone):
            pull.done.append(event)
        if pull.unquiet:
            return []
        if pull.failed:
            return [PullSettled(event.pull_id)]
        assert pull.ticket is not None
        self._send(pull.peer, Done(pull.ticket.key))
        return [_sum_of(pull.done)]

    def _end_together(
        self, rank: int, event: PullDone | PullFailed | PullSettled, pull: _Pull
    ) -> list[ReceiverEvent]:
        """Handle the pull of an unpinned ticket: its end is reported when every rank has ended."""
        if isinstance(event, PullSettled):
            return [] if pull.unquiet else [event]
        if isinstance(event, PullFailed):
            if not any(isinstance(each, PullFailed) for each in pull.ended):
                self.cancel(event.pull_id)
            event = replace(event, detail=f"rank {rank}: {event.detail}")
        pull.ended.append(event)
        if len(pull.ended) < len(self._ranks_of(pull.home)):
            return []
        failed = [each for each in pull.ended if isinstance(each, PullFailed)]
        if not failed:
            return [_sum_of([each for each in pull.ended if isinstance(each, PullDone)])]
        num_verified = min(
            each.num_verified if isinstance(each, PullFailed) else pull.num_local
            for each in pull.ended
        )
        return [replace(failed[0], settled=not pull.unquiet, num_verified=num_verified)]

    def _failed(self, rank: int, event: PullFailed, pull: _Pull) -> PullFailed:
        pull.failed = True
        self.cancel(event.pull_id)
        if pull.ticket is not None:
            self._send(pull.peer, Rejected(pull.ticket.key))
        if len(self.ranks) > 1:
            event = replace(event, detail=f"rank {rank}: {event.detail}")
        if len(self._ranks_of(pull.home)) > 1:
            # how much the other ranks have verified is not known yet
            event = replace(event, settled=not pull.unquiet, num_verified=0)
        return event

    def _peer(self, rank: int, status: PeerStatus) -> list[ReceiverEvent]:
        """Combine the ranks' statuses. The peer is connected when every rank of every home is; one
        rank that is not is reported at once. The rate is that of the slowest home; its ranks all
        read at once, so their rates add up."""
        key = status.engine_id, status.incarnation
        known = self._statuses.setdefault(key, [None] * len(self.ranks))
        known[rank] = status
        if len(self.ranks) == 1:
            return [status]
        if not status.connected:
            return [msgspec.structs.replace(status, detail=f"rank {rank}: {status.detail}")]
        connected = [each for each in known if each is not None and each.connected]
        if len(connected) < len(known):
            return []
        transport = "+".join(sorted({each.transport for each in connected}))
        rates: dict[int, float] = {}
        for own, each in zip(self.ranks, connected, strict=True):
            rates[own.home] = rates.get(own.home, 0.0) + each.bytes_per_s
        rate = min(rates.values())
        return [msgspec.structs.replace(status, transport=transport, bytes_per_s=rate)]


def _sum_of(done: Sequence[PullDone]) -> PullDone:
    """Sums bytes and descriptors of a home's ranks, and takes the time of the slowest."""
    return PullDone(
        done[0].pull_id,
        sum(each.num_bytes for each in done),
        sum(each.num_descriptors for each in done),
        "+".join(sorted({each.transport for each in done})),
        max(each.seconds for each in done),
        min(each.num_early_bytes for each in done) * len(done),
        max(each.read_s for each in done),
        max(each.ended_at for each in done),
    )
