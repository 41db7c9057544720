"""One rank's receiver over a TransferAgent: finds the link of a pull, and collects and counts the
links' events.

Knows which incarnation of each engine is the living one. `link/peer_link.py` handles what happens
on a link. Its only caller, `engine_receiver.py`, handles letters and combines what an engine's
ranks do for a pull. Made by `build.py`; no call waits for a transfer.
"""

import logging
import threading
import time

from pdserve.kvtransfer.connector import PullDone, PullFailed, ReceiverEvent, Wake
from pdserve.kvtransfer.p2p.connection import OwnKVCache, check_compatible
from pdserve.kvtransfer.p2p.link.peer_link import LinkEvent, PeerLink
from pdserve.kvtransfer.p2p.link.pull import Pull
from pdserve.kvtransfer.p2p.metrics import TransferMetrics
from pdserve.kvtransfer.p2p.ranges import BlockSizes
from pdserve.kvtransfer.transport.agent import TransferAgent
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta, Ticket

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0

_abandoned: list["RankReceiver"] = []
"""Receivers closed with reads that never ended. Freeing their agent or KV cache would free memory
that may still be written."""


class RankReceiver:
    """Implements the methods of `connector.KVReceiver` that concern one rank's memory. agent, own,
    links: public for tests, too."""

    def __init__(
        self, agent: TransferAgent, own: OwnKVCache, wake: Wake, metrics: TransferMetrics
    ) -> None:
        self.agent = agent
        self.own = own
        self._wake = wake
        self._metrics = metrics
        self._lock = threading.RLock()
        self._links: dict[tuple[str, int], PeerLink] = {}
        self._living: dict[str, int] = {}
        self._pulling: dict[int, PeerLink] = {}
        self._events: list[ReceiverEvent] = []
        self._closed = False
        agent.attach()

    @property
    def links(self) -> list[PeerLink]:
        """The links that have not retired."""
        with self._lock:
            return list(self._links.values())

    @property
    def home(self) -> int:
        """The home whose blocks it fills."""
        return self.own.memory.home

    @property
    def block_size(self) -> int:
        return self.own.layout.block_size

    @property
    def num_blocks(self) -> int:
        """Number of blocks of each home of the engine."""
        return self.own.kv_cache.num_blocks

    def connect(self, meta: KVCacheMeta) -> None:
        detail = check_compatible(self.own, self.agent.kind, meta)
        if detail:
            status = PeerStatus(
                engine_id=meta.engine_id,
                incarnation=meta.incarnation,
                connected=False,
                detail=detail,
            )
            self.emit(status, "")
            return
        with self._lock:
            known = self._living.get(meta.engine_id)
            if known is not None and known > meta.incarnation:
                return
            if known is not None and known < meta.incarnation:
                self.disconnect(meta.engine_id, known)
            self._living[meta.engine_id] = meta.incarnation
            key = (meta.engine_id, meta.incarnation)
            if key not in self._links:
                self._links[key] = PeerLink(self.agent, self.own, self, meta)
            self._links[key].connect()

    def disconnect(self, engine_id: str, incarnation: int) -> None:
        with self._lock:
            link = self._links.get((engine_id, incarnation))
            if link is not None:
                link.disconnect()

    def begin(
        self,
        pull_id: int,
        engine_id: str,
        incarnation: int,
        local_blocks: tuple[int, ...],
        skip: int,
        deadline_s: float,
    ) -> None:
        """Begin a pull into `local_blocks`, for a prompt's blocks from `skip` on. `extend` and
        `complete` give the source. deadline_s: see `KVReceiver.follow`.
        """
        with self._lock:
            refusal = self._refusal(engine_id, incarnation)
            if refusal is None:
                link = self._links[engine_id, incarnation]
                self._pulling[pull_id] = link
                sizes = BlockSizes(self.block_size, link.meta.block_size)
                link.begin(Pull(pull_id, sizes, skip, local_blocks, time.monotonic(), deadline_s))
                return
        self.emit(PullFailed(pull_id, *refusal, settled=True), "")

    def extend(self, pull_id: int, ticket: Ticket) -> None:
        """Pass a part to the link. May be called from any thread. A malformed ticket is dropped,
        because a part is a hint."""
        with self._lock:
            link = self._pulling.get(pull_id)
            if link is not None and not _malformed(ticket, link.meta):
                link.extend(pull_id, ticket)

    def complete(self, pull_id: int, ticket: Ticket, deadline_s: float) -> None:
        """Pass the complete ticket to the link. deadline_s counts from this call."""
        with self._lock:
            link = self._pulling.get(pull_id)
            if link is None:
                return
            detail = _malformed(ticket, link.meta)
            if not detail:
                link.complete(pull_id, ticket, time.monotonic() + deadline_s)
                return
            link.fail(pull_id, "error", detail)

    def _refusal(self, engine_id: str, incarnation: int) -> tuple[str, str] | None:
        """`(reason, detail)` if nothing can be pulled from this peer, else None."""
        living = self._living.get(engine_id)
        if living is not None and living != incarnation:
            return (
                "stale-incarnation",
                f"{engine_id} is incarnation {living}, the ticket's is {incarnation}",
            )
        if (engine_id, incarnation) not in self._links:
            return "not-connected", f"{engine_id} incarnation {incarnation} is not connected"
        return None

    def cancel(self, pull_id: int) -> None:
        with self._lock:
            link = self._pulling.get(pull_id)
            if link is not None:
                link.cancel(pull_id)

    def poll(self) -> list[ReceiverEvent]:
        with self._lock:
            events = self._events
            self._events = []
        return events

    def close(self) -> None:
        """Wait briefly for reads to end. If one does not end, the agent and its memory are kept
        until the process ends."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = list(self._links.values())
            for link in links:
                link.disconnect()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for link in links:
            link.thread.join(max(0.0, deadline - time.monotonic()))
        if any(link.thread.is_alive() for link in links):
            logger.warning("a read is still in flight at close: agent %s is kept", self.agent.name)
            _abandoned.append(self)
        else:
            self.agent.detach()

    def emit(self, event: LinkEvent, transport: str) -> None:
        """Take an event of a link. Called by links from their threads."""
        with self._lock:
            if (
                isinstance(event, PeerStatus)
                and self._living.get(event.engine_id, 0) > event.incarnation
            ):
                # the end of an old incarnation must not look like the end of the living one
                return
            if isinstance(event, PullDone | PullFailed):
                self._pulling.pop(event.pull_id, None)
            self._count(event, transport)
            self._events.append(event)
            wake = not self._closed
        if wake:
            self._wake()

    def retire(self, link: PeerLink) -> bool:
        with self._lock:
            if link.has_commands():
                return False
            self._links.pop((link.meta.engine_id, link.meta.incarnation), None)
            return True

    def _count(self, event: LinkEvent, transport: str) -> None:
        if isinstance(event, PullDone):
            self._metrics.transfers.labels(event.transport, "done").inc()
            self._metrics.bytes.labels(event.transport).inc(event.num_bytes)
            self._metrics.sizes.observe(event.num_bytes)
            self._metrics.early_bytes.inc(event.num_early_bytes)
            self._metrics.descriptors.labels(event.transport).inc(event.num_descriptors)
            self._metrics.seconds.observe(event.seconds)
        elif isinstance(event, PullFailed):
            self._metrics.transfers.labels(transport, event.reason).inc()
            if not event.settled:
                self._metrics.unsettled.inc()


def _malformed(ticket: Ticket, meta: KVCacheMeta) -> str:
    """Returns why the ticket cannot be one of this KV cache; "" if it can."""
    if len(ticket.generations) != len(ticket.block_ids):
        return (
            f"the ticket has {len(ticket.block_ids)} blocks and {len(ticket.generations)} "
            "generations"
        )
    if ticket.block_size != meta.block_size:
        return (
            f"the ticket's blocks have {ticket.block_size} tokens, the peer's KV cache "
            f"{meta.block_size}"
        )
    last = meta.num_homes - 1
    if not 0 <= ticket.home <= last:
        return f"the ticket's blocks are of home {ticket.home}, the peer's last home is {last}"
    if any(not 0 <= block < meta.num_blocks for block in ticket.block_ids):
        return f"the ticket names blocks outside the peer's KV cache of {meta.num_blocks}"
    return ""
