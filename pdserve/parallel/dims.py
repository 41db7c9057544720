"""ParallelDims: how many ranks share one engine's model, and which of them this process is.

One frozen value owns all degrees and names the numbers in its errors (torchtitan's idea). Models
and the engine receive it; neither asks torch.distributed who it is. It opens no process group and
knows no devices.
"""

from dataclasses import dataclass, replace
from typing import Literal

from pdserve.configs.engine import EngineConfig

Axis = Literal["tp", "pp", "dp", "ep"]
AXES: tuple[Axis, ...] = ("tp", "pp", "dp", "ep")


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of tensor (tp), pipeline (pp), data (dp) and expert (ep) parallelism, and this
    process's `rank`.

    Ranks are numbered with tp innermost, then dp, then pp. A stage has tp * dp ranks. ep is 1, or
    all ranks of a stage share the experts. Pipeline stages are counted from the last, so rank 0,
    which samples, has the last layers. ValueError for a degree below 1, any other ep, and a rank
    outside the world.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name in AXES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a parallel degree is at least 1")
        if self.ep not in (1, self.stage_size):
            raise ValueError(
                f"ep={self.ep} must be 1 or tp * dp = {self.stage_size}: all ranks of a stage "
                "share the experts, or each has all of them"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} is outside the {self.world_size} rank(s) of {self}")

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pp

    @property
    def stage_size(self) -> int:
        """Number of ranks that have the same layers."""
        return self.tp * self.dp

    @property
    def stage_rank(self) -> int:
        """This rank's index among the ranks of its stage."""
        return self.rank % self.stage_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp % self.dp

    @property
    def home(self) -> int:
        """Number of the KV cache of the engine that this rank holds a part of."""
        return self.dp_rank

    @property
    def pp_rank(self) -> int:
        return self.rank // self.stage_size

    @property
    def ep_rank(self) -> int:
        return self.rank % self.ep

    @property
    def stage(self) -> int:
        """Number of this rank's stage, in the order in which rows go through the stages."""
        return self.pp - 1 - self.pp_rank

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pp - 1

    def layers_of(self, num_layers: int) -> range:
        """The layers of this rank's stage. ValueError if there are fewer layers than stages."""
        if num_layers < self.pp:
            raise ValueError(
                f"engine.pipeline_parallel ({self.pp}) does not fit the model: it has {num_layers} "
                "layers (config.json), and each stage needs one"
            )
        return stage_layers(num_layers, self.pp)[self.stage]

    def ranks_along(self, axis: Axis) -> tuple[int, ...]:
        """The ranks that differ from this one only in their place on `axis`, including itself, in
        order."""
        stride = {"tp": 1, "ep": 1, "dp": self.tp, "pp": self.stage_size}[axis]
        place: int = getattr(self, f"{axis}_rank")
        first = self.rank - place * stride
        return tuple(first + stride * i for i in range(getattr(self, axis)))

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's stage, in order."""
        first = self.rank - self.stage_rank
        return tuple(range(first, first + self.stage_size))

    def home_of(self, rank: int) -> int:
        """Number of another rank's home."""
        return replace(self, rank=rank).home


def stage_layers(num_layers: int, pp: int) -> list[range]:
    """The layers of each of `pp` stages."""
    return [range(n * num_layers // pp, (n + 1) * num_layers // pp) for n in range(pp)]


def dims_of(config: EngineConfig, rank: int = 0) -> ParallelDims:
    """The dims of an engine, as the rank `rank` sees them."""
    stage_size = config.tensor_parallel * config.data_parallel
    return ParallelDims(
        tp=config.tensor_parallel,
        pp=config.pipeline_parallel,
        dp=config.data_parallel,
        ep=stage_size if config.expert_parallel else 1,
        rank=rank,
    )
