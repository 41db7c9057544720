"""Builds an engine that is ready to serve: its components, the engine over them, and on CUDA the
warm-up. `Following` is the same for the other ranks of the engine, which rank 0 drives.

Knows no requests but those of the warm-up. Called by `LLM` and by the worker's host.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import replace

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.configs.router import SloConfig
from pdserve.engine.components import make_components, make_follower
from pdserve.engine.engine import Engine
from pdserve.engine.execution.group_executor import GroupExecutor
from pdserve.engine.execution.local_executor import LocalExecutor
from pdserve.engine.pacing.pace import Pace
from pdserve.engine.warm_up import teach_pace, warm_up
from pdserve.parallel.bring_up import ALONE, RankGroup
from pdserve.parallel.hang_up import HangUpWatch
from pdserve.parallel.rank_sockets import gather, reach
from pdserve.parallel.step_channel import StepReceiver, StepSender
from pdserve.protocol.start_progress import StartProgress

RankLost = Callable[[int], None]
LAST_READ_S = 0.2
STEPS = "steps"


def build_engine(
    model: ModelConfig,
    config: EngineConfig,
    progress: StartProgress | None = None,
    group: RankGroup = ALONE,
    on_rank_lost: RankLost | None = None,
    slo: SloConfig | None = None,
) -> Engine:
    """Load the model and allocate the KV cache. ValueError names the parameter that is wrong.

    - progress: is told how far the start is.
    - group: rank 0's group; the other ranks run `Following`.
    - on_rank_lost: called from a thread when the process of another rank has died. By default the
      next step fails.
    - slo: the promises by which a served engine paces its steps. The engine has no pace if it is
      None, or with several pipeline stages.
    """
    progress = progress or StartProgress()
    with group.shared_fate():
        components = make_components(model, config, progress, group)
        if not group.is_alone:
            assert isinstance(components.executor, LocalExecutor)
            deadline_s = components.config.step_deadline_s
            executor = _lead(components.executor, group, on_rank_lost, deadline_s)
            components = replace(components, executor=executor)
    resolved = components.config
    is_paced = slo is not None and resolved.pipeline_parallel == 1
    most_rows, hidden_size = resolved.max_num_batched_tokens, components.spec.hidden_size
    pace = Pace.of(slo, most_rows, hidden_size) if slo is not None and is_paced else None
    engine = Engine(components, pace)
    if engine.device.type == "cuda":
        progress.enter("warm_up")
        warm_up(engine, progress.report)
        teach_pace(engine)
        engine.mark_warm()
    return engine


class Following:
    """Another rank, from its start to its end. `follower` holds its share of the model. The process
    ends at once when rank 0's process is gone."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        group: RankGroup,
        progress: StartProgress | None = None,
    ) -> None:
        """Starts while rank 0 runs `build_engine`."""
        with group.shared_fate():
            self.follower = make_follower(model, config, progress or StartProgress(), group)
            on_cuda = self.follower.runner.device.type == "cuda"
            self._receiver = StepReceiver(reach(group, STEPS), spins=on_cuda)
        self._stopped = threading.Event()
        self._watch = HangUpWatch({0: self._receiver.end}, self._end)

    def run(self) -> None:
        """Do what rank 0 says, until it says to stop."""
        self.follower.run(self._receiver.receive)
        self._stopped.set()
        self._watch.stop()
        self._receiver.close()

    def _end(self, _: int) -> None:
        """Rank 0 has hung up: it sent a stop, which is about to be read, or it died."""
        if not self._stopped.wait(LAST_READ_S):
            os._exit(1)


def _lead(
    local: LocalExecutor,
    group: RankGroup,
    on_rank_lost: RankLost | None,
    step_deadline_s: float,
) -> GroupExecutor:
    sender = StepSender(gather(group, STEPS), step_deadline_s)
    executor = GroupExecutor(local, sender, group.agree)
    sender.watch(on_rank_lost or executor.lose)
    return executor
