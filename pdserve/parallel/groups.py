"""Process groups of torch.distributed for the ranks of one engine.

They are made directly over the store where the ranks meet, and are not registered with torch. So
two engines in one process do not collide. Nothing destroys a group: a process that leaves one
exits.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo

from pdserve.parallel.bring_up import RankGroup


def cpu_group(group: RankGroup, ranks: Sequence[int], timeout_s: float) -> ProcessGroup:
    """Make a gloo group for CPU tensors, of these ranks in this order; this rank must be one of
    them. timeout_s: limit for each collective, which then raises RuntimeError. A group of the same
    ranks must not be made twice."""
    place = ranks.index(group.dims.rank)
    store = group.store_for(f"ranks {' '.join(map(str, ranks))}")
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    # by default gloo takes the address that the host's name resolves to
    options._devices = [ProcessGroupGloo.create_device(hostname=group.own_host)]
    made = ProcessGroup(store, place, len(ranks))
    backend = ProcessGroupGloo(store, place, len(ranks), options)
    made._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    return made
