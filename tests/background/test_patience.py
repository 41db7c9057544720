"""A deadline that does not run while the event loop stands still."""

import asyncio
import time

import pytest

from pdserve.background.patience import patience


async def test_it_ends_what_takes_too_long() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with patience(0.05):
            await asyncio.sleep(60)
    assert time.monotonic() - began > 0.04


async def test_what_is_in_time_is_left_alone() -> None:
    async with patience(0.02):
        pass
    with pytest.raises(KeyError):
        async with patience(0.02):
            raise KeyError
    await asyncio.sleep(0.05)  # nothing is left that could cancel this


async def test_time_in_which_the_loop_stands_still_does_not_count() -> None:
    """An answer that came meanwhile is read, at once or a little later."""
    loop = asyncio.get_running_loop()
    async with patience(0.2):
        answer: asyncio.Future[None] = loop.create_future()
        time.sleep(1.0)  # the whole process: that is what is tested
        loop.call_later(0.05, answer.set_result, None)
        await answer
