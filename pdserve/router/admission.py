"""Limits how much a router takes on: prompts at once, and prompt tokens not computed yet.

Refuses with 429 and a Retry-After that follows from how fast places became free lately. Only
counts: knows no workers, no HTTP and no text. What first tokens really took teaches its caution,
and the worker that a forecast names. `router.request.service` takes seats, and a request's
run gives them back. A seat's states:

    enter (before tokenising) --fill--> queued --computed--> running --leave--> free
                          queued --sent--> queued at a worker, which knows of it
    (leave: from any of them)
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from pdserve.configs.router import SloConfig
from pdserve.router.choosing.predict import Forecast
from pdserve.router.errors import ApiError
from pdserve.router.times import rounded

# Retry-After is kept within these seconds: with less a client would loop busily, and more would be
# a guess about another hour
SOONEST_S = 1
LATEST_S = 60
RATE_WINDOW_S = 10.0
# even a prompt that needs all of the limit by itself may wait for this share of it; the limit is
# the time after which a first token is late
LEAST_WAIT = 0.25
IN_TIME = 0.7  # share of the first tokens that should come no later than predicted
LEARNING = 0.05
# Share of that limit from which on a forecast teaches the caution. A first token takes some 6 ms
# more than forecast, however far off it is. Short forecasts would make much of that.
TEACHES = 0.6
MATTERS = 0.3  # share of it from which on a forecast teaches the worker's earliness
CAUTION = 0.5, 10.0  # lowest and highest value


class Seat:
    """The place of one prompt. Every method is idempotent."""

    __slots__ = ("_admission", "_filled", "_forecast", "_here", "_priority", "_queued", "_unsent")

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self._here = True
        self._queued = self._unsent = self._priority = 0
        self._filled = 0.0
        self._forecast: Forecast | None = None

    def fill(self, num_tokens: int, priority: int = 0, forecast: Forecast | None = None) -> None:
        """Gives the prompt its tokens, which wait from now on.

        `forecast` predicts its first token, if a forecast was made.
        """
        self._queued = self._unsent = num_tokens
        self._priority = priority
        self._forecast = forecast
        self._filled = self._admission.clock()
        self._admission.unsent_tokens += num_tokens
        self._admission.queue(num_tokens, priority)

    def sent(self, worker_id: str) -> None:
        """Notes that the prompt went to a worker, which counts it from now on.

        If another worker was expected to compute it, that one is not taught by it.
        """
        self._count_sent()
        if self._forecast is not None and self._forecast.worker != worker_id:
            self._forecast = replace(self._forecast, earliness=None)

    def computed(self) -> None:
        """Notes that a worker has computed the prompt."""
        if self._queued:
            self._admission.token_rate.add(self._queued)
            self._unqueue()
            if self._forecast is not None:
                self._admission.learn(
                    self._forecast, 1000 * (self._admission.clock() - self._filled)
                )

    def leave(self) -> None:
        if self._here:
            self._here = False
            self._unqueue()
            self._count_sent()
            self._admission.num_prompts -= 1
            self._admission.prompt_rate.add(1)

    def _count_sent(self) -> None:
        self._admission.unsent_tokens -= self._unsent
        self._unsent = 0

    def _unqueue(self) -> None:
        self._admission.queue(-self._queued, self._priority)
        self._queued = 0


class Admission:
    """Counts prompts and queued tokens. Use it from one event loop.

    RouterConfig explains `max_prompts` and `max_queued_tokens`. `unsent_tokens` are the queued ones
    that no worker has heard of.
    """

    def __init__(
        self, max_prompts: int, max_queued_tokens: int, slo: SloConfig | None = None
    ) -> None:
        self.num_prompts = 0
        self.queued_tokens = 0
        self.unsent_tokens = 0
        self._by_priority: dict[int, int] = {}  # of the queued tokens
        self._slo = slo or SloConfig()
        self.clock: Callable[[], float] = time.monotonic
        self.caution = 1.0  # forecasts are multiplied by it
        self.prompt_rate = Rate(self.clock)
        self.token_rate = Rate(self.clock)
        self._max_prompts = max_prompts
        self._max_queued_tokens = max_queued_tokens

    def queue(self, num_tokens: int, priority: int) -> None:
        """Adds waiting tokens, or removes them if `num_tokens` is negative."""
        self.queued_tokens += num_tokens
        left = self._by_priority.pop(priority, 0) + num_tokens
        if left:
            self._by_priority[priority] = left

    def share_ahead(self, priority: int) -> float:
        """Share of the waiting prompt tokens that a new prompt of this priority does not overtake.

        Prompts that wait for other routers are assumed to have the same priorities.
        """
        if not self.queued_tokens:
            return 1.0
        return (
            sum(tokens for p, tokens in self._by_priority.items() if p <= priority)
            / self.queued_tokens
        )

    def enter(self, num_prompts: int, named: str = "prompt") -> list[Seat]:
        """Returns one seat per prompt.

        Raises ApiError: 400 if the router never has so many seats, 429 if it has too few now.
        `named` is the parameter that holds the prompts.
        """
        if num_prompts > self._max_prompts:
            message = (
                f"{named}: {num_prompts} prompts in a call, but this router takes "
                f"{self._max_prompts} at once: send fewer, or raise router.max_concurrent_prompts"
            )
            raise ApiError(message, param=named, code="too_many_prompts")
        over = self.num_prompts + num_prompts - self._max_prompts
        if over > 0:
            message = (
                f"this router is answering {self.num_prompts} prompts and takes "
                f"{self._max_prompts} at once: try again "
                "later, or raise router.max_concurrent_prompts"
            )
            raise too_much(
                message, "too_many_concurrent_prompts", self.prompt_rate.seconds_for(over)
            )
        self.num_prompts += num_prompts
        return [Seat(self) for _ in range(num_prompts)]

    def check_tokens(self, num_tokens: int) -> None:
        """Raises ApiError (429) if these tokens would make too many that wait.

        A call that waits alone is never too much.
        """
        over = self.queued_tokens + num_tokens - self._max_queued_tokens
        if over > 0 and self.queued_tokens:
            message = (
                f"{self.queued_tokens} prompt tokens wait at this router, which takes "
                f"{self._max_queued_tokens}: try again later, or raise router.max_queued_tokens"
            )
            raise too_much(message, "too_many_queued_tokens", self.token_rate.seconds_for(over))

    @property
    def foresees(self) -> bool:
        """True if `check_lateness` may refuse requests."""
        return self._slo.latest_ms is not None

    def check_lateness(self, forecast: Forecast, elapsed_ms: float) -> None:
        """Raises ApiError (429) if prompts ahead make the first token late.

        `elapsed_ms` is the time since the request came.
        """
        latest_ms = self._slo.latest_ms
        if latest_ms is None:
            return
        factor = forecast.factor * self.caution
        wait_ms = forecast.wait_ms * factor
        alone_ms = forecast.own_ms * factor + elapsed_ms
        over_ms = wait_ms - max(latest_ms - alone_ms, LEAST_WAIT * latest_ms)
        if over_ms > 0:
            message = (
                f"the first token would come after about {wait_ms + alone_ms:.0f} ms, but this "
                f"server promises {self._slo.ttft_ms:g} ms (slo.ttft_ms; more than {latest_ms:g} "
                "are refused): try again later"
            )
            figures = {
                "wait_s": rounded(forecast.wait_ms / 1000),
                "own_s": rounded(forecast.own_ms / 1000),
                "caution": rounded(factor),
                "worker": forecast.worker,
            }
            raise too_much(message, "predicted_late", _seconds(over_ms / 1000), figures)

    def learn(self, forecast: Forecast, took_ms: float) -> None:
        """Teaches the worker's earliness, and adapts the caution, so that IN_TIME of the first
        tokens come before their forecast.

        It follows the quantile of taken time relative to forecast time, for forecasts that matter.
        The forecasts alone are too early: steps have a fixed part, decodes come between, and
        prompts that come later may be taken first.
        """
        latest_ms = self._slo.latest_ms
        if latest_ms is None:
            return
        if forecast.earliness is not None and forecast.total_ms >= MATTERS * latest_ms:
            forecast.earliness.learn(forecast.total_ms, took_ms)
        forecast_ms = forecast.total_ms * forecast.factor
        predicted_ms = forecast_ms * self.caution
        if max(forecast_ms, predicted_ms) < TEACHES * latest_ms:
            return
        self.caution *= 1 + LEARNING * (IN_TIME if took_ms > predicted_ms else IN_TIME - 1)
        self.caution = min(max(self.caution, CAUTION[0]), CAUTION[1])

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Holds a place while a prompt is rendered from messages. Raises like `enter`."""
        self.enter(1)
        try:
            yield
        finally:
            self.num_prompts -= 1


