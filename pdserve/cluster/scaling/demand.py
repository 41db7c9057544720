"""Decides how many workers a deployment should have, from what workers push: pure decisions,
without Serve, fleet or clock.

`Load` is one worker at one moment. `prefill_demand` and `decode_demand` return how many workers the
present load would keep at their targets. `Scaler` and `LeastInterval` keep what must be remembered
between two moments. Delays make sure that neither a burst nor a lull moves anything.
`cluster.scaling.autoscaler` calls this once per second. docs/design/elasticity.md explains the
numbers.

    demand > workers for up_delay_s                 -> up to the demand, at most doubling

    demand < SPARE x (workers - 1) for down_delay_s -> one worker fewer

    not all there yet (starting, dead, leaving)     -> neither, for STUCK_S.
        Then the running workers count. Workers that do not start are given up when they have not
        been needed for down_delay_s.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.configs.schema import AutoscalingConfig

# Target share of time in which a prefill worker computes. Above it, a queue forms whenever two
# prompts come at once.
BUSY = 0.8
FULL = 0.85  # target share of blocks in use; running sequences still grow before they end
# Demand per worker that would be left. With more, the next rise would bring the worker back.
SPARE = 0.67
# Time without the target number of workers: there is no room, or a worker never starts.
STUCK_S = 60.0
FEW = 2  # number of sequences at which a worker is nearly idle
FADED_S = 15.0  # three times worker.load_meter's FADE_S
DEFAULT_QUEUE_MS = 250.0  # used without a TTFT target


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one worker.

    - `queue_ms`: time until the prompts that wait there are computed.
    - `busy`: share of time with prompts.
    - `token_interval_ms`: token interval of its running sequences; 0 if none runs.
    - `used_blocks`: share of its blocks that are in use.
    - `num_sequences`: sequences running and waiting.
    """

    queue_ms: float = 0.0
    busy: float = 0.0
    token_interval_ms: float = 0.0
    used_blocks: float = 0.0
    num_sequences: int = 0


def queue_target_ms(config: AutoscalingConfig | None, ttft_ms: float | None) -> float:
    """Returns how long a prompt may wait: half of the TTFT target; the rest is for computing it."""
    if config is not None and config.queue_ms is not None:
        return config.queue_ms
    return ttft_ms / 2 if ttft_ms is not None else DEFAULT_QUEUE_MS


def prefill_demand(loads: Sequence[Load], queue_ms: float) -> float:
    """Returns the demand in workers. `queue_ms` is the target."""
    return max(
        sum(load.queue_ms for load in loads) / queue_ms, sum(load.busy for load in loads) / BUSY
    )


def decode_demand(
    loads: Sequence[Load],
    queue_ms: float,
    tpot_ms: float | None,
    sequences: int | None,
    least_interval_ms: float | None,
) -> float:
    """Returns the demand in workers.

    `least_interval_ms` is the token interval of a nearly idle worker, which more workers cannot
    shorten; None if unknown.
    """
    demands = [
        sum(load.queue_ms for load in loads) / queue_ms,
        sum(load.used_blocks for load in loads) / FULL,
    ]
    if sequences is not None:
        demands.append(sum(load.num_sequences for load in loads) / sequences)
    if tpot_ms is not None:
        demands.append(
            sum(_for_tpot(load.token_interval_ms, tpot_ms, least_interval_ms) for load in loads)
        )
    return max(demands)


def _for_tpot(interval_ms: float, target_ms: float, least_ms: float | None) -> float:
    """Returns the number of workers that would bring the interval to the target.

    Above a fixed part, the interval grows with the number of sequences. If the fixed part is
    unknown, or the target is missed, the result is the plain ratio.
    """
    if not interval_ms:
        return 0.0
    if least_ms is None or interval_ms > target_ms:
        return interval_ms / target_ms
    return (
        max(0.0, interval_ms - least_ms) / (target_ms - least_ms) if least_ms < target_ms else 1.0
    )


class LeastInterval:
    """The shortest token interval of workers that are nearly idle.

    A worker must have been idle long enough that its report holds nothing of a busier time. A
    worker under load does not count: its interval may be all load.
    """

    def __init__(self) -> None:
        self.ms: float | None = None
        self._since: dict[str, float] = {}

    def see(self, loads: Mapping[str, Load], now: float) -> None:
        """Looks at the loads, given by worker."""
        idle = {
            name: load
            for name, load in loads.items()
            if load.token_interval_ms and load.num_sequences <= FEW
        }
        self._since = {name: self._since.get(name, now) for name in idle}
        seen = [
            load.token_interval_ms
            for name, load in idle.items()
            if lasts(self._since[name], FADED_S, now)
        ]
        self.ms = min([*seen, *([self.ms] if self.ms is not None else [])], default=None)


class Scaler:
    """Decides the target of one deployment. Times are seconds of any one clock."""

    def __init__(self, config: AutoscalingConfig) -> None:
        self._config = config
        self._above_since: float | None = None
        self._below_since: float | None = None
        self._enough_since: float | None = None
        self._unsettled_since: float | None = None

    def decide(
        self,
        demand: float,
        num_workers: int,
        target: int,
        running: int,
        is_settled: bool,
        now: float,
    ) -> int:
        """Returns the new target.

        - `num_workers`: workers that bear this load now, by their roles.
        - `running`: workers of the deployment that run.
        - `is_settled`: as many run as `target` says, and none is leaving.
        """
        self._above_since = holds_since(demand > num_workers, self._above_since, now)
        self._below_since = holds_since(demand < SPARE * (num_workers - 1), self._below_since, now)
        self._enough_since = holds_since(demand <= num_workers, self._enough_since, now)
        self._unsettled_since = holds_since(not is_settled, self._unsettled_since, now)
        new = target
        if is_settled:
            new = target + self._step(demand, num_workers, now)
        elif lasts(self._unsettled_since, STUCK_S, now):
            new = self._unstuck(demand, num_workers, target, running, now)
        if new != target:
            self._above_since = self._below_since = self._enough_since = self._unsettled_since = (
                None
            )
        return max(self._config.min, min(self._config.max, new))

    def _step(self, demand: float, num_workers: int, now: float) -> int:
        """Returns how many workers to add; negative to remove some."""
        if lasts(self._above_since, self._config.up_delay_s, now):
            return min(math.ceil(demand), 2 * max(1, num_workers)) - num_workers
        return -1 if lasts(self._below_since, self._config.down_delay_s, now) else 0

    def _unstuck(
        self, demand: float, num_workers: int, target: int, running: int, now: float
    ) -> int:
        step = self._step(demand, num_workers, now)
        if step < 0 or (
            running < target and lasts(self._enough_since, self._config.down_delay_s, now)
        ):
            return min(target, running + step)
        return target if running < target else target + step


def holds_since(holds: bool, since: float | None, now: float) -> float | None:
    """Returns when the condition began to hold; None if it does not hold."""
    if not holds:
        return None
    return now if since is None else since


def lasts(since: float | None, seconds: float, now: float) -> bool:
    """True if what began at `since` has lasted for this many seconds."""
    return since is not None and now - since >= seconds
