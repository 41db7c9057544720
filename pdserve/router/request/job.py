"""One prompt's job, and what all jobs of a router share.

Values only: what a call asks for each of its prompts, and the parts that every run works with.
Made by `router.request.service`, used by `router.request.request_run` and its parts.
"""

from dataclasses import dataclass

from pdserve.background.pace import Pacer
from pdserve.configs.router import RouterConfig
from pdserve.protocol.request_key import RequestKind
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.choosing.choose import Chooser
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.metrics import RouterMetrics
from pdserve.router.request.request_log import RequestLog
from pdserve.router.request.slo import Goodput
from pdserve.router.request.traces.call_trace import CallTrace
from pdserve.text.answers.reading import AnswerReading
from pdserve.text.stop import StopStrings
from pdserve.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Job:
    """One prompt of a call. sampling: as workers are told, so its seed is set, and it holds no stop
    strings: the router looks for these itself. stops: the call's, None when it has none.
    open_ended: a choice ends by length where its worker has no more room, even before max_tokens,
    which may be None. reading: how the answers are read for reasoning and calls; None: all is
    content. request_id: never used before in this process. prompt: its number within the
    call. received: perf_counter() when the call came. trace: of the call; None: it is not traced.
    kind: what is wanted of the prompt.
    Nobody sets a field later but `forget_prompt`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    received: float
    prompt: int = 0
    priority: int = 0
    cache_salt: str = ""
    session_id: str = ""
    stops: StopStrings | None = None
    open_ended: bool = False
    reading: AnswerReading | None = None
    trace: CallTrace | None = None
    kind: RequestKind = "generate"

    def forget_prompt(self) -> None:
        """Free it once the run has ended: the call keeps its runs, and others of them may take
        long."""
        self.prompt_token_ids = ()


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """What all requests of a router share. resume_wait_s: how long a request that lost its worker
    waits for another."""

    fleet: Fleet
    chooser: Chooser
    tokenizer: Tokenizer
    config: RouterConfig
    metrics: RouterMetrics
    goodput: Goodput
    request_log: RequestLog
    pacer: Pacer
    resume_wait_s: float = 60.0
