"""Introduces workers to each other: every decode worker connects to every KV cache that it may pull
from, before requests need it.

    unknown -> asked (ConnectPeer sent) -> connected
                 ^  |                         |
                 |  +--- not connected <------+       asked again after a growing delay

Any other pair is connected when a prefix should first be fetched that way (`wish`). The worker may
close such a link. Once the pair hands prompts over, it is asked for again, and kept.

A lost stream may be a problem of this router alone, while other routers use the pair. So only a
worker that has left the running set is disconnected. After this router's last leg there, such a
worker may still hand over other routers' requests while its drain lasts, so it is disconnected when
that is over. Knows no requests. Called by `router.fleet.fleet` when workers come and go, by
`intake` when they report, and by `watch` at its tick.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdserve.protocol.commands import Command, ConnectPeer, DisconnectPeer
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta
from pdserve.router.fleet.worker_state import WorkerState

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0

PairKey = tuple[str, str, int]


@dataclass(slots=True)
class _Pair:
    ask_at: float
    retry_s: float = FIRST_RETRY_S
    logged: str | None = None  # reason of the refusal that was logged last


class Introducer:
    def __init__(
        self, send: Callable[[WorkerState, Command], None], now: Callable[[], float]
    ) -> None:
        self._send = send
        self._now = now
        self._pairs: dict[PairKey, _Pair] = {}
        self._wished: set[PairKey] = set()  # pairs that are connected only to fetch prefixes
        self._lost: dict[str, KVCacheMeta] = {}
        self._drained: dict[str, float] = {}  # times to disconnect workers, by id
        # the earliest time at which a pair may be due; before it, the pairs need no look
        self._look_at = -math.inf

    def introduce(self, workers: Iterable[WorkerState]) -> None:
        """Asks every pair that is not connected and whose time has come."""
        if self._now() < self._look_at:
            return
        self._look_at = math.inf
        workers = list(workers)
        prefills = [worker for worker in workers if worker.can_prefill and not worker.draining]
        for decode in workers:
            if decode.can_decode and not decode.draining:
                for prefill in prefills:
                    self._meet(prefill, decode)

    def changed(self) -> None:
        """Notes that other pairs may be wanted: a role has changed, or a drain has ended early."""
        self._look_at = -math.inf

    def wish(self, worker: WorkerState, holder: WorkerState) -> None:
        """Asks the worker to connect, so that it can fetch prefixes from the holder.

        The request that wished for it does not wait.
        """
        meta = holder.kv_cache
        if meta is not None and not worker.is_connected_to(holder):
            self._ask(worker, meta, for_prefixes=True)

    def reported(self, decode: WorkerState, status: PeerStatus) -> None:
        """Takes a worker's answer. A refusal is asked again, each time after twice the delay.

        A link for prefixes concerns only the router that wished for it.
        """
        key = (decode.worker_id, status.engine_id, status.incarnation)
        if status.connected:
            pair = self._pairs.pop(key, None)
            if pair is not None and pair.logged is not None:
                logger.info("worker %s can pull from %s now", decode.worker_id, status.engine_id)
            if key in self._wished:  # by now it may be a pair for hand-offs
                self._look_at = -math.inf
            return
        if status.for_prefixes and key not in self._wished:
            return
        pair = self._pairs.setdefault(key, _Pair(0.0))
        pair.ask_at = self._now() + pair.retry_s
        pair.retry_s = min(2 * pair.retry_s, LAST_RETRY_S)
        self._look_at = min(self._look_at, pair.ask_at)
        if pair.logged == status.detail:  # once for each reason, as pairs are asked again for ever
            return
        pair.logged = status.detail
        names = decode.worker_id, status.engine_id, status.detail or "it gives no reason"
        if key in self._wished:
            logger.info("worker %s cannot fetch prefixes from %s: %s", *names)
        else:
            logger.warning("worker %s cannot pull from %s: %s; it is asked again", *names)

    def joined(self, worker: WorkerState, workers: Iterable[WorkerState]) -> None:
        self._lost.pop(worker.worker_id, None)
        self._drained.pop(worker.worker_id, None)
        if worker.draining:
            return
        for other in workers:  # only the worker's own pairs, as thousands may join in a row
            if worker.can_decode and other.can_prefill and not other.draining:
                self._meet(other, worker)
            if worker.can_prefill and other.can_decode and not other.draining:
                self._meet(worker, other)

    def lost(self, gone: WorkerState, remaining: Iterable[WorkerState]) -> None:
        """Notes that a worker's stream is gone. The worker may come back, or turn out to have
        left."""
        meta = gone.kv_cache
        if meta is not None:
            self._lost[gone.worker_id] = meta
            for decode in remaining:
                decode.peers.pop((meta.engine_id, meta.incarnation), None)
        engine = meta.engine_id if meta is not None else None
        self._pairs = {
            k: pair for k, pair in self._pairs.items() if k[0] != gone.worker_id and k[1] != engine
        }
        self._wished = {k for k in self._wished if k[0] != gone.worker_id and k[1] != engine}

    def left(self, worker_id: str, remaining: Iterable[WorkerState]) -> None:
        """Disconnects a lost worker that has left for good from everyone, whatever its role is."""
        if worker_id not in self._drained:
            self._disconnect(worker_id, remaining)

    def drained(self, worker_id: str, until: float) -> None:
        """Schedules the end of a worker's connections.

        It leaves and has no more work of this router, but until then it may have work of others.
        """
        self._drained[worker_id] = until

    def disconnect_drained(self, remaining: Iterable[WorkerState]) -> None:
        """Disconnects the drained workers whose time has come."""
        for worker_id in [name for name, until in self._drained.items() if self._now() >= until]:
            del self._drained[worker_id]
            self._disconnect(worker_id, remaining)

    def _disconnect(self, worker_id: str, remaining: Iterable[WorkerState]) -> None:
        meta = self._lost.pop(worker_id, None)
        for peer in remaining:
            if meta is not None and peer.kv_cache is not None:
                self._send(
                    peer, DisconnectPeer(engine_id=meta.engine_id, incarnation=meta.incarnation)
                )

    def _meet(self, prefill: WorkerState, decode: WorkerState) -> None:
        meta = prefill.kv_cache
        if meta is None or not decode.hands_over or not may_pair(prefill, decode):
            return
        key = decode.worker_id, meta.engine_id, meta.incarnation
        if not decode.is_connected_to(prefill):
            self._ask(decode, meta)
        elif key in self._wished:
            self._wished.discard(key)
            self._send(decode, ConnectPeer(meta=meta))

    def _ask(self, decode: WorkerState, meta: KVCacheMeta, for_prefixes: bool = False) -> None:
        key = decode.worker_id, meta.engine_id, meta.incarnation
        pair = self._pairs.setdefault(key, _Pair(0.0))
        if self._now() >= pair.ask_at:
            # time to ask again if no answer comes; an answer sets an earlier time
            pair.ask_at = self._now() + LAST_RETRY_S
            if for_prefixes:
                self._wished.add(key)
            else:
                self._wished.discard(key)
            self._send(decode, ConnectPeer(meta=meta, for_prefixes=for_prefixes))
        self._look_at = min(self._look_at, pair.ask_at)


def may_pair(prefill: WorkerState, decode: WorkerState) -> bool:
    """True if the two workers are different and serve one model."""
    return (
        prefill is not decode and prefill.hello.model_fingerprint == decode.hello.model_fingerprint
    )
