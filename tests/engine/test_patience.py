"""A prompt that comes while another is computed is queued behind it at once. The engine runs on
paper, in virtual time, with the step times of an H200."""

from collections import deque
from collections.abc import Iterator
from itertools import count

import pytest

from benchmarks.support.places import SHAPES
from pdserve.configs.engine import EngineConfig
from pdserve.configs.router import SloConfig
from pdserve.engine.engine import Engine
from pdserve.engine.step_result import StepResult
from pdserve.engine.stepping.executor import StepHandle
from pdserve.engine.stepping.step_queue import NEARLY_DONE_S
from pdserve.engine.stepping.work import ForwardWork
from pdserve.engine.warm_up import teach_pace
from pdserve.models.config import read_spec
from pdserve.plan.profile.profile import DEFAULT, read_profile
from pdserve.plan.profile.step_times import StepTimes
from pdserve.plan.simulation.paper_engine import paper_engine
from pdserve.plan.simulation.paper_executor import PaperExecutor, PaperStep
from pdserve.plan.simulation.virtual_time import CLOCK
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.events import Delta
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

PROMPT_S = 0.047  # of 2,048 tokens
TOKENS = count(1)
LAUNCH_S = read_profile(DEFAULT).launch_s


@pytest.fixture
def engine() -> Iterator[Engine]:
    profile = read_profile(DEFAULT)
    spec = read_spec(str(SHAPES / "llama-3.1-8b"), "dummy")
    slo = SloConfig(ttft_ms=200, tpot_ms=7)
    made = paper_engine(spec, EngineConfig(), StepTimes(profile), 100_000, profile.dtype, slo)
    assert made.pace is not None
    made.pace.clock = made.steps.clock = lambda: CLOCK.now
    teach_pace(made)
    yield made
    made.close()


def ask(engine: Engine, name: str, num_prompt: int = 2048, num_tokens: int = 1) -> None:
    """The prompt is in no cache."""
    starts = (Start(0),)
    submit = Submit(
        key=RequestKey("test", 0, name),
        phase="full",
        prompt_token_ids=(next(TOKENS),) * num_prompt,
        sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        starts=starts,
    )
    engine.add(engine.make_request(submit), starts)


def is_empty(result: StepResult) -> bool:
    return not result.num_rows and not result.events


def test_a_prompt_that_comes_meanwhile_follows_without_a_gap(engine: Engine) -> None:
    assert isinstance(engine.executor, PaperExecutor)
    began = CLOCK.now
    ask(engine, "first")
    result = engine.step(is_patient=False)
    assert is_empty(result) and 0.01 < result.spare_s < PROMPT_S - LAUNCH_S
    assert CLOCK.now == pytest.approx(began + LAUNCH_S), "it did not wait"
    CLOCK.now += 0.01
    ask(engine, "second")
    assert engine.step(is_patient=False).num_rows == 2048
    assert CLOCK.now == pytest.approx(began + PROMPT_S, rel=0.05)
    assert engine.executor.free_at == pytest.approx(began + 2 * PROMPT_S, rel=0.05)


def test_a_step_that_is_nearly_done_is_waited_for(engine: Engine) -> None:
    ask(engine, "only")
    spare_s = engine.step(is_patient=False).spare_s
    CLOCK.now += spare_s + NEARLY_DONE_S / 2
    assert engine.step(is_patient=False).num_rows == 2048


def test_a_patient_call_waits(engine: Engine) -> None:
    ask(engine, "only")
    assert engine.step().num_rows == 2048


def noted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> deque[StepHandle]:
    """The steps that are sent from now on."""
    sent: deque[StepHandle] = deque()
    forward = engine.executor.forward

    def forwarded(work: ForwardWork) -> StepHandle:
        sent.append(forward(work))
        return sent[-1]

    monkeypatch.setattr(engine.executor, "forward", forwarded)
    return sent


def know_launches(engine: Engine, sent: deque[StepHandle]) -> None:
    """Compute prompts without graphs. sent: has the steps in flight, whose oldest is removed."""
    for number in range(3):
        ask(engine, f"before {number}")
        while engine.has_work:
            sent.popleft() if engine.step().num_rows else None


def test_tokens_do_not_wait_until_the_next_step_is_launched(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short answer ends beside a long prompt. The next step has no graph, so the host launches
    its kernels for longer than the answer's last step takes."""
    assert LAUNCH_S > 0.012
    sent = noted(engine, monkeypatch)
    know_launches(engine, sent)
    assert engine.steps.launch_s == pytest.approx(LAUNCH_S, rel=0.2)
    ask(engine, "answer", num_tokens=4)
    ask(engine, "long prompt", 12_000)
    late = {}
    while engine.has_work:
        result = engine.step()
        if not result.num_rows:
            continue
        step = sent.popleft()
        assert isinstance(step, PaperStep)
        for key, event in result.events:
            if isinstance(event, Delta):
                late[key.request_id, event.position] = CLOCK.now - step.ends
    assert len(late) == 5 and max(late.values()) < 0.001, late


def test_a_held_step_is_sent_when_its_tokens_are_out(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = noted(engine, monkeypatch)
    know_launches(engine, sent)
    ask(engine, "answer", num_tokens=4)
    ask(engine, "long prompt", 12_000)
    num_held = 0
    while engine.has_work:
        result = engine.step()
        num_sent = len(sent)
        engine.send_held()
        if len(sent) > num_sent:
            num_held += 1
            assert result.events, "nothing would have waited"
            engine.send_held()
            assert len(sent) == num_sent + 1 and len(engine.steps.in_flight) == 1
    assert num_held > 0


def test_steps_with_graphs_are_neither_held_nor_taken_for_launches(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_launches(engine, noted(engine, monkeypatch))
    before = engine.steps.launch_s
    for number in range(20):
        ask(engine, f"answer {number}", 300, num_tokens=4)
    while engine.has_work:
        engine.step()
        assert not engine.steps.is_held
    assert engine.steps.launch_s == before == pytest.approx(LAUNCH_S)


def test_one_slow_launch_tells_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel was compiled during it, say."""
    sent = noted(engine, monkeypatch)
    know_launches(engine, sent)
    before = engine.steps.launch_s
    with monkeypatch.context() as patch:
        patch.setattr(StepTimes, "launch_s", lambda times, load: 3.0)
        ask(engine, "slow")
        while engine.has_work:
            engine.step()
    assert engine.steps.launch_s == before
