"""How much a router takes on: prompts at once, and prompt tokens that no worker has computed yet.

Refuses with 429 and a Retry-After that follows from how fast places became free lately. Counts only; knows no workers,
no HTTP and no text. `router.service` takes seats, a request's run gives them back.

    enter (before tokenising) --fill--> queued --computed--> running --leave--> free      (leave: from any of them)
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdserve.router.errors import ApiError

# Retry-After is kept within these seconds: less is a busy loop of the client, more is a guess about another hour
SOONEST_S, LATEST_S = 1, 60
RATE_WINDOW_S = 10.0


class Seat:
    """One prompt's place. Every method is idempotent."""

    __slots__ = ("_admission", "_here", "_queued")

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self._here = True
        self._queued = 0

    def fill(self, num_tokens: int) -> None:
        """The prompt has so many tokens, which wait now."""
        self._queued = num_tokens
        self._admission.queued_tokens += num_tokens

    def computed(self) -> None:
        """A worker has computed the prompt."""
        if self._queued:
            self._admission.queued_tokens -= self._queued
            self._admission.token_rate.add(self._queued)
            self._queued = 0

    def leave(self) -> None:
        if self._here:
            self._here = False
            self._admission.queued_tokens -= self._queued
            self._queued = 0
            self._admission.num_prompts -= 1
            self._admission.prompt_rate.add(1)


class Admission:
    """Use from one event loop. max_prompts, max_queued_tokens: see RouterConfig."""

    def __init__(self, max_prompts: int, max_queued_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_prompts = 0
        self.queued_tokens = 0
        self.prompt_rate = Rate(clock)
        self.token_rate = Rate(clock)
        self._max_prompts = max_prompts
        self._max_queued_tokens = max_queued_tokens

    def enter(self, num_prompts: int) -> list[Seat]:
        """A seat a prompt, or ApiError: 400 when there will never be so many, 429 when there are not now."""
        if num_prompts > self._max_prompts:
            message = (
                f"prompt: {num_prompts} prompts in a call, but this router takes {self._max_prompts} at once: send "
                "fewer, or raise router.max_concurrent_prompts"
            )
            raise ApiError(message, param="prompt", code="too_many_prompts")
        over = self.num_prompts + num_prompts - self._max_prompts
        if over > 0:
            message = (
                f"this router is answering {self.num_prompts} prompts and takes {self._max_prompts} at once: try again "
                "later, or raise router.max_concurrent_prompts"
            )
            raise _too_much(message, "too_many_concurrent_prompts", self.prompt_rate.seconds_for(over))
        self.num_prompts += num_prompts
        return [Seat(self) for _ in range(num_prompts)]

    def check_tokens(self, num_tokens: int) -> None:
        """ApiError (429) when so many more would be too much to wait for. A call alone is never too much."""
        over = self.queued_tokens + num_tokens - self._max_queued_tokens
        if over > 0 and self.queued_tokens:
            message = (
                f"{self.queued_tokens} prompt tokens wait at this router, which takes {self._max_queued_tokens}: try "
                "again later, or raise router.max_queued_tokens"
            )
            raise _too_much(message, "too_many_queued_tokens", self.token_rate.seconds_for(over))

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A prompt counts while it is made of messages, too. Raises as `enter`."""
        self.enter(1)
        try:
            yield
        finally:
            self.num_prompts -= 1


class Rate:
    """How many a second, over the last one to two windows."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._now = self._before = 0

    def add(self, count: int) -> None:
        self._turn()
        self._now += count

    def seconds_for(self, count: int) -> int:
        """Until so many more, if it goes on like that: whole seconds for a Retry-After."""
        self._turn()
        total = self._now + self._before
        if not total:
            return SOONEST_S
        span = self._clock() - self._since + (RATE_WINDOW_S if self._before else 0.0)
        return min(LATEST_S, max(SOONEST_S, math.ceil(count * span / total)))

    def _turn(self) -> None:
        now = self._clock()
        if now - self._since >= RATE_WINDOW_S:
            self._before = self._now if now - self._since < 2 * RATE_WINDOW_S else 0
            self._now, self._since = 0, now


def _too_much(message: str, code: str, retry_after: int) -> ApiError:
    return ApiError(message, status=429, kind="rate_limit_error", code=code, retry_after=retry_after)
