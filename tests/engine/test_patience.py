"""A prompt that comes while another is computed is queued behind it at once. The engine runs on
paper, in virtual time, with the step times of an H200."""

from collections.abc import Iterator

import pytest

from benchmarks.support.places import SHAPES
from pdserve.configs.engine import EngineConfig
from pdserve.configs.router import SloConfig
from pdserve.engine.engine import NEARLY_DONE_S, Engine
from pdserve.engine.step_result import StepResult
from pdserve.engine.warm_up import teach_pace
from pdserve.models.config import read_spec
from pdserve.plan.profile.profile import DEFAULT, read_profile
from pdserve.plan.profile.step_times import StepTimes
from pdserve.plan.simulation.paper_engine import paper_engine
from pdserve.plan.simulation.paper_executor import PaperExecutor
from pdserve.plan.simulation.virtual_time import CLOCK
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

PROMPT_S = 0.047  # of 2,048 tokens


@pytest.fixture
def engine() -> Iterator[Engine]:
    profile = read_profile(DEFAULT)
    spec = read_spec(str(SHAPES / "llama-3.1-8b"), "dummy")
    slo = SloConfig(ttft_ms=200, tpot_ms=7)
    made = paper_engine(spec, EngineConfig(), StepTimes(profile), 100_000, profile.dtype, slo)
    assert made.pace is not None
    made.pace.clock = lambda: CLOCK.now
    teach_pace(made)
    yield made
    made.close()


def ask(engine: Engine, name: str) -> None:
    starts = (Start(0),)
    submit = Submit(
        key=RequestKey("test", 0, name),
        phase="full",
        prompt_token_ids=(0,) * 2048,
        sampling=SamplingParams(max_tokens=1),
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
    assert is_empty(result) and 0.03 < result.spare_s < PROMPT_S
    assert CLOCK.now == began, "it did not wait"
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
