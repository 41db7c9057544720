"""Time made by hand, for tests of what depends on it: it stands still unless the test makes it
pass.

A test puts it where code asks for the time: an argument, or a module's own `time`.
"""

import asyncio


class Clock:
    def __init__(self, seconds: float = 1000.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds

    monotonic = perf_counter = __call__

    async def sleep(self, seconds: float) -> None:
        """In place of asyncio's: what sleeps takes this time, and none of the machine's."""
        self.seconds += seconds
        await asyncio.sleep(0)
