"""The peers that routers had this worker connect to, and what was last heard of each link.

Knows a KVReceiver's links by their news alone. Used by `loop.WorkerLoop`.
"""

from collections.abc import Callable

import msgspec

from pdserve.kvtransfer.connector import KVReceiver
from pdserve.protocol.commands import ConnectPeer, DisconnectPeer
from pdserve.protocol.events import PeerStatus


class PeerStatuses:
    """tell: sends a status to every router. receiver: None when the worker has no connector."""

    def __init__(self, receiver: KVReceiver | None, tell: Callable[[PeerStatus], None]) -> None:
        self._receiver = receiver
        self._tell = tell
        self._statuses: dict[str, PeerStatus] = {}

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
        if known is not None and known.connected and known.incarnation == meta.incarnation:
            self.heard(known)
        else:
            self._receiver.connect(meta)

    def disconnect(self, command: DisconnectPeer) -> None:
        """Every router gets to know: another one may still think that the pair is connected."""
        known = self._statuses.get(command.engine_id)
        if known is None or known.incarnation != command.incarnation:
            return
        if self._receiver is not None:
            self._receiver.disconnect(command.engine_id, command.incarnation)
        self.heard(
            msgspec.structs.replace(known, connected=False, detail="disconnected by a router")
        )
        del self._statuses[command.engine_id]

    def heard(self, status: PeerStatus) -> None:
        """News of a link; kept unless a later incarnation is known."""
        known = self._statuses.get(status.engine_id)
        if known is None or status.incarnation >= known.incarnation:
            self._statuses[status.engine_id] = status
        self._tell(status)
