"""One thread per connected engine: connects, self-tests, reads blocks, verifies generations, and knows when memory is
quiet.

All calls that concern one peer are made by this thread, so a peer is never added twice at once and a slow or frozen
one holds up nobody else. It knows pulls and generations; which link a ticket belongs to and who listens is
`receiver.py`.

    link:  IDLE -connect-> PROBING -self-test-> CONNECTED -error, disconnect-> DRAINING -all reads ended-> IDLE
    pull:  waiting -> reading -> verifying -> done | failed (settled or not) ... -> settled

When bytes are quiet. A read that ended (`check` said True) writes no more. A read that was given up is kept and
checked until it ends, however long: releasing a NIXL handle returns at once while bytes go on landing (tried, TCP: 419
of 512 MiB at the release, all of them 0.3 s later), and a frozen peer never errs. A read that *raised*, in the post or
later, may have had several requests under way on several lanes, of which one failed, so it counts as quiet only after
the link has drained: every other read has ended, the peer is removed (UCX closes the endpoint by force, which cancels
what is left), and QUIET_AFTER_REMOVAL_S has passed, which covers UCX's progress thread finishing the close. So a lost
peer's pulls are reported at once, unsettled, and settle after. Tried: peer killed in the middle of 512 MiB reads, 8
times over TCP and 3 over CMA: 50 to 110 ms to the report, and not one byte landed after it, let alone after settling.
"""

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from pdserve.engine.protocol import PeerStatus, PoolMeta, RequestKey, Ticket
from pdserve.kvtransfer.agent import Handle, TransferAgent, TransferError
from pdserve.kvtransfer.connection import Connection, OwnPool, release_all
from pdserve.kvtransfer.connector import PullDone, PullFailed, PullSettled
from pdserve.kvtransfer.notice import Notice, Outcome, encode_notice
from pdserve.kvtransfer.ranges import count_descriptors, order_pairs

logger = logging.getLogger(__name__)

PROBE_DEADLINE_S = 10.0
QUIET_AFTER_REMOVAL_S = 0.05
MIN_SLEEP_S, MAX_SLEEP_S = 30e-6, 5e-3
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
    """One pull on its way. times: monotonic. reads: data reads that have not ended. reported: its end was told
    already."""

    pull_id: int
    ticket: Ticket
    skip: int
    local_blocks: tuple[int, ...]
    deadline: float
    started: float
    num_descriptors: int = 0
    reads: int = 0
    reported: bool = False

    @property
    def remote_blocks(self) -> tuple[int, ...]:
        return self.ticket.block_ids[self.skip :]


@dataclass(eq=False)
class Flight:
    """A posted read. done: what to do when it ended well; nothing once the link drains."""

    handle: Handle
    done: Callable[[], None]
    prepared: tuple[Any, ...] = ()
    posted: float = field(default_factory=time.monotonic)


class Owner(Protocol):
    """What a link needs of its receiver."""

    def emit(self, event: LinkEvent, transport: str) -> None: ...

    def retire(self, link: "PeerLink") -> bool:
        """Forget the link unless a command came in; True when its thread may end."""
        ...