class Rate:
    """Counts events per second, over the last one to two windows."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._now = self._before = 0

    def add(self, count: int) -> None:
        self._turn()
        self._now += count

    def seconds_for(self, count: int) -> int:
        """Seconds until `count` more happen at this rate, whole, for a Retry-After."""
        self._turn()
        total = self._now + self._before
        if not total:
            return SOONEST_S
        span = self._clock() - self._since + (RATE_WINDOW_S if self._before else 0.0)
        return _seconds(count * span / total)

    def _turn(self) -> None:
        now = self._clock()
        if now - self._since >= RATE_WINDOW_S:
            self._before = self._now if now - self._since < 2 * RATE_WINDOW_S else 0
            self._now = 0
            self._since = now


def _seconds(until: float) -> int:
    """Rounds seconds to a whole number that fits a Retry-After."""
    return min(LATEST_S, max(SOONEST_S, math.ceil(until)))


def too_much(
    message: str, code: str, retry_after: int, figures: Mapping[str, object] | None = None
) -> ApiError:
    """Returns an ApiError (429).

    `code` has a row in docs/use/security.md. `retry_after` is in seconds. ApiError explains
    `figures`.
    """
    kind = "rate_limit_error"
    return ApiError(
        message, status=429, kind=kind, code=code, retry_after=retry_after, figures=figures
    )
