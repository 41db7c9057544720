"""Makes a rank's links to the other ranks of its engine, for its model and its runner. On CPU they
are gloo process groups. On GPUs they are memory of each GPU that the others on its node reach, and
NCCL between stages on several nodes.

Knows how the ranks are numbered and how large the largest step is. Of the model it knows only
sizes. Called by `engine.components`.
"""

from dataclasses import dataclass

import torch

from pdserve.configs.engine import ResolvedEngineConfig
from pdserve.engine.execution.local_executor import SCORED_ROWS
from pdserve.kernels.collective.ops import IDENTITY, Collective, Exchange, HomeAlone
from pdserve.kernels.collective.reference import GroupCollective, GroupExchange
from pdserve.kernels.collective.region import ExchangeLayout, RegionLayout
from pdserve.models.config import ModelSpec
from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.groups import cpu_group
from pdserve.parallel.node_pipe import NodePipe
from pdserve.parallel.nodes import near_ranks
from pdserve.parallel.peer_memory import PeerMemory
from pdserve.parallel.pipe import NO_PIPE, GroupPipe, Pipe


@dataclass(frozen=True)
class RankLinks:
    """A rank's links to other ranks."""

    collective: Collective  # to the ranks that share its rows
    exchange: Exchange  # to all ranks of its stage
    pipe: Pipe  # to the neighbouring stages
    num_bytes: int = 0  # device memory that they take, outside torch's allocator


def link_ranks(
    group: RankGroup,
    device: torch.device,
    spec: ModelSpec,
    dtype: torch.dtype,
    config: ResolvedEngineConfig,
) -> RankLinks:
    dims = group.dims
    if device.type == "cuda" and not group.is_alone:
        return _peers(group, device, spec, dtype, config)
    deadline_s = config.step_deadline_s
    collective, pipe = IDENTITY, NO_PIPE
    if dims.tp > 1:
        collective = GroupCollective(cpu_group(group, dims.ranks_along("tp"), deadline_s))
    exchange: Exchange = HomeAlone(collective)
    if dims.dp > 1:
        exchange = GroupExchange(cpu_group(group, dims.stage_ranks, deadline_s), dims.dp)
    if dims.pp > 1:
        along = cpu_group(group, dims.ranks_along("pp"), deadline_s)
        pipe = GroupPipe(along, spec.hidden_size, dtype, config.max_steps_in_flight)
    return RankLinks(collective, exchange, pipe)


def _peers(
    group: RankGroup,
    device: torch.device,
    spec: ModelSpec,
    dtype: torch.dtype,
    config: ResolvedEngineConfig,
) -> RankLinks:
    """Make links over memory of each GPU that the ranks of its node reach. The memory holds first
    what is summed, then what homes exchange, then what goes through the pipe of stages that share a
    node."""
    # imports Triton, which a machine without a GPU may lack
    from pdserve.kernels.collective.faults import Faults
    from pdserve.kernels.collective.peer_exchange import PeerExchange
    from pdserve.kernels.collective.peer_pipe import PeerPipe, PipeLayout
    from pdserve.kernels.collective.triton_ops import PeerCollective

    dims = group.dims
    rows = config.max_num_batched_tokens
    samples = max(dims.dp * config.max_num_seqs, SCORED_ROWS + dims.dp)
    # with several homes, tokens and logits go through the exchange
    moves_logits = dims.dp == 1
    sums = RegionLayout(
        size=dims.tp,
        width=spec.hidden_size,
        dtype=dtype,
        max_rows=samples if moves_logits else 1,
        vocab_size=spec.vocab_size if moves_logits else dims.tp,
        step_rows=rows,
    )
    rows_of_homes = ExchangeLayout(
        num_homes=dims.dp,
        home_size=dims.tp,
        width=spec.hidden_size,
        dtype=dtype,
        max_rows=samples,
        vocab_size=spec.vocab_size,
        step_rows=max(rows, config.max_num_seqs),
    )
    near = near_ranks(group)
    is_apart = len(near) < dims.world_size
    pipe_rows = max(rows, config.max_num_seqs)
    moves = PipeLayout(spec.hidden_size, dtype, pipe_rows)
    pipe_bytes = moves.num_bytes if dims.pp > 1 and not is_apart else 0
    sum_bytes = sums.num_bytes if dims.tp > 1 else 0
    exchange_bytes = rows_of_homes.num_bytes if dims.dp > 1 else 0
    before_pipe = sum_bytes + exchange_bytes
    num_bytes = before_pipe + pipe_bytes
    memory = PeerMemory(group, near, num_bytes, device)
    faults = Faults.on(device)
    collective: Collective = IDENTITY
    pipe: Pipe = NO_PIPE
    if dims.tp > 1:
        regions = memory.addresses[list(dims.ranks_along("tp"))]
        collective = PeerCollective(sums, dims.tp_rank, regions, faults, memory, memory.own)
    exchange: Exchange = HomeAlone(collective)
    if dims.dp > 1:
        regions = memory.addresses[list(dims.stage_ranks)] + sum_bytes
        exchange = PeerExchange(rows_of_homes, dims.stage_rank, regions, faults, memory)
    if is_apart:
        pipe = NodePipe(group, spec.hidden_size, dtype, pipe_rows, device)
    elif dims.pp > 1:
        stages = [*memory.addresses[list(dims.ranks_along("pp"))] + before_pipe]
        # ranks are counted from the last stage
        next_one = None if dims.is_last_stage else stages[dims.pp_rank - 1]
        previous = None if dims.is_first_stage else stages[dims.pp_rank + 1]
        pipe = PeerPipe(moves, stages[dims.pp_rank], next_one, previous, faults, memory)
    return RankLinks(collective, exchange, pipe, num_bytes)
