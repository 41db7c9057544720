"""The health of a worker's ranks: who answers a ping, and for how long their steps have run.

A rank answers on a thread of its own, so it answers while its step hangs. It does not if its
process is frozen. Used by `cluster.deployments.worker_replica`. Knows no Ray.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge


@dataclass(frozen=True)
class Answers:
    """ages: seconds for which the step of each rank has run, 0 between steps; None: the rank did
    not answer."""

    ages: Sequence[float | None]

    @property
    def complaint(self) -> str:
        """Says which ranks did not answer, and what rank 0 does meanwhile; "" if all answered."""
        ranks = [str(rank) for rank, age in enumerate(self.ages) if age is None]
        if not ranks:
            return ""
        age = self.ages[0]
        step = f" (rank 0's step has run for {age:.1f} s)" if age else ""
        return f"no answer from rank {', '.join(ranks)}{step}"


async def ping(ranks: Iterable[Awaitable[float]], deadline_s: float) -> Answers:
    """Awaits the answers of all ranks for at most `deadline_s`. Raises what one of them raised."""
    pings = [asyncio.ensure_future(rank) for rank in ranks]
    _, silent = await asyncio.wait(pings, timeout=deadline_s)
    for each in silent:
        each.cancel()
    return Answers([None if each in silent else each.result() for each in pings])


class StepAges:
    """The gauge of the steps' ages, as of the last answers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ages = Gauge(
            "pdserve_engine_step_age_seconds",
            "Time for which a running step has run, 0 between steps",
            ["rank"],
            registry=self.registry,
        )

    def tell(self, answers: Answers) -> None:
        """Keeps the ages of the ranks that answered. The others keep their last one."""
        for rank, age in enumerate(answers.ages):
            if age is not None:
                self._ages.labels(str(rank)).set(age)
