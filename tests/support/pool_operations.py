"""Reports what a KV pool is doing now, and ends it early."""

from pdserve.kvtransfer.pool.threaded_pool import ThreadedKVPool


def copying(pool: ThreadedKVPool) -> set[int]:
    """The operations whose blocks are read or written by a copy."""
    with pool._lock:
        unsettled = pool.operations.unsettled
        return {op_id for op_id, operation in unsettled.items() if operation.touching}


def expire(pool: ThreadedKVPool, *op_ids: int) -> None:
    """The deadline of these operations is now; that of all which are under way if none is
    named."""
    with pool._lock:
        unsettled = pool.operations.unsettled
        for op_id in op_ids or unsettled:
            unsettled[op_id].deadline = 0.0
        pool._lock.notify_all()
