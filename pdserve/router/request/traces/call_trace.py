"""Keeps what happened in one traced call, until its spans can be made.

    begun --admitted--> its prompts run --closed, and all prompts ended--> finished
      '--refused, or the client left----------------------------------------^

Pure bookkeeping, with a few entries per prompt and none per token: makes no span and knows no
library. Begun by the receiver of the call (`router.http.calls`, the Python handle), kept by its
Generation, and filled by its runs. Finished calls go to `traces.export_queue`.
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
    """The trace that a call belongs to."""

    trace_id: int
    parent_id: int | None  # The client's span; None: the call begins the trace.
    state: object = None  # The client's tracestate, in the library's form.


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """One prompt that has ended."""

    timeline: PromptTimeline
    admitted: float  # perf_counter() from which the timeline's times count.
    finish_reasons: tuple[str | None, ...]  # One per choice; None: it has none.
    failovers: tuple[Failover, ...]


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """Says why a call never became prompts that could run."""

    status: int
    reason: str


class CallTrace:
    """One traced call. All moments are of perf_counter().

    `epoch_ns` is added to them to get time_ns(). It is read once per call, so that setting the
    clock meanwhile bends no trace.
    """

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
        """Begins the trace.

        `operation` is a name of GenAI's conventions, such as "chat". `name` is the request's name
        in answers. The call came at `received`. `finish` gets the call once nothing more can come.
        """
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
        """Notes that the call is a Generation now, which will close this."""
        self.request_id = request_id
        self.num_prompts = num_prompts
        self.sampling = _asked(sampling)

    def began(self) -> None:
        """Notes that one of its prompts runs, and will end."""
        self._num_running += 1

    def prompt_ended(self, end: PromptEnd) -> None:
        self.prompts.append(end)
        self._num_running -= 1
        self._finish_if_done()

    def close(self) -> None:
        """Notes that no further prompt begins. Idempotent."""
        if not self._closed:
            self._closed = True
            self._finish_if_done()

    def refuse(self, status: int, reason: str) -> None:
        """Notes that the call is answered with an error.

        Does nothing once it is closed, because its prompts then say why.
        """
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
        """Begins a trace, or returns None if the call is not sampled.

        `traceparent` and `tracestate` are the client's W3C headers.
        """
        ...

    def close(self) -> None:
        """Exports what is left, within a time limit. It blocks, so call it from a thread."""
        ...


@contextmanager
def ending(trace: CallTrace | None) -> Iterator[None]:
    """Ends the call if anything is raised within."""
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
    """Returns the sampling parameters that have attributes in GenAI's conventions.

    It leaves out all text: stop strings and grammars are the client's.
    """
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
