"""KVSender over a TransferAgent: tickets, leases, and what peers said about them.

One thread listens for notices and leases while tickets are out, and sleeps without a timeout when none is. Knows no
peers: whoever got a ticket and the pool's description may read. Made by `build.py`, driven by the engine loop.

    ticket:  published -> done | rejected | expired (Unpinned each)  |  revoked (silent)
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from pdserve.engine.protocol import PoolMeta, RankPool, RequestKey, Ticket
from pdserve.kvtransfer.agent import TransferAgent, TransferError
from pdserve.kvtransfer.connector import Unpinned, Wake
from pdserve.kvtransfer.metrics import TransferMetrics
from pdserve.kvtransfer.notice import decode_notice

logger = logging.getLogger(__name__)

LISTEN_INTERVAL_S = 1e-3


class Sender:
    """See `connector.KVSender`. generations: the engine's table, read at `publish`."""

    def __init__(
        self,
        agent: TransferAgent,
        meta: PoolMeta,
        generations: np.ndarray,
        lease_s: float,
        wake: Wake,
        metrics: TransferMetrics,
    ) -> None:
        self._agent, self._meta, self._generations = agent, meta, generations
        self._lease_s, self._wake, self._metrics = lease_s, wake, metrics
        self._changed = threading.Condition()
        self._deadlines: dict[RequestKey, float] = {}
        self._heap: list[tuple[float, int, RequestKey]] = []
        self._counter = itertools.count()
        self._unpinned: list[Unpinned] = []
        self._closed = False
        agent.attach()
        self._thread = threading.Thread(target=self._listen, name="pdserve-kv-sender", daemon=True)
        self._thread.start()

    def meta(self) -> PoolMeta:
        return self._meta

    def add_ranks(self, ranks: Sequence[RankPool]) -> None:
        """The pools of an engine's other ranks, in order, whose blocks are published with ours; before anybody
        connects."""
        self._meta = msgspec.structs.replace(self._meta, ranks=(*self._meta.ranks, *ranks))

    def publish(self, key: RequestKey, block_ids: Sequence[int], num_tokens: int, content: bytes) -> Ticket:
        """See `KVSender.publish`. ValueError when the key has a ticket already or a block does not exist."""
        blocks = tuple(int(block) for block in block_ids)
        if any(not 0 <= block < self._meta.num_blocks for block in blocks):
            raise ValueError(f"block_ids must lie in [0, {self._meta.num_blocks}), not {blocks}")
        generations = tuple(int(self._generations[block]) for block in blocks)
        deadline = time.monotonic() + self._lease_s
        with self._changed:
            if key in self._deadlines:
                raise ValueError(f"{key} has a ticket already: revoke it first or publish under another attempt")
            self._deadlines[key] = deadline
            heapq.heappush(self._heap, (deadline, next(self._counter), key))
            self._changed.notify()
        self._metrics.tickets.labels("published").inc()
        return Ticket(
            engine_id=self._meta.engine_id,
            incarnation=self._meta.incarnation,
            key=key,
            content=content,
            block_ids=blocks,
            generations=generations,
            num_tokens=num_tokens,
            lease_s=self._lease_s,
        )

    def revoke(self, key: RequestKey) -> None:
        with self._changed:
            known = self._deadlines.pop(key, None) is not None
            self._unpinned = [event for event in self._unpinned if event.key != key]
        if known:
            self._metrics.tickets.labels("revoked").inc()

    def poll(self) -> list[Unpinned]:
        with self._changed:
            events, self._unpinned = self._unpinned, []
        return events

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._agent.detach()

    def _listen(self) -> None:
        while True:
            with self._changed:
                while not self._deadlines and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            if self._take_notices() + self._expire():
                self._wake()
            with self._changed:
                if not self._closed:
                    self._changed.wait(LISTEN_INTERVAL_S)

    def _take_notices(self) -> int:
        try:
            messages = self._agent.notices()
        except TransferError as error:
            logger.warning("KV notices could not be read: %s", error)
            return 0
        count = 0
        for message in messages:
            try:
                notice = decode_notice(message)
            except msgspec.DecodeError as error:
                logger.warning("a peer sent a notice that is none: %s", error)
                continue
            count += self._finish(Unpinned(notice.key, notice.outcome))
        return count

    def _expire(self) -> int:
        """The heap keeps entries of tickets that ended otherwise until their time comes; they match no deadline
        then."""
        now, due = time.monotonic(), []
        with self._changed:
            while self._heap and self._heap[0][0] <= now:
                deadline, _, key = heapq.heappop(self._heap)
                if self._deadlines.get(key) == deadline:
                    due.append(key)
        return sum(self._finish(Unpinned(key, "expired")) for key in due)

    def _finish(self, event: Unpinned) -> int:
        """1 when the ticket was out; a late notice about one that is not is dropped."""
        with self._changed:
            if self._deadlines.pop(event.key, None) is None:
                return 0
            self._unpinned.append(event)
        self._metrics.tickets.labels(event.outcome).inc()
        return 1
