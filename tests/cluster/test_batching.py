"""Messages that are sent together travel together."""

import asyncio

import pytest

from pdserve.cluster.links.batching import MAX_CALLS, Batcher


class Calls:
    """Stands for the receiver; each call waits for a `release`."""

    def __init__(self) -> None:
        self.made: list[list[bytes]] = []
        self._gates: list[asyncio.Future[None]] = []

    async def __call__(self, messages: list[bytes]) -> None:
        self.made.append(messages)
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gates.append(gate)
        await gate

    def release(self, error: Exception | None = None) -> None:
        gate = self._gates.pop(0)
        gate.set_result(None) if error is None else gate.set_exception(error)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def sends(batcher: Batcher, *messages: bytes) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(batcher.send(message)) for message in messages]


async def test_a_lone_message_leaves_at_once_and_later_ones_share_a_call() -> None:
    calls = Calls()
    batcher = Batcher(calls, 100)
    first = sends(batcher, b"a")
    await settle()
    assert calls.made == [[b"a"]]
    second = sends(batcher, b"b")
    await settle()
    late = sends(batcher, b"c", b"d", b"e")
    await settle()
    assert calls.made == [[b"a"], [b"b"]] and len(calls.made) == MAX_CALLS
    calls.release()
    await settle()
    assert first[0].done() and not second[0].done()
    assert calls.made[2:] == [[b"c", b"d", b"e"]]
    calls.release()
    calls.release()
    await asyncio.wait_for(asyncio.gather(*first, *second, *late), 60)


async def test_all_messages_of_a_failed_call_fail_and_the_next_go_on() -> None:
    calls = Calls()
    batcher = Batcher(calls, 100)
    tasks = sends(batcher, b"a", b"b")
    await settle()
    calls.release(ConnectionError("gone"))
    for task in tasks:
        with pytest.raises(ConnectionError, match="gone"):
            await task
    [again] = sends(batcher, b"c")
    await settle()
    calls.release()
    await asyncio.wait_for(again, 60)
    assert calls.made == [[b"a", b"b"], [b"c"]]


async def test_a_call_holds_at_most_so_many_bytes_unless_one_message_does() -> None:
    calls = Calls()
    batcher = Batcher(calls, 10)
    tasks = sends(batcher, b"1234", b"1234", b"1234", b"x" * 30, b"1")
    for _ in range(10):
        await settle()
        if calls.made and not all(task.done() for task in tasks):
            calls.release()
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert [[len(message) for message in call] for call in calls.made] == [[4, 4], [4], [30], [1]]


async def test_a_cancelled_sender_disturbs_nobody() -> None:
    calls = Calls()
    batcher = Batcher(calls, 100)
    one, two = sends(batcher, b"a", b"b")
    await settle()
    one.cancel()
    await settle()
    calls.release()
    await asyncio.wait_for(two, 60)
    assert one.cancelled() and calls.made == [[b"a", b"b"]]


async def test_a_message_sent_as_the_last_calls_end_is_not_forgotten() -> None:
    """Two calls end in one turn of the loop, and a third sender wakes in the same."""
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    made: list[list[bytes]] = []

    async def call(messages: list[bytes]) -> None:
        made.append(messages)
        if len(made) <= MAX_CALLS:
            await gate

    batcher = Batcher(call, 100)

    async def late() -> None:
        await gate
        await batcher.send(b"late")

    tasks = []
    for message in (b"a", b"b"):
        tasks += sends(batcher, message)
        await settle()
    tasks.append(asyncio.create_task(late()))
    await settle()
    gate.set_result(None)
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert made == [[b"a"], [b"b"], [b"late"]]


async def test_senders_of_a_call_that_is_cancelled_hear_of_it() -> None:
    calls = Calls()
    batcher = Batcher(calls, 100)
    tasks = sends(batcher, b"a")
    await settle()
    for task in list(batcher._tasks):
        task.cancel()
    with pytest.raises(ConnectionError, match="cancelled"):
        await asyncio.wait_for(tasks[0], 60)
    again = sends(batcher, b"b")
    await settle()
    calls._gates.pop(0)  # cancelled with its call
    calls.release()
    await asyncio.wait_for(asyncio.gather(*again), 60)
