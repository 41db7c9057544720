"""One thread per connected engine: connects, self-tests, reads blocks, verifies generations, and knows when memory is
quiet.

All calls that concern one peer are made by this thread, so a peer is never added twice at once and a slow or frozen
one holds up nobody else. It knows pulls and generations; which link a ticket belongs to and who listens is
`rank_receiver.py`.

    link:  IDLE -connect-> PROBING -self-test-> CONNECTED -error, disconnect-> DRAINING -all reads ended-> IDLE
    pull:  begun -> its pieces: reading -> verifying -> all verified: done | failed (settled or not) ... -> settled

A pull may begin before its prompt is computed: it then reads what newer and newer tickets name, a piece a ticket, and
can be done only behind the complete one. A piece that was reused meanwhile is read again when a newer ticket came, and
only when no read of its pull is in flight: two reads into the same memory could end in the wrong order.

Rows from blocks of another size are read into the staging ring, a piece a run of it, and moved to ours by a repack
behind each read. Then bytes in flight land in ring blocks, and only a repack keeps our blocks from being quiet. Ring
blocks are held until nothing can land in them, also when their pull was given up.

When bytes are quiet. A read that ended (`check` said True) writes no more. A read that was given up is kept and
checked until it ends: releasing a NIXL handle returns at once while bytes go on landing (tried, TCP: 419 of 512 MiB at
the release, all of them 0.3 s later), and a frozen peer never errs. After SEVER_AFTER_S of that the connections to the
peer are cut (`TransferAgent.sever`), which ends its reads by an error. A read that *raised*, in the post or later, may
have had several requests under way on several lanes, of which one failed, so it counts as quiet only after the link
has drained: every other read has ended, the connections are cut, the peer is removed, and QUIET_AFTER_REMOVAL_S has
passed, which covers UCX's progress thread finishing the close. (Removing a peer that lives does not end what is under
way.) So a lost peer's pulls are reported at once, unsettled, and settle after. Tried: peer killed in the middle of 512
MiB reads, 8 times over TCP and 3 over CMA: 50 to 110 ms to the report, and not one byte landed after it, let alone
after settling; connections cut in the middle of 64 MiB, with the link down and while bytes flowed: nothing landed
behind the error.
"""

import ctypes
import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch

from pdserve.background.threads import KeptThread
from pdserve.kvtransfer.connector import PullDone, PullFailed, PullSettled
from pdserve.kvtransfer.p2p.connection import Connection, OwnKVCache, release_all
from pdserve.kvtransfer.p2p.ranges import BlockSizes, count_descriptors, order_pairs
from pdserve.kvtransfer.transport.agent import Handle, TransferAgent, TransferError
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta, Ticket

logger = logging.getLogger(__name__)

PROBE_DEADLINE_S = 10.0
LONG_PROBE_FROM = 10e9  # bytes a second; below, one read of PROBE_BYTES tells the rate well enough
LONG_PROBE_READS = 16
VERIFIED_TOGETHER = 4  # pieces from the staging ring, while more come: a generation read costs as much as moving one
QUIET_AFTER_REMOVAL_S = 0.05
SEVER_AFTER_S = 30.0
MIN_SLEEP_S, MAX_SLEEP_S = 30e-6, 5e-3
PR_SET_TIMERSLACK = 29  # Linux
SLEEP_SHARE = 0.02
FAULT_PAUSE_S = 0.1

LinkEvent = PullDone | PullFailed | PullSettled | PeerStatus


class LinkState(enum.Enum):
    IDLE = "idle"
    PROBING = "probing"
    CONNECTED = "connected"
    DRAINING = "draining"


