"""The main module of a process that simulates: jobs come in, one per line, and outcomes go out.

    python -m pdserve.plan.simulation.child < jobs > outcomes

It patches the clocks first and then imports the rest of pdserve, so its imports stand inside
functions. `search.simulators` starts it with PYTHONHASHSEED=0, so that sets have a fixed order.
"""

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from pdserve.plan.simulation.virtual_time import CLOCK, START_S, VirtualLoop, patch_clocks

if TYPE_CHECKING:
    from pdserve.plan.simulation.jobs import Job, Outcome
    from pdserve.plan.simulation.scene import Scene


def main() -> None:
    patch_clocks()
    # only after the clocks are patched, because these modules may keep references to them
    import gc
    import logging

    import msgspec
    import torch

    from pdserve.parallel.hang_up import end_with
    from pdserve.plan.simulation.jobs import Job
    from pdserve.plan.simulation.scene import Scene

    end_with(os.getppid(), sys.stdin.fileno())
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    decode = msgspec.json.Decoder(Job).decode
    for line in sys.stdin.buffer:
        CLOCK.now = START_S
        loop = VirtualLoop()
        asyncio.set_event_loop(loop)
        try:
            outcome = loop.run_until_complete(_simulated(Scene, decode(line)))
        finally:
            _drop(loop)
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()


async def _simulated(scene: "type[Scene]", job: "Job") -> "Outcome":
    return await scene(job).run()


def _drop(loop: VirtualLoop) -> None:
    """Ends the cluster at once: cancels all tasks and closes the loop."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()


if __name__ == "__main__":
    main()
