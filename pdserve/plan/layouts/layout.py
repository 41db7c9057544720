"""A layout: the number of workers by role and degrees, and the job that simulates it.

`candidates` and the search use this module.
"""

from dataclasses import dataclass, replace

from pdserve.plan.costs.step import Degrees
from pdserve.plan.profile.scaled import Scaled
from pdserve.plan.simulation.jobs import Job, Pool, Request

MOST_SIMULATED = 8  # workers; a larger cluster is simulated as an even part of itself


@dataclass(frozen=True)
class Slo:
    """Two promises in milliseconds, and the share of requests that must keep both."""

    ttft_ms: float
    tpot_ms: float
    share: float = 0.9


@dataclass(frozen=True)
class Part:
    """A number of equal workers. `role` is "prefill", "decode" or "both"."""

    role: str
    count: int
    degrees: Degrees
    scaled: Scaled

    @property
    def num_gpus(self) -> int:
        return self.count * self.degrees.num_gpus

    def __str__(self) -> str:
        letter = {"prefill": "P", "decode": "D", "both": " whole"}[self.role]
        shown = f" ({self.degrees})" if self.degrees != Degrees() else ""
        return f"{self.count}{letter}{shown}"


@dataclass(frozen=True)
class Layout:
    """The workers of a cluster."""

    parts: tuple[Part, ...]  # one part of role "both", or one of P and one of D
    divisor: int = 1  # 1 / divisor of the cluster is simulated

    @property
    def num_gpus(self) -> int:
        return sum(part.num_gpus for part in self.parts)

    @property
    def simulated(self) -> "Layout":
        """The even part of this cluster that stands for it. Larger clusters of the same proportions
        have the same one."""
        return Layout(tuple(replace(part, count=part.count // self.divisor) for part in self.parts))

    @property
    def num_workers(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def is_split(self) -> bool:
        return len(self.parts) > 1

    @property
    def is_measured(self) -> bool:
        return all(part.scaled.is_measured for part in self.parts)

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))

    def job(self, requests: tuple[Request, ...], slo: Slo, max_model_len: int) -> Job:
        """Returns the job that simulates these requests on all workers of this layout."""
        skip = len(requests) // 10  # not counted, because workers still measure their speed
        return Job(
            pools=tuple(
                Pool(
                    part.role,
                    part.count,
                    part.scaled.profile,
                    part.scaled.num_kv_tokens,
                    engine_fields(part.degrees),
                )
                for part in self.parts
            ),
            requests=requests,
            ttft_ms=slo.ttft_ms,
            tpot_ms=slo.tpot_ms,
            skip=skip,
            max_model_len=max_model_len,
            stop_beyond=1 - slo.share + 0.02,
            links=min(part.degrees.num_gpus for part in self.parts),
        )


def engine_fields(degrees: Degrees) -> dict[str, int | bool]:
    """Returns the fields of EngineConfig in which these degrees differ from its defaults."""
    fields: dict[str, int | bool] = {}
    if degrees.tp > 1:
        fields["tensor_parallel"] = degrees.tp
    if degrees.pp > 1:
        fields["pipeline_parallel"] = degrees.pp
    if degrees.dp > 1:
        fields["data_parallel"] = degrees.dp
    if degrees.ep and degrees.group > 1:
        fields["expert_parallel"] = True
    return fields