@dataclass(eq=False)
class Pull:
    """One pull on its way. `local_blocks` are for the prompt's blocks of our size from `skip` on; positions count its
    blocks of the *peer's* size, from 0, of which those from `first` to `end` are wanted (until the ticket is complete:
    for which there is room).

    ticket: the newest, and whether it is the complete one. posted: positions before it are read or under way. verified:
    those before it hold what was published, since verified_at (seconds since the epoch); early: those when the ticket
    was complete. deadline, started: monotonic, the latter of the complete ticket; patience: how long one read may take
    before. read_s: pieces were on their way, from post to verified, overlaps counted once; read_until: monotonic, the
    end of the last. reported: its end was told already. is_advancing: `_advance` is at it.
    """

    pull_id: int
    sizes: BlockSizes
    skip: int
    local_blocks: tuple[int, ...]
    started: float
    patience: float
    ticket: Ticket | None = None
    is_complete: bool = False
    deadline: float | None = None
    posted: int = 0
    verified: int = 0
    verified_at: float = field(default_factory=time.time)
    early: int = 0
    read_s: float = 0.0
    read_until: float = 0.0
    pieces: deque["Piece"] = field(default_factory=deque)
    num_descriptors: int = 0
    reported: bool = False
    is_advancing: bool = False

    def __post_init__(self) -> None:
        self.first, self.end = self.sizes.cover(self.skip, self.skip + len(self.local_blocks))
        if not self.local_blocks:
            self.first = self.end
        self.posted = self.verified = self.early = self.first

    @property
    def readable(self) -> int:
        """The position before which the newest ticket names what may be read: of a part, what fills blocks of ours, so
        that no two pieces write into one.
        """
        assert self.ticket is not None
        named = len(self.ticket.block_ids)
        return min(named if self.ticket.num_tokens else named - named % self.sizes.step, self.end)

    @property
    def num_verified(self) -> int:
        """How many of its blocks hold what was published."""
        if self.is_complete and self.verified >= self.end:
            return len(self.local_blocks)
        return min(max(self.sizes.filled(self.verified) - self.skip, 0), len(self.local_blocks))

    def is_late(self, now: float) -> bool:
        if self.deadline is not None:
            return now > self.deadline
        return any(piece.reads and now > piece.posted + self.patience for piece in self.pieces)

    @property
    def is_written(self) -> bool:
        """Whether bytes may land in its blocks."""
        return any(piece.is_written for piece in self.pieces)


