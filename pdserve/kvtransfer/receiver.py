"""KVReceiver over a TransferAgent: finds the link of a ticket, collects the links' events, counts them.

Knows which incarnation of each engine is the living one. What happens on a link is `peer_link.py`. Whenever a pull
fails on a connected link, the sender is told "rejected". Made by `build.py`, driven by the engine loop; no call waits
for a transfer.
"""

import logging
import threading
import time
from collections.abc import Sequence

from pdserve.engine.protocol import PeerStatus, PoolMeta, Ticket
from pdserve.kvtransfer.agent import TransferAgent
from pdserve.kvtransfer.connection import OwnPool, check_compatible
from pdserve.kvtransfer.connector import PullDone, PullFailed, ReceiverEvent, Wake
from pdserve.kvtransfer.metrics import TransferMetrics
from pdserve.kvtransfer.notice import Outcome
from pdserve.kvtransfer.peer_link import LinkEvent, PeerLink, Pull

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0

_abandoned: list["Receiver"] = []
"""Closed with reads that never ended: freeing agent or pool would free memory that may still be written."""


class Receiver:
    """See `connector.KVReceiver`. tells: see `peer_link.PeerLink`."""

    def __init__(
        self, agent: TransferAgent, own: OwnPool, wake: Wake, metrics: TransferMetrics, tells: bool = True
    ) -> None:
        self._agent, self._own, self._wake, self._metrics, self._tells = agent, own, wake, metrics, tells
        self._lock = threading.RLock()
        self._links: dict[tuple[str, int], PeerLink] = {}
        self._living: dict[str, int] = {}
        self._pulling: dict[int, PeerLink] = {}
        self._events: list[ReceiverEvent] = []
        self._closed = False
        agent.attach()

    def connect(self, meta: PoolMeta) -> None:
        detail = check_compatible(self._own, self._agent.kind, meta)
        if detail:
            status = PeerStatus(engine_id=meta.engine_id, incarnation=meta.incarnation, connected=False, detail=detail)
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
                self._links[key] = PeerLink(self._agent, self._own, self, meta, self._tells)
            self._links[key].connect()

    def disconnect(self, engine_id: str, incarnation: int) -> None:
        with self._lock:
            link = self._links.get((engine_id, incarnation))
            if link is not None:
                link.disconnect()

    def pull(self, pull_id: int, ticket: Ticket, local_blocks: Sequence[int], skip: int, deadline_s: float) -> None:
        """See `KVReceiver.pull`; deadline_s counts from this call. ValueError when the arguments do not fit
        together."""
        blocks = tuple(int(block) for block in local_blocks)
        if not 0 <= skip <= len(ticket.block_ids) or len(blocks) != len(ticket.block_ids) - skip:
            raise ValueError(
                f"local_blocks must hold len(ticket.block_ids) - skip = {len(ticket.block_ids)} - {skip} blocks, "
                f"not {len(blocks)}"
            )
        if any(not 0 <= block < self._own.pool.shape[0] for block in blocks):
            raise ValueError(f"local_blocks must lie in [0, {self._own.pool.shape[0]}), not {blocks}")
        now = time.monotonic()
        with self._lock:
            refusal = self._refusal(ticket)
            if refusal is None:
                link = self._links[ticket.engine_id, ticket.incarnation]
                self._pulling[pull_id] = link
                link.pull(Pull(pull_id, ticket, skip, blocks, now + deadline_s, now))
                return
        reason, detail = refusal
        self.emit(PullFailed(pull_id, reason, detail, settled=True), "")

    def _refusal(self, ticket: Ticket) -> tuple[str, str] | None:
        """`(reason, detail)` when the ticket cannot be pulled from any link, else None."""
        living = self._living.get(ticket.engine_id)
        if living is not None and living != ticket.incarnation:
            return (
                "stale-incarnation",
                f"{ticket.engine_id} is incarnation {living}, the ticket's is {ticket.incarnation}",
            )
        link = self._links.get((ticket.engine_id, ticket.incarnation))
        if link is None:
            return "not-connected", f"{ticket.engine_id} incarnation {ticket.incarnation} is not connected"
        if len(ticket.generations) != len(ticket.block_ids):
            return "error", f"the ticket has {len(ticket.block_ids)} blocks and {len(ticket.generations)} generations"
        if any(not 0 <= block < link.meta.num_blocks for block in ticket.block_ids):
            return "error", f"the ticket names blocks outside the peer's pool of {link.meta.num_blocks}"
        return None

    def reject(self, ticket: Ticket) -> None:
        self.tell("rejected", ticket)

    def tell(self, outcome: Outcome, ticket: Ticket) -> None:
        """Tell the sender what became of a ticket (best effort)."""
        with self._lock:
            link = self._links.get((ticket.engine_id, ticket.incarnation))
            if link is not None:
                link.tell(outcome, ticket.key)

    def cancel(self, pull_id: int) -> None:
        with self._lock:
            link = self._pulling.get(pull_id)
            if link is not None:
                link.cancel(pull_id)

    def poll(self) -> list[ReceiverEvent]:
        with self._lock:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Waits briefly for reads to end. If one does not, the agent and its memory are kept until the process ends."""
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
            logger.warning("a read is still in flight at close: agent %s is kept", self._agent.name)
            _abandoned.append(self)
        else:
            self._agent.detach()

    def emit(self, event: LinkEvent, transport: str) -> None:
        """Called by links from their threads."""
        with self._lock:
            if isinstance(event, PeerStatus) and self._living.get(event.engine_id, 0) > event.incarnation:
                return  # the end of a superseded incarnation must not look like the end of the living one
            if isinstance(event, PullDone | PullFailed):
                self._pulling.pop(event.pull_id, None)
            self._events.append(event)
            wake = not self._closed
        self._count(event, transport)
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
            self._metrics.descriptors.labels(event.transport).inc(event.num_descriptors)
            self._metrics.seconds.observe(event.seconds)
        elif isinstance(event, PullFailed):
            self._metrics.transfers.labels(transport, event.reason).inc()
            if not event.settled:
                self._metrics.unsettled.inc()
