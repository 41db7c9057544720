"""Macro steps: many steps of the same decodes, simulated at once.

While no request waits and no sequence ends, every step of an engine does the same: it gives each
sequence one token. A macro step does the work of `count` turns of the worker, and says when each of
them ends. So a request that arrives in the middle is served between the same two steps as without
macro steps. This module changes the engine's steps in flight. `paper_worker` uses it.
"""

from dataclasses import dataclass

from pdserve.engine.engine import Engine
from pdserve.engine.pacing.step_model import StepLoad as PaceLoad
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.plan.profile.step_times import StepLoad
from pdserve.plan.simulation.paper_executor import TOKEN, PaperExecutor, PaperStep
from pdserve.plan.simulation.virtual_time import CLOCK
from pdserve.protocol.events import Delta, Event
from pdserve.protocol.request_key import RequestKey


@dataclass(frozen=True)
class MacroStep:
    """Many equal steps. Moments are on the virtual clock."""

    members: list[Sequence]
    began: float  # When the first turn begins.
    num_keys: int  # Rows that the sequences had computed by then.
    turns: list[float]  # When each turn ends.
    ends: list[float]  # When the device is done with the step that each turn has sent.
    seconds: list[float]  # Device seconds of each step.

    def begins(self, number: int) -> float:
        """Returns when turn `number` begins."""
        return self.turns[number - 1] if number else self.began


def plan_macro(engine: Engine, until: float) -> MacroStep | None:
    """Returns the next turns if they are alike and end before `until`. None: there are none."""
    executor = engine.executor
    assert isinstance(executor, PaperExecutor)
    members = engine.scheduler.running
    if not members or not _is_steady(engine, executor):
        return None
    count = min(s.request.max_tokens - 1 - s.num_generated for s in members)
    size = engine.config.block_size
    free = engine.blocks.num_free - len(members)
    while count > 0 and _num_new_blocks(members, count, size) > free:
        count //= 2
    if count < 1:
        return None
    macro = _timed(engine, executor, members, count, until)
    return macro if macro.turns else None


def play(engine: Engine, macro: MacroStep, count: int) -> list[tuple[RequestKey, Event]]:
    """Does the first `count` turns and returns their events. Sets the clock to the end of the last
    one."""
    executor = engine.executor
    assert isinstance(executor, PaperExecutor)
    events: list[tuple[RequestKey, Event]] = []
    home = engine.homes[0]
    tokens = (TOKEN,) * count
    for seq in macro.members:
        request = seq.request
        delta = Delta(
            request.key.request_id,
            request.key.attempt,
            seq.choice,
            seq.num_generated,
            tokens,
            None,
            None,
            None,
        )
        events.append((request.key, delta))
        home.provide(seq, count)
        seq.token_ids += tokens[1:]
        seq.num_computed += count
        home.commit_full_blocks(seq)  # without the last token: a step commits before it samples
        seq.token_ids.append(TOKEN)
    engine.stats.num_steps += count
    engine.stats.generation_tokens += count * len(macro.members)
    in_flight = _handles(engine)
    collected = [*(handle.takes for handle in in_flight), *macro.seconds]
    _teach(engine, macro, collected[:count])
    executor.skip(sum(macro.seconds[:count]), macro.ends[count - 1])
    for handle in in_flight:
        handle.ends = macro.ends[count - 1]
        handle.takes = macro.seconds[count - 1]
    CLOCK.now = macro.turns[count - 1]
    return events


def _teach(engine: Engine, macro: MacroStep, collected: list[float]) -> None:
    """Reports these steps to the engine's pace, as the scheduler and the engine do.

    - collected: Device seconds of the step that each turn waits for. That is the step that the
      previous turn sent.
    """
    pace = engine.pace
    if pace is None:
        return
    num = len(macro.members)
    CLOCK.now = macro.began
    for number, seconds in enumerate(collected):
        pace.nobody_waits()
        load = PaceLoad(0, num, macro.num_keys + num * number) if pace.measures_next else None
        pace.planned(load, is_scored=False, waits=False)
        CLOCK.now = macro.turns[number]
        pace.collected(seconds)


def _handles(engine: Engine) -> list[PaperStep]:
    handles = [step.handle for step in engine.steps.in_flight]
    return [handle for handle in handles if isinstance(handle, PaperStep)]


def _is_steady(engine: Engine, executor: PaperExecutor) -> bool:
    """True if the next step only gives each running sequence its next token."""
    scheduler = engine.scheduler
    in_flight = engine.steps.in_flight
    width = engine.config.max_steps_in_flight - 1
    if (
        scheduler.waiting
        or len(engine.homes) > 1
        or executor.num_stages > 1
        or width > 1
        or len(in_flight) != width
        or engine.steps.is_held
        or engine.homes[0].wants_blocks
    ):
        return False
    num = len(scheduler.running)
    if any(s.num_rows != num or len(s.members) != num or s.forward.is_late for s in in_flight):
        return False
    return all(
        seq.num_pending == width
        and seq.num_uncomputed == 1
        and not seq.pending_forks
        and not seq.request.prefill_only
        and len(seq.request.sequences) == 1
        for seq in scheduler.running
    )


def _num_new_blocks(members: list[Sequence], count: int, size: int) -> int:
    return sum(-(-(s.num_computed + count) // size) - len(s.block_table) for s in members)


def _timed(
    engine: Engine, executor: PaperExecutor, members: list[Sequence], count: int, until: float
) -> MacroStep:
    """Returns the times that `PaperExecutor.forward` and the step's `wait` would give."""
    num = len(members)
    keys = sum(seq.num_computed for seq in members)
    now = CLOCK.now
    free = executor.free_at
    waits = [handle.ends for handle in _handles(engine)]
    host_s = executor.times.host_s
    macro = MacroStep(list(members), now, keys, [], [], [])
    for _ in range(count):
        keys += num
        seconds = executor.times.seconds(StepLoad(num, keys))
        free = max(now + host_s, free) + seconds
        waits.append(free)
        now = max(now, waits.pop(0))
        if now >= until:
            break
        macro.turns.append(now)
        macro.ends.append(free)
        macro.seconds.append(seconds)
    return macro
