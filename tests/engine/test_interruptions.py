"""`LLM` after an exception or Ctrl-C, wherever it came: the next call answers like a new `LLM`, and
nothing is leaked.

Most tests run the model on paper (engine/harness.py), which knows the prefix that each row of the
KV cache was written for. If the prefix cache offers a block that was never written, the step that
reads it fails.
"""

import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from engine.harness import PaperExecutor, held_at_random, paper_of, put_on_paper
from engine.no_repeat import use_rule

from pdserve.engine import engine as engine_module
from pdserve.engine.llm import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.lengthy

ENGINE_FOLDER = str(Path(engine_module.__file__).parent)
# 9 blocks of 16 tokens: preemptions. Prompts of 40 and 41 tokens, three choices each: forks, and
# copies of blocks.
TIGHT: dict[str, Any] = {"num_kv_blocks": 10, "max_num_batched_tokens": 48, "max_num_seqs": 8}
CALLS_TRIED = 8
INSTRUCTIONS_TRIED = 20


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell started the tests in the background and
    had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def prompts() -> list[list[int]]:
    chance = random.Random(1)
    common = [chance.randrange(256) for _ in range(32)]
    return [[*common, *(chance.randrange(256) for _ in range(8 + i))] for i in range(2)]


SAMPLING = SamplingParams(
    n=3, temperature=1.0, seed=5, max_tokens=20, repetition_penalty=1.2, ignore_eos=True
)


def make_llm(folder: Path, mode: str, on_paper: bool = True) -> LLM:
    """Make an LLM. mode: "late" samples as late as a rule may ask for; "held" sends every second
    step later."""
    llm = LLM(str(folder), tokenizer=False, device="cpu", async_scheduling=mode != "sync", **TIGHT)
    if on_paper:
        put_on_paper(llm.engine)
    if mode == "late":
        use_rule(llm.engine)  # it applies: the seed is odd
    if mode == "held":
        held_at_random(llm.engine)
    return llm


