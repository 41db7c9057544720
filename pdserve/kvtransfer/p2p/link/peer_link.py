"""One thread per connected engine: it connects, self-tests, runs the pulls, and knows when memory
is quiet.

This thread makes all calls that concern one peer. So a peer is never added twice at once, and a
slow or frozen one holds up nobody else. `link_pulls.py` knows what is read for which pull.
`rank_receiver.py` makes the links, and knows which link a ticket belongs to and who listens.

    link:  IDLE -connect-> PROBING -self-test-> CONNECTED -error, disconnect-> DRAINING
           -all reads ended-> IDLE

When are bytes quiet? A read that has ended (`check` said True) writes no more. A read that was
given up is kept and checked until it ends. Releasing a NIXL handle would return at once while bytes
still land (tried over TCP: 419 of 512 MiB at the release, all of them 0.3 s later). A frozen peer
never reports an error. So after SEVER_AFTER_S the connections to the peer are cut
(`TransferAgent.sever`), which ends its reads with an error.

A read that *raised*, in the post or later, may have had several requests under way on several
lanes, of which one failed. So it counts as quiet only after the link has drained: every other read
has ended, the connections are cut, the peer is removed, and QUIET_AFTER_REMOVAL_S has passed. That
time covers UCX's progress thread, which finishes the close. (Removing a living peer does not end
what is under way.) So a lost peer's pulls are reported at once as unsettled, and settle later.

Tried: a peer killed in the middle of 512 MiB reads, 8 times over TCP and 3 over CMA. The report
took 50 to 110 ms, and not one byte landed after it, let alone after settling. Connections cut in
the middle of 64 MiB, with the link down and while bytes flowed: nothing landed after the error.
"""

import ctypes
import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from pdserve.background.threads import KeptThread
from pdserve.kvtransfer.connector import PullDone, PullFailed, PullSettled
from pdserve.kvtransfer.p2p.connection import Connection, OwnKVCache
from pdserve.kvtransfer.p2p.link.flights import Flights
from pdserve.kvtransfer.p2p.link.link_pulls import LinkPulls
from pdserve.kvtransfer.p2p.link.pull import Pull
from pdserve.kvtransfer.p2p.link.self_test import SelfTest
from pdserve.kvtransfer.transport.agent import TransferAgent, TransferError
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta, Ticket

logger = logging.getLogger(__name__)

QUIET_AFTER_REMOVAL_S = 0.05
SEVER_AFTER_S = 30.0
MIN_SLEEP_S = 30e-6
MAX_SLEEP_S = 5e-3
PR_SET_TIMERSLACK = 29  # Linux
SLEEP_SHARE = 0.02
FAULT_PAUSE_S = 0.1

LinkEvent = PullDone | PullFailed | PullSettled | PeerStatus


class LinkState(enum.Enum):
    IDLE = "idle"
    PROBING = "probing"
    CONNECTED = "connected"
    DRAINING = "draining"


class Owner(Protocol):
    """The receiver, as its links see it."""

    def emit(self, event: LinkEvent, transport: str) -> None: ...

    def retire(self, link: "PeerLink") -> bool:
        """Forget the link, unless a command came in. Returns True if its thread may end."""
        ...


