"""Finds the ranks of an engine that share a node, so that they reach each other's memory."""

import os
import socket
from pathlib import Path

from pdserve.parallel.bring_up import RankGroup

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = ("/proc/self/ns/ipc", "/proc/self/ns/pid")


def node_name(group: RankGroup) -> str:
    """Names what processes must have in common to open each other's memory: the host, its boot,
    its address, and namespaces. Containers of one host differ unless they share these."""
    facts = [socket.gethostname(), group.own_host]
    if BOOT_ID.exists():
        facts.append(BOOT_ID.read_text().strip())
    facts += [os.readlink(path) for path in NAMESPACES if os.path.exists(path)]
    return " ".join(facts)


def near_ranks(group: RankGroup) -> list[int]:
    """Agrees on the ranks of this rank's node, itself among them, in ascending order. ValueError if
    a stage's ranks are on several nodes."""
    names = group.agree("nodes", node_name(group))
    dims = group.dims
    near = [rank for rank, name in enumerate(names) if name == names[dims.rank]]
    if apart := sorted({*dims.stage_ranks} - {*near}):
        raise ValueError(
            f"ranks {dims.rank} and {apart[0]} share layers, but not a node's memory: "
            "tensor_parallel and data_parallel need GPUs of one node, and containers on it must "
            "share their IPC and process namespaces; use pipeline_parallel over nodes"
        )
    return near
