"""The job of one prompt, and what all jobs of a router share.

Values only: what a call asks for each of its prompts, and the parts that every run works with. Made
by `router.request.service`; used by `router.request.request_run` and its parts.
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
    """One prompt of a call. Nothing changes a field later except `forget_prompt`."""

    # Never used before in this process.
    request_id: str
    prompt_token_ids: tuple[int, ...]
    # As workers get it: with a seed, and without stop strings, which the router looks for itself.
    sampling: SamplingParams
    # perf_counter() when the call came.
    received: float
    # The prompt's number within the call.
    prompt: int = 0
    priority: int = 0
    cache_salt: str = ""
    session_id: str = ""
    # The call's; None if it has none.
    stops: StopStrings | None = None
    # True: a choice ends by length where its worker has no more room, even before max_tokens. Then
    # max_tokens may be None.
    open_ended: bool = False
    # How answers are read for reasoning and calls; None: everything is content.
    reading: AnswerReading | None = None
    # The call's trace; None: it is not traced.
    trace: CallTrace | None = None
    kind: RequestKind = "generate"

    def forget_prompt(self) -> None:
        """Frees the prompt once the run has ended.

        The call keeps its runs, and others of them may take long.
        """
        self.prompt_token_ids = ()


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """The parts that all requests of a router share.

    A request that lost its worker waits `resume_wait_s` for another one.
    """

    fleet: Fleet
    chooser: Chooser
    tokenizer: Tokenizer
    config: RouterConfig
    metrics: RouterMetrics
    goodput: Goodput
    request_log: RequestLog
    pacer: Pacer
    resume_wait_s: float = 60.0