class PeerLink:
    """The connection to one incarnation of one engine. `connect`, `disconnect`, `begin`, `extend`,
    `complete`, `cancel` and `fail` only enqueue.

    pulls: the pulls of this link. Only the link's thread uses it; tests may look at it.
    """

    def __init__(
        self, agent: TransferAgent, own: OwnKVCache, owner: Owner, meta: KVCacheMeta
    ) -> None:
        self.meta = meta
        self.status: PeerStatus | None = None
        self._agent = agent
        self._own = own
        self._owner = owner
        self._state = LinkState.IDLE
        self._connection: Connection | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._flights = Flights(agent, lambda: self._state is LinkState.DRAINING, self.lose)
        self._self_test = SelfTest(agent, self._flights, self.lose)
        self.pulls = LinkPulls(agent, self._flights, self)
        self._unquiet_since: float | None = None  # since when reads run that nobody waits for
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
        """Pass on a newer ticket that does not cover the whole prompt yet."""
        self._enqueue(lambda: self.pulls.extend(pull_id, ticket))

    def complete(self, pull_id: int, ticket: Ticket, deadline: float) -> None:
        now = time.monotonic()
        self._enqueue(lambda: self.pulls.complete(pull_id, ticket, deadline, now))

    def cancel(self, pull_id: int) -> None:
        self.fail(pull_id, "cancelled", "cancelled by the caller")

    def fail(self, pull_id: int, reason: str, detail: str) -> None:
        """End a pull whose end was not reported yet."""
        self._enqueue(lambda: self.pulls.end(pull_id, reason, detail))

    def _enqueue(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def has_commands(self) -> bool:
        return bool(self._commands)

    # From here on, the link's thread calls.

    def _run(self) -> None:
        # applies to this thread, whose sleeps would otherwise end 50 us late
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        if self._own.kv_cache.device.type == "cuda":
            # UCX needs the KV cache's context current where it is called
            torch.cuda.set_device(self._own.kv_cache.device)
        try:
            self._turn()
            while not (
                self._leaving and self._state is LinkState.IDLE and self._owner.retire(self)
            ):
                self._wait()
                self._turn()
        except Exception as error:  # a bug here must not leave pulls without an answer
            self.lose(TransferError("error", f"internal: {error!r}"))
            raise

    def _turn(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._flights.check()
        self.pulls.check_deadlines()
        if self._state is LinkState.PROBING:
            self._self_test.check_deadline()
        self._check_quiet()
        if self._state is LinkState.DRAINING and not self._flights:
            self._finish_drain()

    def _wait(self) -> None:
        """Sleep for a share of the youngest read's age, so that waiting costs little and adds
        little. Without reads, sleep until a command or a deadline comes."""
        if not self._flights:
            if self._state is LinkState.DRAINING:
                return  # an earlier turn broke off before it finished the drain
            deadline = self.pulls.next_deadline
            with self._changed:
                if not self._commands:
                    self._changed.wait(
                        None if deadline is None else max(0.0, deadline - time.monotonic())
                    )
            return
        age = time.monotonic() - self._flights.last_began
        sleep = min(max(age * SLEEP_SHARE, MIN_SLEEP_S), MAX_SLEEP_S)
        if sleep < 1e-3:
            time.sleep(sleep)
            return
        with self._changed:
            if not self._commands:
                self._changed.wait(sleep)

    def _begin(self, pull: Pull) -> None:
        is_open = self._state in (LinkState.CONNECTED, LinkState.PROBING) or self._reconnect
        self.pulls.begin(pull)
        if not is_open:
            self.pulls.end(
                pull.pull_id, "not-connected", f"{self.meta.engine_id} is {self._state.value}"
            )

    # Connecting and losing.

    def _connect(self) -> None:
        self._leaving = False
        if self._state is LinkState.DRAINING:
            self._reconnect = True
        elif self._state is LinkState.CONNECTED:
            self.emit(self.status)
        elif self._state is LinkState.IDLE:
            self._open()

    def _open(self) -> None:
        try:
            wake = partial(self._enqueue, self.pulls.go_on)
            self._connection = Connection(self._agent, self._own, self.meta, wake)
        except TransferError as error:
            self.pulls.fail_all("not-connected", str(error))
            self._report(connected=False, detail=str(error))
            return
        self._state = LinkState.PROBING
        self._self_test.run(self._connection, self._connected)

    def _connected(self, transport: str, bytes_per_s: float) -> None:
        self._state = LinkState.CONNECTED
        self._report(connected=True, transport=transport, bytes_per_s=bytes_per_s)
        self.pulls.go_on()

    def _report(
        self, connected: bool, transport: str = "", bytes_per_s: float = 0.0, detail: str = ""
    ) -> None:
        self.status = PeerStatus(
            engine_id=self.meta.engine_id,
            incarnation=self.meta.incarnation,
            connected=connected,
            transport=transport,
            bytes_per_s=bytes_per_s,
            detail=detail,
        )
        self.emit(self.status)

    def _disconnect(self) -> None:
        self._leaving = True
        self._reconnect = False
        self.pulls.fail_all("peer-lost", "disconnected")
        self.lose(TransferError("peer-lost", "disconnected"))

    def lose(self, error: TransferError) -> None:
        """Fail everything and drain. Data that is complete is quiet. Data under way settles when
        the link has drained."""
        if self._state not in (LinkState.PROBING, LinkState.CONNECTED):
            return
        self._state = LinkState.DRAINING
        self.pulls.fail_all(error.reason, str(error))
        self._report(connected=False, detail=str(error))

    def _finish_drain(self) -> None:
        connection = self._connection
        self._connection = None
        assert connection is not None
        is_quiet = self.pulls.is_quiet
        if not is_quiet:
            connection.sever()
        connection.close()
        if not is_quiet:
            time.sleep(QUIET_AFTER_REMOVAL_S)
        self.pulls.settle_all(connection)
        self._state = LinkState.IDLE
        if self._reconnect:
            self._reconnect = False
            self._open()

    def _check_quiet(self) -> None:
        """Cut off a peer whose reads were given up long ago and do not end."""
        now = time.monotonic()
        if not (self._flights and (self._state is LinkState.DRAINING or self.pulls.are_given_up)):
            self._unquiet_since = None
        elif self._unquiet_since is None:
            self._unquiet_since = now
        elif now > self._unquiet_since + SEVER_AFTER_S and self._connection is not None:
            self._unquiet_since = None
            logger.warning("reads from %s do not end: cutting its connections", self.meta.engine_id)
            self._connection.sever()

    # For `pulls`.

    @property
    def is_connected(self) -> bool:
        return self._state is LinkState.CONNECTED

    @property
    def connection(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def emit(self, event: LinkEvent | None) -> None:
        assert event is not None
        self._owner.emit(event, self.status.transport if self.status else "")
