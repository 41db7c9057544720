"""An executor carries steps out; this is the interface for one rank or many.

The engine sends each step's ForwardWork, then its SampleWork, and reads the results from the step's
handle. Nothing here waits for the device, except a handle that is asked to. Implemented by
`execution.local_executor` and `execution.group_executor`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdserve.engine.memory.kv_cache import KVCache
from pdserve.engine.sampling.sampled_tokens import Sampled
from pdserve.engine.step_result import HomeSize
from pdserve.engine.stepping.work import ForwardWork, SampleWork
from pdserve.protocol.events import TokenLogprob


@dataclass(frozen=True)
class Padding:
    """Padded size of a home's part of a step.

    - graph: See ForwardWork.
    - is_eager: True if the host launches the step's kernels one by one.
    """

    graph: int
    num_rows: int
    num_sequences: int
    is_eager: bool = False


class StepHandle(Protocol):
    """A step on its way. Ask for its results only after `wait`."""

    def ready(self) -> bool:
        """True if the step is done, including its sampling."""
        ...

    def wait(self) -> None: ...

    def seconds(self) -> float:
        """Device time of a step that is done, without the gap before a late SampleWork; 0 on
        CPU."""
        ...

    def samples(self) -> list[Sampled]:
        """The tokens of each of the step's samples."""
        ...

    def scores(self) -> list[list[TokenLogprob]]:
        """One list for each entry of HomeWork.scores, home after home."""
        ...

    def hidden(self) -> np.ndarray:
        """Returns float32 `[n, hidden]`, the rows of HomeWork.hidden_rows after the last norm, home
        after home."""
        ...


class Executor(Protocol):
    """Carries out the messages of steps. kv_cache: this rank's."""

    kv_cache: KVCache

    def padding(self, homes: Sequence[HomeSize]) -> list[Padding]:
        """The padding that a step needs in each home. A home with nothing to do needs at least one
        row. Either all homes use one graph, or none does."""
        ...

    def forward(self, work: ForwardWork) -> StepHandle:
        """Queue the step's rows. AssertionError if the previous step still lacks its
        SampleWork."""
        ...

    def sample(self, work: SampleWork) -> None:
        """Queue the sampling of the step that was forwarded last, which must have samples."""
        ...

    def warm_prefill(self, num_rows: int) -> None:
        """Prepare prompt attention for steps of up to num_rows rows."""
        ...

    def expert_load(self) -> dict[int, np.ndarray]:
        """Number of tokens that went to each expert so far, int64 `[num_experts]` for each layer
        with a mixture of experts, in order. Waits for the devices of all ranks."""
        ...

    def clear_expert_load(self) -> None:
        """Set the counts of all experts to zero."""
        ...

    def reset(self) -> None:
        """Forget a step that was not sampled, and return when the device has nothing left to do,
        even if it has failed."""
        ...

    def close(self) -> None:
        """`reset` for good, and end the other ranks. Whatever has failed before, it does not wait
        for ever."""
        ...


def padded_rows(executor: Executor, most: int) -> tuple[int, ...]:
    """The numbers of rows, at most `most`, to which smaller steps with prompts are padded, in
    order."""
    found = set()
    for num_rows in range(2, most):
        [padding] = executor.padding([HomeSize(num_rows, 1)])
        if num_rows < padding.num_rows <= most:
            found.add(padding.num_rows)
    return tuple(sorted(found))