def generate(llm: LLM) -> list[RequestOutput]:
    return llm.generate(prompts(), SAMPLING, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def assert_empty(llm: LLM) -> None:
    engine = llm.engine
    engine.check_integrity()
    assert not engine.has_work and engine.blocks.num_free == engine.blocks.num_usable
    assert engine.is_at_rest


def assert_as_new(llm: LLM, expected: list[list[int]]) -> None:
    assert_empty(llm)
    assert tokens(generate(llm)) == expected
    assert_empty(llm)


@pytest.fixture(scope="module", params=["sync", "async", "late", "held"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, mode: str) -> list[list[int]]:
    llm = make_llm(tiny_llama, mode)
    answers = tokens(generate(llm))
    assert llm.engine.scheduler.num_preemptions and paper_of(llm.engine).num_copies, (
        "these belong to the workload"
    )
    assert bool(paper_of(llm.engine).num_late) == (mode == "late")
    return answers


def broken(original: Callable[..., Any], at: int, raises: Callable[[], None]) -> Callable[..., Any]:
    """Raises at its call number at // 2: before its work when `at` is even, else behind it."""
    calls = itertools.count()

    def call(*args: Any, **keywords: Any) -> Any:
        is_due = next(calls) == at // 2
        if is_due and at % 2 == 0:
            raises()
        result = original(*args, **keywords)
        if is_due:
            raises()
        return result

    return call


def out_of_memory() -> None:
    raise RuntimeError("the device is out of memory")


def interrupt() -> None:
    """As Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


PLACES = {
    "planning": lambda engine: (engine.scheduler, "schedule"),
    "blocks": lambda engine: (engine.blocks, "allocate"),
    "plan": lambda engine: (engine._planner, "plan"),
    "advance": lambda engine: (engine._planner, "_advance"),
    "forward": lambda engine: (engine.executor, "forward"),
    "stage": lambda engine: (engine._planner, "sample_work"),
    "sample": lambda engine: (engine.executor, "sample"),
    "draw": lambda engine: (engine.executor.sampler, "sample"),
    "collect": lambda engine: (engine._collector, "collect"),
    "accept": lambda engine: (engine._collector, "_accept"),
    "add": lambda engine: (engine, "add"),
    "step": lambda engine: (engine, "step"),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("place", PLACES)
def test_each_of_the_first_calls(
    tiny_llama: Path, mode: str, expected: list[list[int]], place: str
) -> None:
    llm = make_llm(tiny_llama, mode)
    for at in range(CALLS_TRIED if place != "add" else 4):
        raises = (out_of_memory, interrupt)[at // 2 % 2]
        with pytest.MonkeyPatch.context() as patch:
            owner, name = PLACES[place](llm.engine)
            patch.setattr(owner, name, broken(getattr(owner, name), at, raises))
            with pytest.raises((RuntimeError, KeyboardInterrupt)):
                generate(llm)
        assert_as_new(llm, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", ["forward", "sample", "collect"])
def test_on_the_real_model(tiny_llama: Path, mode: str, place: str) -> None:
    expected = tokens(generate(make_llm(tiny_llama, mode, on_paper=False)))
    llm = make_llm(tiny_llama, mode, on_paper=False)
    for at in range(4):
        with pytest.MonkeyPatch.context() as patch:
            owner, name = PLACES[place](llm.engine)
            patch.setattr(owner, name, broken(getattr(owner, name), at, out_of_memory))
            with pytest.raises(RuntimeError, match="out of memory"):
                generate(llm)
        assert_as_new(llm, expected)


class Interrupter:
    """Raises KeyboardInterrupt at one bytecode instruction of the engine's modules, and counts
    them."""

    def __init__(self, at: int | None) -> None:
        self._at = at
        self.count = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        caller = frame.f_back
        is_device = caller is not None and caller.f_code is PaperExecutor._compute.__code__
        if is_device or not frame.f_code.co_filename.startswith(ENGINE_FOLDER):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count - 1 == self._at:
                raise KeyboardInterrupt
        return self._instruction


def count_instructions(llm: LLM) -> int:
    counter = Interrupter(None)
    with counter.watching():
        generate(llm)
    return counter.count


def interrupted(llm: LLM, at: int) -> None:
    with pytest.raises(KeyboardInterrupt), Interrupter(at).watching():
        generate(llm)


@pytest.mark.sampled(3)
def test_any_instruction(tiny_llama: Path, mode: str, expected: list[list[int]]) -> None:
    llm = make_llm(tiny_llama, mode)
    chance = random.Random(mode)
    total = count_instructions(make_llm(tiny_llama, mode))
    for part in range(INSTRUCTIONS_TRIED):
        begin, end = (total * number // INSTRUCTIONS_TRIED for number in (part, part + 1))
        interrupted(llm, chance.randrange(begin, end))
        if llm._is_dirty:
            assert tokens(generate(llm)) == expected  # before the call had begun, or behind its end
        assert_as_new(llm, expected)
        llm.engine.reset()  # with a filled cache the next call would run other instructions


def test_any_instruction_of_the_reset_itself(
    tiny_llama: Path, mode: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two times Ctrl-C: the next call finishes what the second one interrupted."""
    llm = make_llm(tiny_llama, mode)
    reset = llm.engine.reset
    counter = Interrupter(None)

    def watched() -> None:
        with counter.watching():
            reset()

    monkeypatch.setattr(llm.engine, "reset", watched)
    with pytest.MonkeyPatch.context() as patch:
        executor = llm.engine.executor
        patch.setattr(executor, "forward", broken(executor.forward, 7, interrupt))
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
    total = counter.count
    assert total > 100
    for at in random.Random(2).sample(range(total), INSTRUCTIONS_TRIED // 2):
        counter = Interrupter(at)
        with pytest.MonkeyPatch.context() as patch:
            executor = llm.engine.executor
            patch.setattr(executor, "forward", broken(executor.forward, 7, interrupt))
            with pytest.raises(KeyboardInterrupt):
                generate(llm)
        counter = Interrupter(None)
        assert tokens(generate(llm)) == expected
        assert_empty(llm)


def test_the_device_is_quiet_before_blocks_are_given_to_others(tiny_llama: Path) -> None:
    """Steps that are still queued on the device would overwrite the next call's rows."""
    llm = make_llm(tiny_llama, "async")
    executor = paper_of(llm.engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "sample", broken(executor.sample, 5, out_of_memory))
        with pytest.raises(RuntimeError, match="out of memory"):
            generate(llm)
    assert executor.steps and all(step.ready() for step in executor.steps)


def test_readers_of_an_old_ticket_notice_the_reset(tiny_llama: Path) -> None:
    engine = make_llm(tiny_llama, "sync").engine
    before = engine.blocks.generations.copy()
    engine.reset()
    assert (engine.blocks.generations[1:] > before[1:]).all()


def test_calls_of_several_threads_run_one_after_the_other(
    tiny_llama: Path, mode: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(tiny_llama, mode)
    running = threading.Lock()
    run_to_end = llm._run_to_end

    def alone(*args: Any) -> None:
        assert running.acquire(blocking=False), "two calls at once"
        time.sleep(0.01)
        run_to_end(*args)
        running.release()

    monkeypatch.setattr(llm, "_run_to_end", alone)
    with ThreadPoolExecutor(3) as threads:
        for answer in threads.map(lambda _: generate(llm), range(3)):
            assert tokens(answer) == expected
