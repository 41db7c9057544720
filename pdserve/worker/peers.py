"""The peers that routers told this worker to connect to, and the latest news of each link.

Knows a KVReceiver's links only by their news. If there are many links that only fetch prefixes, the
least recently used ones are closed. Used by `loop.WorkerLoop` and by `fetching.fetch_phase`.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection

import msgspec

from pdserve.kvtransfer.connector import KVReceiver
from pdserve.protocol.commands import ConnectPeer, DisconnectPeer
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta

MAX_PREFIX_LINKS = 64


class PeerStatuses:
    """The state of all links.

    `tell` sends a status to every router. `receiver` is None if the worker has no connector.
    """

    def __init__(self, receiver: KVReceiver | None, tell: Callable[[PeerStatus], None]) -> None:
        self._receiver = receiver
        self._tell = tell
        self._statuses: dict[str, PeerStatus] = {}
        self._metas: dict[str, KVCacheMeta] = {}
        # Engines whose links are only for prefixes; the most recently used one is the last.
        self._for_prefixes: OrderedDict[str, None] = OrderedDict()

    @property
    def statuses(self) -> tuple[PeerStatus, ...]:
        return tuple(self._statuses.values())

    def connect(self, command: ConnectPeer) -> None:
        meta = command.meta
        if self._receiver is None:
            self.heard(
                PeerStatus(
                    engine_id=meta.engine_id,
                    incarnation=meta.incarnation,
                    connected=False,
                    detail="this worker has no connector",
                )
            )
            return
        known = self._statuses.get(meta.engine_id)
        self._note_use(meta, command.for_prefixes)
        if known is not None and known.connected and known.incarnation == meta.incarnation:
            self.heard(known)
        else:
            self._receiver.connect(meta)

    def _note_use(self, meta: KVCacheMeta, for_prefixes: bool) -> None:
        """Notes what a link is for. A link that was once asked for to hand prompts over is kept."""
        is_new = meta.engine_id not in self._metas
        self._metas[meta.engine_id] = meta
        if not for_prefixes:
            self._for_prefixes.pop(meta.engine_id, None)
        elif is_new:
            self._for_prefixes[meta.engine_id] = None

    def link(self, engine_id: str, incarnation: int) -> tuple[KVCacheMeta, float] | None:
        """Returns a connected peer, and the bytes per second of its link (0: not measured)."""
        status = self._statuses.get(engine_id)
        meta = self._metas.get(engine_id)
        if (
            meta is None
            or status is None
            or not status.connected
            or not meta.incarnation == status.incarnation == incarnation
        ):
            return None
        return meta, status.bytes_per_s

    def used(self, engine_id: str) -> None:
        """Notes that a prefix is fetched from there."""
        if engine_id in self._for_prefixes:
            self._for_prefixes.move_to_end(engine_id)

    def close_idle(self, busy: Collection[str]) -> None:
        """Closes links for prefixes if there are too many. `busy` are engines whose links have
        pulls."""
        idle = [
            engine_id
            for engine_id in self._for_prefixes
            if engine_id not in busy and engine_id in self._statuses
        ]
        for engine_id in idle[: max(0, len(self._for_prefixes) - MAX_PREFIX_LINKS)]:
            meta = self._metas[engine_id]
            self._disconnect(engine_id, meta.incarnation, "closed: not used lately")

    def disconnect(self, command: DisconnectPeer) -> None:
        """Closes a link. Every router is told, because another one may think that the pair is
        connected."""
        self._disconnect(command.engine_id, command.incarnation, "disconnected by a router")

    def _disconnect(self, engine_id: str, incarnation: int, detail: str) -> None:
        meta = self._metas.get(engine_id)
        known = self._statuses.get(engine_id)
        if known is not None and known.incarnation == incarnation:
            if self._receiver is not None:
                self._receiver.disconnect(engine_id, incarnation)
            self.heard(msgspec.structs.replace(known, connected=False, detail=detail))
            del self._statuses[engine_id]
        if meta is not None and meta.incarnation == incarnation:
            del self._metas[engine_id]
            self._for_prefixes.pop(engine_id, None)

    def heard(self, status: PeerStatus) -> None:
        """Keeps news of a link unless a later incarnation is known, and tells the routers."""
        status = msgspec.structs.replace(
            status, for_prefixes=status.engine_id in self._for_prefixes
        )
        known = self._statuses.get(status.engine_id)
        if known is None or status.incarnation >= known.incarnation:
            self._statuses[status.engine_id] = status
        self._tell(status)
