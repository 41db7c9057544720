"""The other ranks' side of a group: each carries out rank 0's messages on its own device, in the
order in which they come.

A follower samples nothing. The tokens that rank 0 draws come by a collective. If layers are split
into stages, they come in the messages of the steps that read them.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from pdserve.engine.execution.expert_load import ExpertLoad
from pdserve.engine.execution.group_executor import Agree, said_of
from pdserve.engine.execution.local_executor import embedded_rows, logits_to_score, scores_of
from pdserve.engine.execution.model_runner import ModelRunner
from pdserve.engine.execution.trial_steps import warm_prefill
from pdserve.engine.stepping.step_watch import StepClock
from pdserve.engine.stepping.wire import (
    ClearExpertLoad,
    GroupWork,
    Reset,
    Stop,
    TellExpertLoad,
    WarmPrefill,
    decode_work,
)
from pdserve.engine.stepping.work import ForwardWork
from pdserve.protocol.start_progress import Report


class Follower:
    """Carries out rank 0's messages on one rank.

    - runner: has the KV cache.
    - fingerprint, rows_digest, unrounded: see EngineComponents.
    - load: rows per expert of this rank; None if it has no experts.
    - agree: see GroupExecutor.
    - clock: runs while a message is carried out.
    """

    def __init__(
        self,
        runner: ModelRunner,
        fingerprint: str,
        rows_digest: str,
        unrounded: Mapping[str, str],
        load: ExpertLoad | None,
        agree: Agree,
    ) -> None:
        self.runner = runner
        self.kv_cache = runner.kv_cache
        self.fingerprint = fingerprint
        self.rows_digest = rows_digest
        self.unrounded = unrounded
        self.load = load
        self.clock = StepClock()
        self._agree = agree

    def compile(self, decodes: Sequence[int], prompts: Sequence[int], report: Report) -> None:
        """Compile while rank 0 runs `LocalExecutor.compile`, in the same order."""
        if decodes:
            self.runner.capture_graphs(decodes, prompts, report)

    def run(self, receive: Callable[[], bytes]) -> None:
        """Do what is received until a Stop comes. receive: waits for the next message."""
        while True:
            work = decode_work(receive())
            if isinstance(work, Stop):
                return
            self.clock.start()
            self._carry_out(work)
            self.clock.stop()

    def _carry_out(self, work: GroupWork) -> None:
        match work:
            case ForwardWork():
                self._forward(work)
            case WarmPrefill(num_rows):
                warm_prefill(self.runner, num_rows)
            case TellExpertLoad(phase):
                self._agree(phase, said_of(self.load, self.runner))
            case ClearExpertLoad():
                if self.load is not None:
                    self.load.clear()
            case Reset():
                self.runner.synchronize()

    def _forward(self, work: ForwardWork) -> None:
        output = self.runner.forward(work)
        if output is None:
            return
        for home, scored in scores_of(work):
            for _ in logits_to_score(self.runner, output.hidden, home, scored):
                pass  # rank 0 uses the logits; here only the collectives count
        embedded_rows(self.runner, output.hidden, work)
        if work.num_samples:
            room = torch.empty(work.num_samples, dtype=torch.int32, device=self.runner.device)
            self.runner.share_tokens(output.slots, room)
