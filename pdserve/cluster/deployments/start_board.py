"""The board where starting workers write their progress for `pdserve up`: Ray's own key-value
store.

It needs no process and no port, every node reaches it, and it answers even while the engine's
process does not. A record is removed when its worker serves, or when the start fails and the
replica survives. The calls block. Written by `cluster.deployments.engine_start`, read by
`cluster.operate.readiness`.
"""

import msgspec
from ray.experimental import internal_kv

from pdserve.protocol.start_progress import Progress

NAMESPACE = "pdserve-start"


class StartRecord(msgspec.Struct, frozen=True):
    """The progress of one starting worker.

    `since` is when it entered this stage, in seconds since the epoch. `files` are its logs on
    `node`: the replica's, and the engine's once its process exists.
    """

    worker_id: str
    node: str
    progress: Progress
    since: float
    files: tuple[str, ...]


def post(application: str, record: StartRecord) -> None:
    data = msgspec.msgpack.encode(record)
    internal_kv._internal_kv_put(_key(application, record.worker_id), data, namespace=NAMESPACE)


def remove(application: str, worker_id: str) -> None:
    internal_kv._internal_kv_del(_key(application, worker_id), namespace=NAMESPACE)


def clear(application: str) -> None:
    """Removes the records that killed replicas have left."""
    internal_kv._internal_kv_del(_key(application, ""), del_by_prefix=True, namespace=NAMESPACE)


def read(application: str) -> list[StartRecord]:
    """Returns the records of all starting workers, ordered by worker."""
    keys = sorted(internal_kv._internal_kv_list(_key(application, ""), namespace=NAMESPACE))
    values = [internal_kv._internal_kv_get(key, namespace=NAMESPACE) for key in keys]
    return [
        msgspec.msgpack.decode(value, type=StartRecord) for value in values if value is not None
    ]


def _key(application: str, worker_id: str) -> str:
    return f"{application}/{worker_id}"