class PeerLink:
    """The connection to one incarnation of one engine. `connect`, `disconnect`, `pull`, `cancel`, `tell` only
    enqueue. tells: how pulls end is told to the sender; False where others must end with them (group.py)."""

    def __init__(self, agent: TransferAgent, own: OwnPool, owner: Owner, meta: PoolMeta, tells: bool = True) -> None:
        self.meta, self._tells = meta, tells
        self._agent, self._own, self._owner = agent, own, owner
        self._state = LinkState.IDLE
        self._connection: Connection | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._flights: list[Flight] = []
        self._pulls: dict[int, Pull] = {}
        self._verifying = False
        self._to_verify: list[Pull] = []
        self._probe_deadline = self._probe_started = 0.0
        self._status: PeerStatus | None = None
        self._reconnect = False
        self._leaving = False
        self.thread = threading.Thread(target=self._run, name=f"pdserve-kv-{meta.engine_id}", daemon=True)
        self.thread.start()

    # Called from any thread.

    def connect(self) -> None:
        self._enqueue(self._connect)

    def disconnect(self) -> None:
        self._enqueue(self._disconnect)

    def pull(self, pull: Pull) -> None:
        self._enqueue(lambda: self._begin(pull))

    def cancel(self, pull_id: int) -> None:
        self._enqueue(lambda: self._cancel(pull_id))

    def tell(self, outcome: Outcome, key: RequestKey) -> None:
        self._enqueue(lambda: self._notify(Notice(outcome, key)))

    def _enqueue(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def has_commands(self) -> bool:
        return bool(self._commands)

    # The link's thread, from here on.

    def _run(self) -> None:
        if self._own.pool.is_cuda:
            torch.cuda.set_device(self._own.pool.device)  # UCX needs the pool's context current where it is called
        while True:
            try:
                self._turn()
            except Exception as error:  # a bug here must not leave pulls without an answer
                logger.exception("KV link to %s failed", self.meta.engine_id)
                self._lose(TransferError("error", f"internal: {error!r}"))
                time.sleep(FAULT_PAUSE_S)
            if self._leaving and self._state is LinkState.IDLE and self._owner.retire(self):
                return
            self._wait()

    def _turn(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._check_flights()
        self._check_deadlines()
        if self._state is LinkState.DRAINING and not self._flights:
            self._finish_drain()

    def _wait(self) -> None:
        """Sleeps a share of the youngest read's age, so that waiting costs little and adds little; without reads, for
        a command."""
        if not self._flights:
            if self._state is LinkState.DRAINING:
                return  # a turn broke off before it finished the drain
            with self._changed:
                while not self._commands:
                    self._changed.wait()
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
                ended = self._agent.check(flight.handle)
            except TransferError as error:
                self._end(flight)
                self._lose(error)
                continue
            if ended:
                self._end(flight)
                if self._state is not LinkState.DRAINING:
                    flight.done()

    def _post(self, handle: Handle, done: Callable[[], None], prepared: tuple[Any, ...] = ()) -> None:
        flight = Flight(handle, done, prepared)
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
        steps: list[Callable[[], None]] = [partial(self._agent.release, flight.handle)]
        steps += [partial(self._agent.release_prepared, prepared) for prepared in flight.prepared]
        release_all(steps)

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
            self._connection = connection = Connection(self._agent, self._own, self.meta)
        except TransferError as error:
            self._fail_all("not-connected", str(error))
            self._report(connected=False, detail=str(error))
            return
        self._state = LinkState.PROBING
        self._probe_deadline = time.monotonic() + PROBE_DEADLINE_S
        mark = self._agent.transport_mark()
        self._probe(connection, [*connection.probes, connection.probes[0]], mark)

    def _probe(self, connection: Connection, probes: Sequence[Any], mark: int) -> None:
        """Self-test reads, one after another. The first of each of the peer's ranks sets up endpoints; the last of all,
        from a rank that was read before, is the timed one.
        """
        if not probes:
            self._connected(connection, mark)
            return
        try:
            handle = self._agent.make_read(connection.probe_local, [0], probes[0], [0])
        except TransferError as error:
            self._lose(error)
            return
        self._probe_started = time.monotonic()
        self._post(handle, lambda: self._probe(connection, probes[1:], mark))

    def _connected(self, connection: Connection, mark: int) -> None:
        seconds = max(time.monotonic() - self._probe_started, 1e-9)
        transport = self._agent.transport_since(mark, connection.memory)
        self._state = LinkState.CONNECTED
        self._report(connected=True, transport=transport, bytes_per_s=connection.probe_bytes / seconds)
        for pull in list(self._pulls.values()):
            self._start(pull)

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
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        unsettled = [pull for pull in self._pulls.values() if pull.reads]
        if unsettled:
            time.sleep(QUIET_AFTER_REMOVAL_S)
        for pull in unsettled:
            self._settle(pull)
        self._state = LinkState.IDLE
        if self._reconnect:
            self._reconnect = False
            self._open()

    # Pulls.

    def _begin(self, pull: Pull) -> None:
        self._pulls[pull.pull_id] = pull
        if self._state is LinkState.CONNECTED:
            self._start(pull)
        elif self._state is not LinkState.PROBING and not self._reconnect:
            self._fail(pull, "not-connected", f"{self.meta.engine_id} is {self._state.value}", settled=True)

    def _start(self, pull: Pull) -> None:
        connection = self._connection
        if connection is None or self._state is not LinkState.CONNECTED:
            return  # lost by an earlier one of the waiting pulls, which failed this one too
        if not pull.local_blocks:
            self._finish(pull)
            return
        local_ids, remote_ids = order_pairs(pull.local_blocks, pull.remote_blocks)
        descriptors = count_descriptors(local_ids, remote_ids, connection.reads_whole_blocks)
        pull.num_descriptors = len(connection.sources) * descriptors
        handles: list[Handle] = []
        try:
            for source in connection.sources:
                handles.append(self._agent.make_read(source.local, local_ids, source.remote, remote_ids))
        except TransferError as error:
            release_all([partial(self._agent.release, handle) for handle in handles])
            self._fail(pull, "error", str(error), settled=True)
            return
        pull.reads = len(handles)
        for index, handle in enumerate(handles):
            if self._state is not LinkState.CONNECTED:  # lost in the post of one before
                release_all([partial(self._agent.release, unposted) for unposted in handles[index:]])
                return
            self._post(handle, lambda: self._data_done(pull))

    def _data_done(self, pull: Pull) -> None:
        pull.reads -= 1
        if pull.reads:
            return
        if pull.reported:
            self._settle(pull)
            return
        self._to_verify.append(pull)
        self._verify()

    def _verify(self) -> None:
        """Read the generations of all pulls whose data is complete, in one read, posted after the last byte of each."""
        batch = [pull for pull in self._to_verify if not pull.reported]
        if self._verifying or not batch:
            return
        assert self._connection is not None
        self._to_verify = []
        first = min(min(pull.remote_blocks) for pull in batch)
        last = max(max(pull.remote_blocks) for pull in batch)
        self._connection.generations[first : last + 1] = -1
        try:
            here, there = self._connection.prepare_generations(first, last)
            handle = self._agent.make_read(here, [0], there, [0])
        except TransferError as error:
            self._lose(error)
            return
        self._verifying = True
        self._post(handle, lambda: self._verified(batch), (here, there))

    def _verified(self, batch: list[Pull]) -> None:
        assert self._connection is not None
        self._verifying = False
        table = self._connection.generations.numpy()
        for pull in batch:
            if pull.reported:
                continue
            blocks = np.asarray(pull.remote_blocks)
            stale = blocks[table[blocks] != np.asarray(pull.ticket.generations[pull.skip :])]
            if len(stale):
                self._fail(pull, "stale-generation", f"{len(stale)} blocks were reused, e.g. {stale[0]}", settled=True)
            else:
                self._finish(pull)
        if self._state is LinkState.CONNECTED:
            self._verify()

    def _finish(self, pull: Pull) -> None:
        del self._pulls[pull.pull_id]
        assert self._connection is not None and self._status is not None
        num_bytes = len(pull.local_blocks) * sum(source.span.num_bytes for source in self._connection.sources)
        seconds = time.monotonic() - pull.started
        self._emit(PullDone(pull.pull_id, num_bytes, pull.num_descriptors, self._status.transport, seconds))
        self._tell("done", pull)

    def _fail(self, pull: Pull, reason: str, detail: str, settled: bool) -> None:
        """Also tells the sender, which may unpin at once: it is only read, and nobody will use what still arrives."""
        pull.reported = True
        if settled:
            del self._pulls[pull.pull_id]
        self._emit(PullFailed(pull.pull_id, reason, detail, settled))
        self._tell("rejected", pull)

    def _fail_all(self, reason: str, detail: str) -> None:
        for pull in list(self._pulls.values()):
            if not pull.reported:
                self._fail(pull, reason, detail, settled=not pull.reads)

    def _settle(self, pull: Pull) -> None:
        del self._pulls[pull.pull_id]
        self._emit(PullSettled(pull.pull_id))

    def _cancel(self, pull_id: int) -> None:
        pull = self._pulls.get(pull_id)
        if pull is not None and not pull.reported:
            self._fail(pull, "cancelled", "cancelled by the caller", settled=not pull.reads)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for pull in list(self._pulls.values()):
            if not pull.reported and now > pull.deadline:
                self._fail(pull, "deadline", f"no end after {now - pull.started:.3f} s", settled=not pull.reads)
        if self._state is LinkState.PROBING and now > self._probe_deadline:
            self._lose(TransferError("error", f"the self-test read did not end within {PROBE_DEADLINE_S:g} s"))

    def _tell(self, outcome: Outcome, pull: Pull) -> None:
        if self._tells:
            self._notify(Notice(outcome, pull.ticket.key))

    def _notify(self, notice: Notice) -> None:
        if self._state is not LinkState.CONNECTED or self._connection is None:
            return
        try:
            self._agent.notify(self._connection.peer, encode_notice(notice))
        except TransferError as error:
            self._lose(error)

    def _emit(self, event: LinkEvent | None) -> None:
        assert event is not None
        self._owner.emit(event, self._status.transport if self._status else "")
