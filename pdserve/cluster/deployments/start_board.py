"""Where workers that start write how far they are, for `pdserve up` to read: Ray's own key-value
store.

It needs no process and no port, is reached from every node, and answers while the engine's process
does not. A record goes when its worker serves, or fails in a way that its replica survives.
Blocking calls. Written by `cluster.deployments.engine_start`, read by `cluster.operate.readiness`.
"""

import msgspec
from ray.experimental import internal_kv

from pdserve.protocol.start_progress import Progress

NAMESPACE = "pdserve-start"


class StartRecord(msgspec.Struct, frozen=True):
    """One worker that starts. since: when this stage was entered, seconds since the epoch. files:
    its logs on `node`: of the replica, and of the engine once there is a process.
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
    """Forget what replicas that were killed have left."""
    internal_kv._internal_kv_del(_key(application, ""), del_by_prefix=True, namespace=NAMESPACE)


def read(application: str) -> list[StartRecord]:
    """Those that start now, by worker."""
    keys = sorted(internal_kv._internal_kv_list(_key(application, ""), namespace=NAMESPACE))
    values = [internal_kv._internal_kv_get(key, namespace=NAMESPACE) for key in keys]
    return [
        msgspec.msgpack.decode(value, type=StartRecord) for value in values if value is not None
    ]


def _key(application: str, worker_id: str) -> str:
    return f"{application}/{worker_id}"
