"""Another rank of an engine whose stages seem to be on nodes of their own.

python -m support.far_stages    reads a RankTask from standard input
"""

import os

from support.gpu_sharing import join_in_turn

from pdserve.engine import ranks
from pdserve.parallel import nodes
from pdserve.parallel.bring_up import RankGroup


def name_of_stage(group: RankGroup) -> str:
    return f"stage {group.dims.pp_rank}"


if __name__ == "__main__":
    os.environ.pop("NCCL_HOSTID", None)  # rank 0's
    RankGroup.join = join_in_turn  # type: ignore[method-assign,assignment]
    nodes.node_name = name_of_stage
    ranks.main()
