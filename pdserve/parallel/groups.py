"""Process groups of torch.distributed for the ranks of one engine.

They are made directly over the store where the ranks meet, not registered with torch, so that two
engines of one process do not collide. Nothing ever destroys one: a process that leaves a group
exits.
"""

from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo

from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.dims import Axis


def cpu_group(group: RankGroup, axis: Axis, timeout_s: float) -> ProcessGroup:
    """gloo's, of the ranks along an axis, for tensors on CPU. timeout_s: of each collective;
    RuntimeError then. Every rank makes the same groups in the same order."""
    ranks = group.dims.ranks_along(axis)
    place = ranks.index(group.dims.rank)
    store = group.store_for(f"{axis}/{ranks[0]}")
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    # by default it takes the address that the host's name stands for
    options._devices = [ProcessGroupGloo.create_device(hostname=group.own_host)]
    made = ProcessGroup(store, place, len(ranks))
    backend = ProcessGroupGloo(store, place, len(ranks), options)
    made._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    return made
