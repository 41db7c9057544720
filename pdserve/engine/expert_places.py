"""Places experts on the ranks of an engine, where each rank holds some of them whole.

Rank 0 reads the load by which experts are placed, and sends it to the others, because all must
place alike. Knows the configuration and the model's facts, no weights. Called by
`engine.components`, by `engine.warm_up`, and by `engine.ranks`, which checks the file before
processes start.
"""

from collections.abc import Mapping

from pdserve.configs.engine import EngineConfig
from pdserve.kernels.experts.load_file import read_load
from pdserve.kernels.experts.placement import Placements, place_experts
from pdserve.models.config import ModelSpec
from pdserve.parallel.dims import ParallelDims, dims_of


def load_to_place_by(config: EngineConfig, spec: ModelSpec) -> dict[str, list[int]] | None:
    """Number of rows that went to each expert, by layer, from `expert_load_file`; None without a
    file. Rank 0 reads it for all ranks. ValueError names what is wrong with the file."""
    if config.expert_load_file is None:
        return None
    assert spec.experts is not None
    count = spec.experts.routing.num_experts
    try:
        loads = read_load(config.expert_load_file, spec.mixture_layers, count)
    except ValueError as error:
        raise ValueError(f"engine.expert_load_file: {error}") from error
    return {str(layer): list(counts) for layer, counts in loads.items()}


def placements_of(
    spec: ModelSpec,
    dims: ParallelDims,
    config: EngineConfig,
    loads: Mapping[str, list[int]] | None,
) -> Placements | None:
    """The placement of each mixture's experts; None if each rank has a part of every expert.
    loads: see `load_to_place_by`."""
    if dims.ep == 1:
        return None
    assert spec.experts is not None
    count = spec.experts.routing.num_experts
    return {
        layer: place_experts(
            count, dims.ep, config.redundant_experts, loads[str(layer)] if loads else None
        )
        for layer in spec.mixture_layers
    }


def num_experts_everywhere(spec: ModelSpec, config: EngineConfig) -> int | None:
    """Number of experts on all ranks, counting copies; None if each rank has a part of each."""
    dims = dims_of(config)
    if dims.ep == 1:
        return None
    assert spec.experts is not None
    routing = spec.experts.routing
    placement = place_experts(routing.num_experts, dims.ep, config.redundant_experts)
    return placement.num_copies + dims.ep * routing.num_shared
