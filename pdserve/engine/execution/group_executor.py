"""The executor of an engine with several ranks: it sends each message to the other ranks and
carries it out on this one.

Each message is sent before this rank's own work, so that all ranks reach a collective at about the
same time. If this rank fails, the others wait for it, so after an error the group cannot be used
any more. Runs on rank 0; the others run `follower.Follower`.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from pdserve.engine.execution.expert_load import ExpertLoad
from pdserve.engine.execution.local_executor import LocalExecutor
from pdserve.engine.execution.model_runner import ModelRunner
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.engine.step_result import HomeSize
from pdserve.engine.stepping.executor import Padding, StepHandle
from pdserve.engine.stepping.wire import (
    ClearExpertLoad,
    GroupWork,
    Reset,
    Stop,
    TellExpertLoad,
    WarmPrefill,
    encode_work,
)
from pdserve.engine.stepping.work import ForwardWork, SampleWork

T = TypeVar("T")
Agree = Callable[[str, Any], list[Any]]
"""See RankGroup.agree."""
LOST_S = 0.1


def said_of(load: ExpertLoad | None, runner: ModelRunner) -> dict[str, list[int]]:
    """A rank's counts by layer, in the form sent to the other ranks. The ranks of a home have equal
    counts, so only one of them reports."""
    if load is None or runner.stage.dims.tp_rank:
        return {}
    return {str(layer): each.tolist() for layer, each in load.now().items()}


class Channel(Protocol):
    """Sends messages to all other ranks."""

    def send(self, message: bytes) -> None:
        """Send in order. Raises if one of the ranks is gone."""
        ...

    def close(self) -> None:
        """End the channel. The other ranks can still read what was sent."""
        ...


class GroupExecutor:
    """Implements `Executor` over several ranks.

    - local: the executor of this rank.
    - agree: `agree` of the ranks' group.
    """

    def __init__(self, local: LocalExecutor, channel: Channel, agree: Agree) -> None:
        self.kv_cache: KVCache = local.kv_cache
        self._local = local
        self._channel = channel
        self._agree = agree
        self._num_loads = 0  # how often the others have reported their counts
        self._ended = ""  # why; a text, because an exception would keep its frames alive
        self._is_closed = False
        self._lost = threading.Event()

    def padding(self, homes: Sequence[HomeSize]) -> list[Padding]:
        return self._local.padding(homes)

    def forward(self, work: ForwardWork) -> StepHandle:
        return self._together(work, lambda: self._local.forward(work))

    def sample(self, work: SampleWork) -> None:
        self._together(None, lambda: self._local.sample(work))

    def warm_prefill(self, num_rows: int) -> None:
        self._together(WarmPrefill(num_rows), lambda: self._local.warm_prefill(num_rows))

    def expert_load(self) -> dict[int, np.ndarray]:
        """See `Executor.expert_load`. Returns the counts of all stages and homes."""
        self._num_loads += 1
        phase = f"expert load {self._num_loads}"
        tell = TellExpertLoad(phase)
        local = self._local
        said = self._together(tell, lambda: self._agree(phase, said_of(local.load, local.runner)))
        found: dict[int, np.ndarray] = {}
        for each in said:
            for layer, counts in each.items():
                rows = np.array(counts, np.int64)
                found[int(layer)] = found[int(layer)] + rows if int(layer) in found else rows
        return dict(sorted(found.items()))

    def clear_expert_load(self) -> None:
        self._together(ClearExpertLoad(), self._local.clear_expert_load)

    def reset(self) -> None:
        self._together(Reset(), self._local.reset)

    def close(self) -> None:
        """Stop the other ranks and close the channel. Idempotent."""
        if not self._ended:
            self._together(Reset(), self._local.reset)
            self._together(Stop(), lambda: None)
            self._ended = "it was closed"
        if not self._is_closed:
            self._is_closed = True
            self._channel.close()

    def lose(self, rank: int) -> None:
        """End the group because the process of another rank is gone. See `break_off`."""
        self.break_off(f"the process of rank {rank} has ended")

    def break_off(self, reason: str) -> None:
        """Begin nothing any more, and end what waits for other ranks on the device. May be called
        from any thread."""
        self._ended = self._ended or reason
        self._lost.set()
        self._local.runner.call_off()

    def _together(self, work: GroupWork | None, here: Callable[[], T]) -> T:
        if self._ended:
            raise RuntimeError(
                f"the ranks of this engine cannot be used any more ({self._ended}): make another "
                "engine"
            )
        try:
            if work is not None:
                self._channel.send(encode_work(work))
            return here()
        except (RuntimeError, ConnectionError) as error:
            # a collective breaks off before the watch has reported whose process is gone
            if self._lost.wait(LOST_S):
                raise RuntimeError(self._ended) from error
            self._ended = str(error)
            raise
        except BaseException as error:
            self._ended = f"{type(error).__name__}: {error}"
            raise
