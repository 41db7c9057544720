"""Hand-offs on paper: a sender and a receiver that move nothing, and are done when the link would
be done.

Every KV cache has one link, which does one read after another. A read occupies the links of both
sides. Letters between engines (parts, tickets, "done") take `letter_s`. Nothing fails and leases do
not end, because workers on paper do not die. The phases of a worker call this module like any
connector.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.kvtransfer.connector import (
    FindWritten,
    Lent,
    PullDone,
    PullFailed,
    ReceiverEvent,
    Unpinned,
)
from pdserve.plan.simulation.virtual_time import CLOCK, EPOCH_S
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta, RankMemory, Source, Ticket
from pdserve.protocol.request_key import RequestKey

LEASE_S = 3600.0


@dataclass(frozen=True)
class Links:
    """The speed of links."""

    block_size: int
    block_bytes: float  # Bytes of a block, summed over all ranks of a home.
    bytes_per_s: float  # Rate of one KV cache's link.
    fixed_s: float  # Seconds of a read beyond its bytes.
    letter_s: float  # Seconds of a letter.


class Network:
    """All KV caches of a cluster, by engine id."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.senders: dict[str, PaperSender] = {}
        self.num_bytes = 0.0
        self._free: dict[str, float] = {}

    def read(self, source: str, target: str, num_blocks: int) -> float:
        """Reads `num_blocks` from now on. Returns when they have arrived."""
        num_bytes = num_blocks * self.links.block_bytes
        begin = max(CLOCK.now, self._free.get(source, 0.0), self._free.get(target, 0.0))
        end = begin + num_bytes / self.links.bytes_per_s
        self._free[source] = self._free[target] = end
        self.num_bytes += num_bytes
        return end + self.links.fixed_s

    def post(self, letter: Callable[[], None]) -> None:
        """Sends a letter now. It is called when it arrives."""
        asyncio.get_running_loop().call_at(CLOCK.now + self.links.letter_s, letter)


@dataclass
class _Prompt:
    """A prompt at its sender."""

    num_blocks: int = 0  # blocks that are published so far
    followers: list[Callable[[int], None]] = field(default_factory=list)


class PaperSender:
    """The sender of one engine. `wake` makes the worker call `poll`."""

    def __init__(
        self,
        network: Network,
        engine_id: str,
        num_blocks: int,
        digest: tuple[str, str],
        wake: Callable[[], None],
    ) -> None:
        """Prepares a sender. `digest` is the digest of the model and that of its rows."""
        self._network = network
        self._engine_id = engine_id
        self._num_blocks = num_blocks
        self._digest = digest
        self._wake = wake
        self._prompts: dict[RequestKey, _Prompt] = {}
        self._unpinned: list[Unpinned] = []
        self._find: FindWritten = lambda digests: (0, ())
        network.senders[engine_id] = self

    def meta(self) -> KVCacheMeta:
        links = self._network.links
        rank = RankMemory("", b"", 0, "VRAM", 0, int(links.block_bytes), ())
        return KVCacheMeta(
            engine_id=self._engine_id,
            incarnation=1,
            connector="paper",
            model=self._digest[0],
            rows=self._digest[1],
            block_size=links.block_size,
            num_blocks=self._num_blocks,
            generation_address=0,
            mailbox="",
            ranks=(rank,),
        )

    def publish(
        self,
        key: RequestKey,
        block_ids: Sequence[int],
        num_tokens: int,
        content: bytes,
        written_at: float | None = None,
        home: int = 0,
    ) -> Ticket:
        self._tell(key, len(block_ids))
        return Ticket(
            engine_id=self._engine_id,
            incarnation=1,
            key=key,
            content=content,
            block_size=self._network.links.block_size,
            block_ids=tuple(block_ids),
            generations=(0,) * len(block_ids),
            num_tokens=num_tokens,
            lease_s=LEASE_S,
            written_at=EPOCH_S + CLOCK.now if written_at is None else written_at,
            home=home,
        )

    def publish_part(
        self,
        key: RequestKey,
        block_ids: Sequence[int],
        content: bytes,
        written_at: float | None = None,
        home: int = 0,
    ) -> None:
        self._tell(key, len(block_ids))

    def revoke(self, key: RequestKey) -> None:
        self._prompts.pop(key, None)

    def lend(self, find: FindWritten) -> None:
        self._find = find

    def lent(self, digests: Sequence[bytes]) -> Ticket:
        """Answers a receiver's letter that asks for the cached blocks of a prefix."""
        home, found = self._find(digests)
        return Ticket(
            engine_id=self._engine_id,
            incarnation=1,
            key=RequestKey(self._engine_id, 1, "", 0),
            content=digests[len(found) - 1] if found else b"",
            block_size=self._network.links.block_size,
            block_ids=tuple(block for block, _ in found),
            generations=(0,) * len(found),
            num_tokens=len(found) * self._network.links.block_size,
            lease_s=0.0,
            written_at=0.0,
            home=home,
        )

    def poll(self) -> list[Unpinned]:
        events, self._unpinned = self._unpinned, []
        return events

    def close(self) -> None: ...

    def follow(self, key: RequestKey, told: Callable[[int], None]) -> None:
        """Handles a receiver's letter that asks for reports on this prompt's blocks."""
        prompt = self._prompts.setdefault(key, _Prompt())
        prompt.followers.append(told)
        if prompt.num_blocks:
            count = prompt.num_blocks
            self._network.post(lambda: told(count))

    def unpin(self, event: Unpinned) -> None:
        """Handles a receiver's letter that it no longer needs the blocks."""
        self._prompts.pop(event.key, None)
        self._unpinned.append(event)
        self._wake()

    def _tell(self, key: RequestKey, num_blocks: int) -> None:
        prompt = self._prompts.setdefault(key, _Prompt())
        prompt.num_blocks = num_blocks
        for told in prompt.followers:
            self._network.post(lambda told=told: told(num_blocks))  # type: ignore[misc]


