"""Another rank of an engine, which takes its GPU in turn: where there are fewer than ranks, they
share.

python -m support.gpu_sharing    reads a RankTask from standard input
"""

import torch

from pdserve.engine import ranks
from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.dims import ParallelDims

join = RankGroup.join


def join_in_turn(dims: ParallelDims, address: str, device_index: int) -> RankGroup:
    return join(dims, address, device_index % torch.cuda.device_count())


if __name__ == "__main__":
    RankGroup.join = join_in_turn  # type: ignore[method-assign,assignment]
    ranks.main()
