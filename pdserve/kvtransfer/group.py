"""KVReceiver of a tensor parallel engine: one receiver a rank, each of which fills its own part of every block.

Ranks share block ids, so a pull is the same for all; each reads and verifies for itself. It is done when all are, and
failed when one is; it settles when no rank's memory can be written any more. Only then does the sender hear of it.
Knows no transport. Driven by rank 0's engine loop; the ranks' receivers tell nobody themselves (`build.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from pdserve.engine.protocol import PeerStatus, PoolMeta, Ticket
from pdserve.kvtransfer.connector import PullDone, PullFailed, PullSettled, ReceiverEvent
from pdserve.kvtransfer.receiver import Receiver


@dataclass
class _Pull:
    """unquiet: ranks whose memory may still be written. failed: was reported as failed."""

    ticket: Ticket
    unquiet: set[int]
    done: list[PullDone] = field(default_factory=list)
    failed: bool = False


class GroupReceiver:
    """See `connector.KVReceiver`; ranks: rank 0's first."""

    def __init__(self, ranks: Sequence[Receiver]) -> None:
        self._ranks = ranks
        self._pulls: dict[int, _Pull] = {}
        self._peers: dict[tuple[str, int], list[PeerStatus | None]] = {}

    def connect(self, meta: PoolMeta) -> None:
        for rank in self._ranks:
            rank.connect(meta)

    def disconnect(self, engine_id: str, incarnation: int) -> None:
        for rank in self._ranks:
            rank.disconnect(engine_id, incarnation)

    def pull(self, pull_id: int, ticket: Ticket, local_blocks: Sequence[int], skip: int, deadline_s: float) -> None:
        for rank in self._ranks:  # arguments that one refuses, the first refuses
            rank.pull(pull_id, ticket, local_blocks, skip, deadline_s)
        self._pulls[pull_id] = _Pull(ticket, set(range(len(self._ranks))))

    def reject(self, ticket: Ticket) -> None:
        self._ranks[0].reject(ticket)

    def cancel(self, pull_id: int) -> None:
        for rank in self._ranks:
            rank.cancel(pull_id)

    def poll(self) -> list[ReceiverEvent]:
        events: list[ReceiverEvent] = []
        for index, rank in enumerate(self._ranks):
            for event in rank.poll():
                if isinstance(event, PeerStatus):
                    events += self._peer(index, event)
                else:
                    events += self._take(index, event)
        return events

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()

    def _take(self, rank: int, event: PullDone | PullFailed | PullSettled) -> list[ReceiverEvent]:
        pull = self._pulls[event.pull_id]
        if not isinstance(event, PullFailed) or event.settled:
            pull.unquiet.discard(rank)
        if not pull.unquiet:
            del self._pulls[event.pull_id]
        if isinstance(event, PullFailed) and not pull.failed:
            pull.failed = True
            self.cancel(event.pull_id)
            self._ranks[0].tell("rejected", pull.ticket)
            return [replace(event, settled=not pull.unquiet, detail=f"rank {rank}: {event.detail}")]
        if isinstance(event, PullDone):
            pull.done.append(event)
        if pull.unquiet:
            return []
        if pull.failed:
            return [PullSettled(event.pull_id)]
        self._ranks[0].tell("done", pull.ticket)
        return [_sum_of(pull.done)]

    def _peer(self, rank: int, status: PeerStatus) -> list[ReceiverEvent]:
        """Connected when every rank is; a rank that is not speaks for all."""
        key = status.engine_id, status.incarnation
        known = self._peers.setdefault(key, [None] * len(self._ranks))
        known[rank] = status
        if not status.connected:
            return [msgspec.structs.replace(status, detail=f"rank {rank}: {status.detail}")]
        connected = [each for each in known if each is not None and each.connected]
        if len(connected) < len(known):
            return []
        transport = "+".join(sorted({each.transport for each in connected}))
        rate = sum(each.bytes_per_s for each in connected)
        return [msgspec.structs.replace(status, transport=transport, bytes_per_s=rate)]


def _sum_of(done: Sequence[PullDone]) -> PullDone:
    """Bytes and descriptors of all ranks, the time of the slowest."""
    return PullDone(
        done[0].pull_id,
        sum(each.num_bytes for each in done),
        sum(each.num_descriptors for each in done),
        "+".join(sorted({each.transport for each in done})),
        max(each.seconds for each in done),
    )