@dataclass
class _Pull:
    """A pull in progress."""

    source: str
    skip: int  # Blocks of the prompt that this engine has already.
    key: RequestKey | None  # None: the source does not pin the blocks.
    asked: int = 0  # Blocks for which reads were started.
    begun_at: float = 0.0
    here_at: float = 0.0  # When the last of these reads is done.
    num_blocks: int | None = None  # Blocks of the whole prompt. None: its ticket is unknown.
    is_over: bool = False


class PaperReceiver:
    """The receiver of one engine. `wake` makes the worker call `poll`."""

    def __init__(self, network: Network, engine_id: str, wake: Callable[[], None]) -> None:
        self._network = network
        self._engine_id = engine_id
        self._wake = wake
        self._pulls: dict[int, _Pull] = {}
        self._events: list[tuple[float, ReceiverEvent]] = []

    def connect(self, meta: KVCacheMeta) -> None:
        self._later(
            CLOCK.now + self._network.links.letter_s,
            PeerStatus(
                engine_id=meta.engine_id,
                incarnation=meta.incarnation,
                connected=True,
                bytes_per_s=self._network.links.bytes_per_s,
            ),
        )

    def disconnect(self, engine_id: str, incarnation: int) -> None: ...

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
        pull = self._begin(pull_id, source.engine_id, source.key, skip)
        sender = self._network.senders[source.engine_id]
        self._network.post(
            lambda: sender.follow(source.key, lambda count: self._told(pull_id, pull, count))
        )

    def complete(self, pull_id: int, ticket: Ticket, deadline_s: float) -> None:
        pull = self._pulls.get(pull_id)
        if pull is not None:
            pull.num_blocks = len(ticket.block_ids)
            self._told(pull_id, pull, pull.num_blocks)

    def pull(
        self,
        pull_id: int,
        ticket: Ticket,
        local_blocks: Sequence[int],
        skip: int,
        deadline_s: float,
        home: int = 0,
    ) -> None:
        key = ticket.key if ticket.is_pinned else None
        if not local_blocks:
            self._unpin(ticket.engine_id, key, "done")
            return
        self._begin(pull_id, ticket.engine_id, key, skip)
        self.complete(pull_id, ticket, deadline_s)

    def ask(self, pull_id: int, engine_id: str, incarnation: int, digests: Sequence[bytes]) -> None:
        sender = self._network.senders[engine_id]

        def answer() -> None:
            arrives = CLOCK.now + self._network.links.letter_s
            self._later(arrives, Lent(pull_id, sender.lent(digests)))

        self._network.post(answer)

    def renew(self, tickets: Sequence[Ticket]) -> None: ...

    def reject(self, ticket: Ticket) -> None:
        self._unpin(ticket.engine_id, ticket.key if ticket.is_pinned else None, "rejected")

    def cancel(self, pull_id: int) -> None:
        pull = self._pulls.pop(pull_id, None)
        if pull is not None:
            pull.is_over = True
            failed = PullFailed(pull_id, "cancelled", "", settled=True, was_complete=False)
            self._later(CLOCK.now, failed)

    def poll(self) -> list[ReceiverEvent]:
        due = [event for at, event in self._events if at <= CLOCK.now]
        if due:
            self._events = [entry for entry in self._events if entry[0] > CLOCK.now]
        return due

    def close(self) -> None: ...

    def _begin(self, pull_id: int, source: str, key: RequestKey | None, skip: int) -> _Pull:
        pull = self._pulls[pull_id] = _Pull(source, skip, key, asked=skip)
        return pull

    def _told(self, pull_id: int, pull: _Pull, num_blocks: int) -> None:
        """Handles the report that `num_blocks` of the prompt's blocks can be read."""
        if pull.is_over:
            return
        if num_blocks > pull.asked:
            pull.begun_at = pull.begun_at or CLOCK.now
            pull.here_at = self._network.read(pull.source, self._engine_id, num_blocks - pull.asked)
            pull.asked = num_blocks
        if pull.num_blocks is not None:
            self._end(pull_id, pull)

    def _end(self, pull_id: int, pull: _Pull) -> None:
        """Ends a pull whose blocks were all asked for, once the last read is done."""
        pull.is_over = True
        self._pulls.pop(pull_id, None)
        at = max(CLOCK.now, pull.here_at)
        num_bytes = int((pull.asked - pull.skip) * self._network.links.block_bytes)
        done = PullDone(
            pull_id, num_bytes, 1, "paper", at - CLOCK.now, 0, at - pull.begun_at, EPOCH_S + at
        )
        self._later(at, done)
        loop = asyncio.get_running_loop()
        loop.call_at(at, lambda: self._unpin(pull.source, pull.key, "done"))

    def _unpin(self, engine_id: str, key: RequestKey | None, outcome: str) -> None:
        if key is None:
            return
        sender = self._network.senders[engine_id]
        event = Unpinned(key, "done" if outcome == "done" else "rejected")
        self._network.post(lambda: sender.unpin(event))

    def _later(self, at: float, event: ReceiverEvent) -> None:
        self._events.append((at, event))
        asyncio.get_running_loop().call_at(at, self._wake)