@dataclass(eq=False)
class Piece:
    """The positions first..last of a pull, read by one ticket. reads: that have not ended. ring_blocks: of the staging
    ring, one a position, while they are taken.
    """

    pull: Pull
    ticket: Ticket
    first: int
    last: int
    ring_blocks: np.ndarray | None = None
    reads: int = 0
    is_repacking: bool = False
    state: Literal["reading", "verified", "stale"] = "reading"
    posted: float = field(default_factory=time.monotonic)

    @property
    def remote_blocks(self) -> tuple[int, ...]:
        return self.ticket.block_ids[self.first : self.last]

    @property
    def rows(self) -> tuple[int, int]:
        """Of the prompt, `(first, behind the last)`, that it moves."""
        pull = self.pull
        end = (pull.skip + len(pull.local_blocks)) * pull.sizes.ours
        return max(self.first * pull.sizes.theirs, pull.skip * pull.sizes.ours), min(self.last * pull.sizes.theirs, end)

    @property
    def local_blocks(self) -> tuple[int, ...]:
        """Ours that it fills."""
        first, end = self.rows
        ours = self.pull.sizes.ours
        return self.pull.local_blocks[first // ours - self.pull.skip : -(-end // ours) - self.pull.skip]

    @property
    def is_moving(self) -> bool:
        """Whether its bytes are on their way to these."""
        return self.reads > 0 or self.is_repacking

    @property
    def is_written(self) -> bool:
        """Whether bytes may land in these."""
        return self.is_repacking if self.ring_blocks is not None else self.reads > 0

    @property
    def generations(self) -> tuple[int, ...]:
        return self.ticket.generations[self.first : self.last]

    def is_named_by(self, ticket: Ticket) -> bool:
        """Whether it would be read from the same blocks, of the same generations."""
        span = slice(self.first, self.last)
        return (ticket.block_ids[span], ticket.generations[span]) == (self.remote_blocks, self.generations)


@dataclass(eq=False)
class Flight:
    """A posted read, or a repack. has_ended: tells so, or raises TransferError. done: what to do when it ended well;
    nothing once the link drains. release: what to give back in any case.
    """

    has_ended: Callable[[], bool]
    done: Callable[[], None]
    release: list[Callable[[], None]] = field(default_factory=list)
    posted: float = field(default_factory=time.monotonic)


class Owner(Protocol):
    """What a link needs of its receiver."""

    def emit(self, event: LinkEvent, transport: str) -> None: ...

    def retire(self, link: "PeerLink") -> bool:
        """Forget the link unless a command came in; True when its thread may end."""
        ...


class PeerLink:
    """The connection to one incarnation of one engine. `connect`, `disconnect`, `begin`, `extend`, `complete`,
    `cancel`, `fail` only enqueue.
    """

    def __init__(self, agent: TransferAgent, own: OwnKVCache, owner: Owner, meta: KVCacheMeta) -> None:
        self.meta = meta
        self._agent, self._own, self._owner = agent, own, owner
        self._state = LinkState.IDLE
        self._connection: Connection | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._flights: list[Flight] = []
        self._pulls: dict[int, Pull] = {}
        self._verifying = False
        self._to_verify: list[Piece] = []
        self._staged: set[Piece] = set()  # that hold ring blocks
        self._probe_deadline = 0.0
        self._status: PeerStatus | None = None
        self._unquiet_since: float | None = None  # reads that nobody waits for are under way
        self._reconnect = False
        self._leaving = False
        self.thread = KeptThread("kv link", self._run, meta.engine_id, FAULT_PAUSE_S)

    # Called from any thread.

    def connect(self) -> None:
        self._enqueue(self._connect)

    def disconnect(self) -> None:
        self._enqueue(self._disconnect)

    def begin(self, pull: Pull) -> None:
        self._enqueue(lambda: self._begin(pull))

    def extend(self, pull_id: int, ticket: Ticket) -> None:
        """A newer ticket, not yet of the whole prompt."""
        self._enqueue(lambda: self._extend(pull_id, ticket))

    def complete(self, pull_id: int, ticket: Ticket, deadline: float) -> None:
        now = time.monotonic()
        self._enqueue(lambda: self._complete(pull_id, ticket, deadline, now))

    def cancel(self, pull_id: int) -> None:
        self.fail(pull_id, "cancelled", "cancelled by the caller")

    def fail(self, pull_id: int, reason: str, detail: str) -> None:
        """End a pull whose end was not told yet."""
        self._enqueue(lambda: self._end_pull(pull_id, reason, detail))

    def _enqueue(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def has_commands(self) -> bool:
        return bool(self._commands)

    # The link's thread, from here on.

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # of this thread: its sleeps end 50 us late without
        if self._own.kv_cache.is_cuda:
            torch.cuda.set_device(
                self._own.kv_cache.device
            )  # UCX needs the KV cache's context current where it is called
        try:
            self._turn()
            while not self._may_end():
                self._wait()
                self._turn()
        except Exception as error:  # a bug here must not leave pulls without an answer
            self._lose(TransferError("error", f"internal: {error!r}"))
            raise

    def _may_end(self) -> bool:
        return self._leaving and self._state is LinkState.IDLE and self._owner.retire(self)

    def _turn(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._check_flights()
        self._check_deadlines()
        self._check_quiet()
        if self._state is LinkState.DRAINING and not self._flights:
            self._finish_drain()

    def _wait(self) -> None:
        """Sleeps a share of the youngest read's age, so that waiting costs little and adds little; without reads, until
        a command or a deadline comes."""
        if not self._flights:
            if self._state is LinkState.DRAINING:
                return  # a turn broke off before it finished the drain
            deadlines = [pull.deadline for pull in self._pulls.values() if pull.deadline is not None]
            with self._changed:
                if not self._commands:
                    self._changed.wait(max(0.0, min(deadlines) - time.monotonic()) if deadlines else None)
            return
        age = time.monotonic() - self._flights[-1].posted
        sleep = min(max(age * SLEEP_SHARE, MIN_SLEEP_S), MAX_SLEEP_S)
        if sleep < 1e-3:
            time.sleep(sleep)
            return
        with self._changed:
            if not self._commands:
                self._changed.wait(sleep)

    def _check_flights(self) -> None:
        for flight in list(self._flights):
            try:
                ended = flight.has_ended()
            except TransferError as error:
                self._end(flight)
                self._lose(error)
                continue
            if ended:
                self._end(flight)
                if self._state is not LinkState.DRAINING:
                    flight.done()

    def _post(self, handle: Handle, done: Callable[[], None], prepared: tuple[Any, ...] = ()) -> None:
        release: list[Callable[[], None]] = [partial(self._agent.release, handle)]
        release += [partial(self._agent.release_prepared, each) for each in prepared]
        flight = Flight(partial(self._agent.check, handle), done, release)
        self._flights.append(flight)
        try:
            ended = self._agent.post(handle)
        except TransferError as error:
            self._lose(error)  # some of it may be under way: the flight stays until `check` ends it too
            return
        if ended:
            self._end(flight)
            done()

    def _end(self, flight: Flight) -> None:
        self._flights.remove(flight)
        release_all(flight.release)

    # Connecting and losing.

    def _connect(self) -> None:
        self._leaving = False
        if self._state is LinkState.DRAINING:
            self._reconnect = True
        elif self._state is LinkState.CONNECTED:
            self._emit(self._status)
        elif self._state is LinkState.IDLE:
            self._open()

    def _open(self) -> None:
        try:
            wake = partial(self._enqueue, self._go_on)
            self._connection = connection = Connection(self._agent, self._own, self.meta, wake)
        except TransferError as error:
            self._fail_all("not-connected", str(error))
            self._report(connected=False, detail=str(error))
            return
        self._state = LinkState.PROBING
        self._probe_deadline = time.monotonic() + PROBE_DEADLINE_S
        mark = self._agent.transport_mark()
        self._probe(connection, connection.probes, mark)

    def _probe(self, connection: Connection, probes: Sequence[Any], mark: int) -> None:
        """Self-test reads, one after another. The first of each of the peer's ranks sets up endpoints; the last of all,
        from a rank that was read before, is the timed one. On a fast link that is mostly latency: a longer one follows.
        """
        if probes:
            self._post_probe(connection, probes[0], 1, lambda _: self._probe(connection, probes[1:], mark))
            return

        def timed(rate: float) -> None:
            if rate < LONG_PROBE_FROM:
                self._connected(connection, mark, rate)
            else:
                done = partial(self._connected, connection, mark)
                self._post_probe(connection, connection.probes[0], LONG_PROBE_READS, done)

        self._post_probe(connection, connection.probes[0], 1, timed)

    def _post_probe(self, connection: Connection, remote: Any, count: int, done: Callable[[float], None]) -> None:
        """`count` reads of the same bytes at once; done(bytes a second)."""
        ids = [0] * count
        try:
            handle = self._agent.make_read(connection.probe_local, ids, remote, ids)
        except TransferError as error:
            self._lose(error)
            return
        began = time.monotonic()
        num_bytes = count * connection.probe_bytes
        self._post(handle, lambda: done(num_bytes / max(time.monotonic() - began, 1e-9)))

    def _connected(self, connection: Connection, mark: int, rate: float) -> None:
        transport = self._agent.transport_since(mark, connection.memory)
        self._state = LinkState.CONNECTED
        self._report(connected=True, transport=transport, bytes_per_s=rate)
        self._go_on()

    def _report(self, connected: bool, transport: str = "", bytes_per_s: float = 0.0, detail: str = "") -> None:
        self._status = PeerStatus(
            engine_id=self.meta.engine_id,
            incarnation=self.meta.incarnation,
            connected=connected,
            transport=transport,
            bytes_per_s=bytes_per_s,
            detail=detail,
        )
        self._emit(self._status)

    def _disconnect(self) -> None:
        self._leaving, self._reconnect = True, False
        self._fail_all("peer-lost", "disconnected")
        self._lose(TransferError("peer-lost", "disconnected"))

    def _lose(self, error: TransferError) -> None:
        """Fail everything and drain. Data that is complete is quiet; data under way settles when the link has
        drained."""
        if self._state not in (LinkState.PROBING, LinkState.CONNECTED):
            return
        self._state = LinkState.DRAINING
        self._verifying = False
        self._to_verify.clear()
        self._fail_all(error.reason, str(error))
        self._report(connected=False, detail=str(error))

    def _finish_drain(self) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None
        unsettled = [pull for pull in self._pulls.values() if pull.is_written]
        if unsettled or self._staged:
            connection.sever()
        connection.close()
        if unsettled or self._staged:
            time.sleep(QUIET_AFTER_REMOVAL_S)
        for piece in list(self._staged):
            self._give_back(piece, connection)
        for pull in unsettled:
            self._settle(pull)
        self._state = LinkState.IDLE
        if self._reconnect:
            self._reconnect = False
            self._open()

    def _check_quiet(self) -> None:
        """Cut off a peer whose reads, given up long ago, do not end."""
        now = time.monotonic()
        given_up = any(p.reported for p in self._pulls.values()) or any(p.pull.reported for p in self._staged)
        if not (self._flights and (self._state is LinkState.DRAINING or given_up)):
            self._unquiet_since = None
        elif self._unquiet_since is None:
            self._unquiet_since = now
        elif now > self._unquiet_since + SEVER_AFTER_S and self._connection is not None:
            self._unquiet_since = None
            logger.warning("reads from %s do not end: cutting its connections", self.meta.engine_id)
            self._connection.sever()

    # Pulls.

    def _begin(self, pull: Pull) -> None:
        self._pulls[pull.pull_id] = pull
        if self._state is LinkState.CONNECTED:
            self._advance(pull)
        elif self._state is not LinkState.PROBING and not self._reconnect:
            self._fail(pull, "not-connected", f"{self.meta.engine_id} is {self._state.value}")

    def _extend(self, pull_id: int, ticket: Ticket) -> None:
        pull = self._pulls.get(pull_id)
        if pull is not None and not pull.reported and not pull.is_complete:
            pull.ticket = ticket
            self._advance(pull)

    def _complete(self, pull_id: int, ticket: Ticket, deadline: float, now: float) -> None:
        pull = self._pulls.get(pull_id)
        if pull is not None and not pull.reported:
            pull.ticket, pull.is_complete, pull.deadline = ticket, True, deadline
            pull.end = len(ticket.block_ids)
            pull.started, pull.early = now, pull.verified
            self._advance(pull)

    def _go_on(self) -> None:
        for pull in list(self._pulls.values()):
            self._advance(pull)

    def _advance(self, pull: Pull) -> None:
        """Read what the newest ticket names and nobody has read, as far as there are ring blocks for it; or finish."""
        if pull.is_advancing:  # a read that ends within its post comes back here
            return
        pull.is_advancing = True
        while (piece := self._next_piece(pull)) is not None:
            self._read(piece)
        pull.is_advancing = False
        is_open = self._state is LinkState.CONNECTED and not pull.reported
        if is_open and pull.is_complete and pull.verified >= pull.end:
            self._finish(pull)

    def _next_piece(self, pull: Pull) -> Piece | None:
        ticket, connection = pull.ticket, self._connection
        if self._state is not LinkState.CONNECTED or pull.reported or ticket is None or not self._reread(pull, ticket):
            return None
        assert connection is not None
        first, last, ring_blocks = pull.posted, pull.readable, None
        if first >= last:
            return None
        if connection.staging is not None:
            ring_blocks = connection.staging.take(ticket.block_ids[first:last])
            if ring_blocks is None:
                return None  # others hold them: `_go_on` is called
            last = first + len(ring_blocks)
        pull.posted = last
        piece = Piece(pull, ticket, first, last, ring_blocks)
        if ring_blocks is not None:
            self._staged.add(piece)
        return piece

    def _reread(self, pull: Pull, ticket: Ticket) -> bool:
        """Go back to the first stale piece, if there is one; False while that must wait."""
        stale = next((piece for piece in pull.pieces if piece.state == "stale"), None)
        if stale is None:
            return True
        if any(piece.state == "reading" for piece in pull.pieces):
            return False
        if stale.is_named_by(ticket):
            if pull.is_complete:
                blocks = f"{stale.first} to {stale.last - 1}"
                self._fail(pull, "stale-generation", f"of the prompt's blocks {blocks} some were reused")
            return False
        pull.posted = stale.first
        pull.pieces.clear()
        return True

    def _read(self, piece: Piece) -> None:
        pull, connection = piece.pull, self._connection
        assert connection is not None
        pull.pieces.append(piece)
        into = piece.local_blocks if piece.ring_blocks is None else piece.ring_blocks
        local_ids, remote_ids = order_pairs(into, piece.remote_blocks)
        descriptors = count_descriptors(local_ids, remote_ids, connection.reads_whole_blocks)
        pull.num_descriptors += len(connection.sources) * descriptors
        handles: list[Handle] = []
        try:
            for source in connection.sources:
                handles.append(self._agent.make_read(source.local, local_ids, source.remote, remote_ids))
        except TransferError as error:
            release_all([partial(self._agent.release, handle) for handle in handles])
            if piece.ring_blocks is not None:
                self._give_back(piece, connection)
            self._fail(pull, "error", str(error))
            return
        piece.reads = len(handles)
        for index, handle in enumerate(handles):
            if self._state is not LinkState.CONNECTED:  # lost in the post of one before
                release_all([partial(self._agent.release, unposted) for unposted in handles[index:]])
                return
            self._post(handle, lambda: self._data_done(piece))

    def _data_done(self, piece: Piece) -> None:
        piece.reads -= 1
        if piece.reads:
            return
        if piece.ring_blocks is None:
            self._filled(piece)
            return
        assert self._connection is not None
        if piece.pull.reported:  # its blocks may be others' by now
            self._give_back(piece, self._connection)
            return
        self._repack(piece, piece.ring_blocks, self._connection)

    def _repack(self, piece: Piece, ring_blocks: np.ndarray, connection: Connection) -> None:
        assert connection.staging is not None
        piece.is_repacking = True
        first, end = piece.rows
        skip = first - piece.first * piece.pull.sizes.theirs
        has_ended = connection.staging.repack(ring_blocks, skip, end - first, piece.local_blocks)
        flight = Flight(has_ended, partial(self._repacked, piece, connection))
        self._flights.append(flight)
        if has_ended():
            self._end(flight)
            flight.done()

    def _repacked(self, piece: Piece, connection: Connection) -> None:
        self._give_back(piece, connection)
        self._filled(piece)

    def _give_back(self, piece: Piece, connection: Connection) -> None:
        """Nothing lands in its ring blocks any more, and nobody needs what is in them."""
        assert piece.ring_blocks is not None and connection.staging is not None
        ring_blocks, piece.ring_blocks, piece.is_repacking = piece.ring_blocks, None, False
        self._staged.remove(piece)
        connection.staging.give_back(ring_blocks)

    def _filled(self, piece: Piece) -> None:
        """Its rows are in our blocks."""
        if piece.pull.reported:
            if not piece.pull.is_written:
                self._settle(piece.pull)
            return
        self._to_verify.append(piece)
        assert self._connection is not None
        more = self._connection.staging is not None and any(each.is_moving for each in piece.pull.pieces)
        if not more or len(self._to_verify) >= VERIFIED_TOGETHER:
            self._verify()

    def _verify(self) -> None:
        """Read the generations of all pieces whose data is complete, in one read, posted after the last byte of
        each."""
        batch = [piece for piece in self._to_verify if not piece.pull.reported]
        if self._verifying or not batch:
            return
        assert self._connection is not None
        self._to_verify = []
        first = min(min(piece.remote_blocks) for piece in batch)
        last = max(max(piece.remote_blocks) for piece in batch)
        self._connection.generations[first : last + 1] = -1
        try:
            here, there = self._connection.prepare_generations(first, last)
            handle = self._agent.make_read(here, [0], there, [0])
        except TransferError as error:
            self._lose(error)
            return
        self._verifying = True
        self._post(handle, lambda: self._verified(batch), (here, there))

    def _verified(self, batch: list[Piece]) -> None:
        assert self._connection is not None
        self._verifying = False
        table, now = self._connection.generations.numpy(), time.monotonic()
        for piece in batch:
            is_fresh = np.array_equal(table[list(piece.remote_blocks)], np.asarray(piece.generations))
            piece.state = "verified" if is_fresh else "stale"
            piece.pull.read_s += now - max(piece.posted, piece.pull.read_until)
            piece.pull.read_until = now
        for pull in dict.fromkeys(piece.pull for piece in batch):
            while pull.pieces and pull.pieces[0].state == "verified":
                pull.verified, pull.verified_at = pull.pieces.popleft().last, time.time()
            self._advance(pull)
        if self._state is LinkState.CONNECTED:
            self._verify()

    def _finish(self, pull: Pull) -> None:
        pull.reported = True
        del self._pulls[pull.pull_id]
        assert self._connection is not None and self._status is not None
        block_bytes = sum(source.span.num_bytes for source in self._connection.sources)
        self._emit(
            PullDone(
                pull.pull_id,
                max(pull.end - pull.first, 0) * block_bytes,
                pull.num_descriptors,
                self._status.transport,
                time.monotonic() - pull.started,
                (pull.early - pull.first) * block_bytes,
                pull.read_s,
                pull.verified_at,
            )
        )

    def _fail(self, pull: Pull, reason: str, detail: str) -> None:
        """It settles at once where nothing is under way into its blocks."""
        pull.reported, settled = True, not pull.is_written
        if settled:
            del self._pulls[pull.pull_id]
        self._emit(PullFailed(pull.pull_id, reason, detail, settled, pull.num_verified, pull.is_complete))

    def _fail_all(self, reason: str, detail: str) -> None:
        for pull in list(self._pulls.values()):
            if not pull.reported:
                self._fail(pull, reason, detail)

    def _settle(self, pull: Pull) -> None:
        del self._pulls[pull.pull_id]
        self._emit(PullSettled(pull.pull_id))

    def _end_pull(self, pull_id: int, reason: str, detail: str) -> None:
        pull = self._pulls.get(pull_id)
        if pull is not None and not pull.reported:
            self._fail(pull, reason, detail)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for pull in list(self._pulls.values()):
            if not pull.reported and pull.is_late(now):
                self._fail(pull, "deadline", f"no end after {now - pull.started:.3f} s")
        if self._state is LinkState.PROBING and now > self._probe_deadline:
            self._lose(TransferError("error", f"the self-test read did not end within {PROBE_DEADLINE_S:g} s"))

    def _emit(self, event: LinkEvent | None) -> None:
        assert event is not None
        self._owner.emit(event, self._status.transport if self._status else "")
