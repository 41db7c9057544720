"""How many workers a deployment should have, from what workers push: pure decisions, without Serve,
fleet or clock.

`Load` is one worker at one moment. `prefill_demand` and `decode_demand` say how many workers the
present load would keep at their targets; `Scaler` and `LeastInterval` keep what must be remembered
between two moments (delays, so that neither a burst nor a lull moves anything). Called by
`cluster.scaling.autoscaler` once a second. docs/design/elasticity.md says where the numbers come
from.

    demand > workers for up_delay_s                 -> up to the demand, at most doubling
    demand < SPARE x (workers - 1) for down_delay_s -> one worker fewer
    not all there yet (starting, dead, leaving)     -> neither, for STUCK_S; then from those that
        run, and what does not start and is not needed for down_delay_s is given up
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.configs.schema import AutoscalingConfig

# of the time: a prefill worker that computes more has a queue whenever two prompts come at once
BUSY = 0.8
FULL = 0.85  # of the blocks: what runs grows by some before it ends
# of the workers that would be left: or the next rise would bring the one back that just left
SPARE = 0.67
STUCK_S = 60.0  # not as many as wanted for so long: no room, or one that never starts
FEW = 2  # sequences: nearly idle
FADED_S = 15.0  # three times worker.load_meter's FADE_S
DEFAULT_QUEUE_MS = 250.0  # without a TTFT target


@dataclass(frozen=True, slots=True)
class Load:
    """One worker. queue_ms: until the prompts that wait there are computed. busy: share of time
    with prompts. token_interval_ms: of its running sequences; 0: none runs. used_blocks: share.
    num_sequences: running and waiting."""

    queue_ms: float = 0.0
    busy: float = 0.0
    token_interval_ms: float = 0.0
    used_blocks: float = 0.0
    num_sequences: int = 0


def queue_target_ms(config: AutoscalingConfig | None, ttft_ms: float | None) -> float:
    """What a prompt may wait: half of the TTFT target; the rest is for computing it."""
    if config is not None and config.queue_ms is not None:
        return config.queue_ms
    return ttft_ms / 2 if ttft_ms is not None else DEFAULT_QUEUE_MS


def prefill_demand(loads: Sequence[Load], queue_ms: float) -> float:
    """In workers. queue_ms: the target."""
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
    """In workers. least_interval_ms: of a nearly idle worker, which no worker more makes shorter;
    None: unknown."""
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
    """Workers that would bring the interval to the target: above a fixed part it goes with the
    sequences. Where the fixed part is unknown, or the target is missed, it is the plain ratio."""
    if not interval_ms:
        return 0.0
    if least_ms is None or interval_ms > target_ms:
        return interval_ms / target_ms
    return (
        max(0.0, interval_ms - least_ms) / (target_ms - least_ms) if least_ms < target_ms else 1.0
    )


class LeastInterval:
    """The shortest token interval of workers that were nearly idle for long enough that nothing of
    what they told was of a busier time. One under load tells nothing: its interval may be all
    load."""

    def __init__(self) -> None:
        self.ms: float | None = None
        self._since: dict[str, float] = {}

    def see(self, loads: Mapping[str, Load], now: float) -> None:
        """loads: by worker."""
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
    """Of one deployment. Times are seconds of any one clock."""

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
        """The new target. num_workers: that bear this load now, by their roles. running: of the
        deployment. is_settled: as many run as `target` says, and none is leaving."""
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
        """How many more workers, or fewer."""
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
    """When it began to hold; None: it does not."""
    if not holds:
        return None
    return now if since is None else since


def lasts(since: float | None, seconds: float, now: float) -> bool:
    """Whether what began to hold then has held for so long."""
    return since is not None and now - since >= seconds
