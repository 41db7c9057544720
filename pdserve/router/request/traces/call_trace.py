"""What is kept of one call that is traced, until its spans can be made.

    begun --admitted--> its prompts run --closed, and all prompts ended--> finished
      '--refused, or the client left----------------------------------------^

Pure bookkeeping, a few entries a prompt and none a token: makes no span and knows no library. Begun
by who receives the call (`router.http.calls`, the Python handle), kept by its Generation, told by
its runs; what is finished goes to `traces.export_queue`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import ApiError
from pdserve.router.request.timeline import Failover, PromptTimeline


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The trace that a call belongs to. parent_id: span id of the client's span; None: the call
    begins the trace. state: the client's tracestate, as the library holds it."""

    trace_id: int
    parent_id: int | None
    state: object = None


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """One prompt that has ended. admitted: perf_counter() of what the timeline's times count from.
    finish_reasons: of its choices; None: it has none."""

    timeline: PromptTimeline
    admitted: float
    finish_reasons: tuple[str | None, ...]
    failovers: tuple[Failover, ...]


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """Why a call never became prompts that could run."""

    status: int
    reason: str


class CallTrace:
    """All moments are of perf_counter(); `epoch_ns` is how much more time_ns() says. It is read
    once a call, so that a clock that is set meanwhile bends no trace."""

    __slots__ = (
        "_closed",
        "_finish",
        "_num_running",
        "context",
        "ended",
        "epoch_ns",
        "num_prompts",
        "operation",
        "prompts",
        "received",
        "refused",
        "request_id",
        "sampling",
    )

    def __init__(
        self,
        context: TraceContext,
        operation: str,
        name: str,
        received: float,
        finish: Callable[["CallTrace"], None],
    ) -> None:
        """operation: as GenAI's conventions name it, such as "chat". name: of the request, as
        answers have it. received: when the call came. finish: gets the call once no more is to
        come."""
        self.context = context
        self.operation = operation
        self.request_id = name
        self.received = received
        self.epoch_ns = time.time_ns() - time.perf_counter_ns()
        self.ended = received
        self.num_prompts = 0
        self.sampling: dict[str, int | float] = {}
        self.prompts: list[PromptEnd] = []
        self.refused: RefusedCall | None = None
        self._num_running = 0
        self._closed = False
        self._finish = finish

    def admitted(self, request_id: str, num_prompts: int, sampling: SamplingParams) -> None:
        """The call is a Generation now, which closes this."""
        self.request_id = request_id
        self.num_prompts = num_prompts
        self.sampling = _asked(sampling)

    def began(self) -> None:
        """One of its prompts runs, and will end."""
        self._num_running += 1

    def prompt_ended(self, end: PromptEnd) -> None:
        self.prompts.append(end)
        self._num_running -= 1
        self._finish_if_done()

    def close(self) -> None:
        """No further prompt begins. Idempotent."""
        if not self._closed:
            self._closed = True
            self._finish_if_done()

    def refuse(self, status: int, reason: str) -> None:
        """The call is answered with an error. Does nothing once it is closed: then its prompts say
        why."""
        if not self._closed:
            self.refused = RefusedCall(status, reason)
            self.close()

    def _finish_if_done(self) -> None:
        if self._closed and not self._num_running:
            self.ended = time.perf_counter()
            self._finish(self)


class Tracer(Protocol):
    """Begins the traces of a router's calls, and exports them."""

    def begin(
        self,
        operation: str,
        name: str,
        received: float,
        traceparent: str | None,
        tracestate: str | None,
    ) -> CallTrace | None:
        """None: the call is not sampled. traceparent, tracestate: W3C's headers of the client."""
        ...

    def close(self) -> None:
        """Export what is left, within a bound. Blocks; call it from a thread."""
        ...


@contextmanager
def ending(trace: CallTrace | None) -> Iterator[None]:
    """Whatever raises within ends the call."""
    try:
        yield
    except ApiError as error:
        if trace is not None:
            trace.refuse(error.status, error.reason)
        raise
    except BaseException:  # the client left, or the task was cancelled
        if trace is not None:
            trace.close()
        raise


def _asked(sampling: SamplingParams) -> dict[str, int | float]:
    """The sampling parameters that GenAI's conventions have attributes for. No text: stop strings
    and grammars are the client's."""
    asked: dict[str, int | float] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "choice.count": sampling.n,
    }
    if sampling.max_tokens is not None:
        asked["max_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        asked["seed"] = sampling.seed
    return asked
