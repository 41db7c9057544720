"""ParallelDims: how many ranks share one engine's model, and which of them this one is.

One frozen value owns all degrees and says the numbers in its errors (torchtitan's idea). Models and
the engine receive it; neither asks torch.distributed who it is. It opens no process group and knows
no devices.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of tensor (tp), pipeline (pp), data (dp) and expert (ep) parallelism, and this
    process's `rank`.

    Ranks are numbered with tp innermost, then dp, then pp; expert groups reuse the tp and dp ranks.
    ValueError for a degree below 1, a degree above 1 (not supported yet) and a rank outside the
    world.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep"):
            degree = getattr(self, name)
            if degree < 1:
                raise ValueError(f"{name}={degree}: a parallel degree is at least 1")
            if degree > 1:
                raise ValueError(f"{name}={degree} is not supported yet: set {name} to 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} is outside the {self.world_size} rank(s) of {self}")

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp
