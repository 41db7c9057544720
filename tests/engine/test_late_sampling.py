"""Late sampling, by a rule of the tests that needs the value of the previous token.

Covers all that may happen in the gap after the previous step was collected."""

import random
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine.harness import Driver, alone, held_at_random, local, paper_engine, paper_of, plan_step
from engine.no_repeat import NoRepeat, use_rule
from torch import Tensor

from pdserve.engine.engine import Engine
from pdserve.engine.llm import LLM
from pdserve.protocol.commands import Start
from pdserve.protocol.sampling_params import SamplingParams

TIGHT: dict[str, Any] = {"num_kv_blocks": 14, "max_num_batched_tokens": 40, "max_num_seqs": 6}


def prompt_of(length: int, seed: int | str = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(256) for _ in range(length)]


def asking(**more: Any) -> SamplingParams:
    """NoRepeat applies to rows of this seed's parity."""
    return SamplingParams(**{"temperature": 0, "seed": NoRepeat.SEED, "max_tokens": 12, **more})


def plain(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "seed": 0, "max_tokens": 12, **more})


def repeats(tokens: list[int]) -> bool:
    return any(a == b for a, b in pairwise(tokens))


def engine_of(folder: Path, is_async: bool = True, **config: Any) -> Engine:
    return use_rule(paper_engine(folder, async_scheduling=is_async, **config))


def test_only_steps_with_a_row_that_needs_values_are_late(tiny_llama: Path) -> None:
    engine = engine_of(tiny_llama)
    driver = Driver(engine)
    driver.add(prompt_of(20), plain())
    driver.run()
    assert paper_of(engine).num_late == 0
    driver.add(prompt_of(20, 1), asking())
    driver.run()
    # not the prompt's: all that it needs is known
    assert paper_of(engine).num_late == 12 - 1


def test_one_step_at_a_time_is_never_late(tiny_llama: Path) -> None:
    engine = engine_of(tiny_llama, is_async=False)
    driver = Driver(engine)
    key = driver.add(prompt_of(20, 1), asking())
    driver.run()
    assert paper_of(engine).num_late == 0
    assert not repeats([prompt_of(20, 1)[-1], *driver.tokens[key, 0]])


@pytest.mark.parametrize("mode", ["sync", "async", "held"])
@pytest.mark.parametrize("config", [{}, TIGHT], ids=["roomy", "tight"])
def test_tokens_are_those_of_each_choice_alone(
    tiny_llama: Path, mode: str, config: dict[str, Any]
) -> None:
    """Stops, forks, preemptions, resumed requests and aborts, with and without the rule."""
    for seed in range(12):
        rng = random.Random(seed)
        engine = engine_of(tiny_llama, mode != "sync", **config)
        if mode == "held":
            held_at_random(engine)
        driver = Driver(engine)
        expected: dict[Any, list[int]] = {}
        aborted = set()
        for number in range(7):
            params = rng.choice([asking, asking, plain])(
                temperature=rng.choice([0, 1.0]),
                max_tokens=rng.randint(1, 14),
                n=rng.choice([1, 1, 3]),
                stop_token_ids=rng.sample(range(256), 60),
                repetition_penalty=rng.choice([1.0, 1.4]),
                logit_bias=rng.choice([None, {5: 4.0}]),
                min_tokens=rng.choice([0, 1]),
                logprobs=rng.choice([None, 1]),
            )
            prompt = prompt_of(rng.randint(1, 45), number % 4)
            starts = tuple(Start(choice) for choice in range(params.n))
            if rng.random() < 0.3 and params.max_tokens and params.max_tokens > 3:
                forced = tuple(alone(engine, prompt, params, use=NoRepeat())[:2])
                starts = (Start(0, forced),)
            key = driver.add(prompt, params, starts=starts)
            for start in starts:
                expected[key, start.choice] = alone(
                    engine, prompt, params, start.choice, start.forced, use=NoRepeat()
                )
            for _ in range(rng.randint(0, 3)):
                driver.step()
            if rng.random() < 0.2:
                engine.abort(key)
                aborted.add(key)
        driver.run()
        driver.assert_empty()
        for (key, choice), tokens in expected.items():
            got = driver.tokens[key, choice]
            assert got == (tokens[: len(got)] if key in aborted else tokens)
        assert (mode != "sync") == bool(paper_of(engine).num_late)


def test_the_rule_matters(tiny_llama: Path) -> None:
    """Else the test above would show nothing."""
    engine = engine_of(tiny_llama)
    differ = [
        alone(engine, prompt_of(9, seed), asking(max_tokens=40))
        != alone(engine, prompt_of(9, seed), asking(max_tokens=40), use=NoRepeat())
        for seed in range(40)
    ]
    assert any(differ)


def test_a_slot_that_is_freed_in_the_gap_passes_no_state_on(tiny_llama: Path) -> None:
    """A row that ended in the step before is still a row of the late step; its slot's next owner
    shall not have its counts."""
    engine = engine_of(tiny_llama, max_num_seqs=1)
    driver = Driver(engine)
    expected = {}
    for seed in range(20):
        params = asking(
            repetition_penalty=1.8, stop_token_ids=list(range(seed % 3, 256, 3)), max_tokens=30
        )
        key = driver.add(prompt_of(12, seed), params)
        expected[key] = alone(engine, prompt_of(12, seed), params, use=NoRepeat())
    driver.run()
    assert {key: driver.tokens[key, 0] for key in expected} == expected
    assert paper_of(engine).num_late


def test_a_rule_is_never_asked_about_a_row_that_is_over(tiny_llama: Path) -> None:
    """A grammar that has ended knows no next token."""
    engine = engine_of(tiny_llama)
    rule = NoRepeat()
    use_rule(engine, rule)
    driver = Driver(engine)
    stops = [range(i, 256, 5) for i in range(6)]
    keys = [
        driver.add(prompt_of(9, i), asking(stop_token_ids=list(stop)))
        for i, stop in enumerate(stops)
    ]
    driver.run()
    assert any(driver.reasons[key, 0] == "stop" for key in keys)
    for key, stop in zip(keys, stops, strict=True):
        assert not set(stop) & set(driver.tokens[key, 0][:-1])
    assert rule.asked and all(not ended for ended in rule.asked)


def test_a_late_step_is_not_sampled_before_its_values_are_known(tiny_llama: Path) -> None:
    engine = engine_of(tiny_llama)
    driver = Driver(engine)
    driver.add(prompt_of(9), asking())
    planner = engine._planner
    steps = []
    for _ in range(2):
        step = plan_step(engine)
        step.handle = engine.executor.forward(step.forward)
        steps.append(step)
        if not step.forward.is_late:
            engine.executor.sample(planner.sample_work(step))
    assert steps[1].forward.is_late
    with pytest.raises(AssertionError, match="before the previous step was collected"):
        planner.sample_work(steps[1])


def test_a_step_is_forwarded_only_behind_one_that_is_sampled(tiny_llama: Path) -> None:
    engine = use_rule(make_llm(tiny_llama, True).engine)
    driver = Driver(engine)
    driver.add(prompt_of(9), asking())
    step = plan_step(engine)
    local(engine).forward(step.forward)
    with pytest.raises(AssertionError, match="before the previous one was sampled"):
        local(engine).forward(step.forward)
    work = engine._planner.sample_work(step)
    local(engine).sample(work)
    with pytest.raises(AssertionError, match="another one was forwarded last"):
        local(engine).sample(work)


def make_llm(folder: Path, is_async: bool, **config: Any) -> LLM:
    return LLM(
        str(folder),
        tokenizer=False,
        async_scheduling=is_async,
        **{"num_kv_blocks": 64, "device": "cpu", **config},
    )


@pytest.mark.parametrize("config", [{}, {"num_kv_blocks": 22, "max_num_batched_tokens": 40}])
def test_the_real_model(tiny_llama: Path, config: dict[str, Any]) -> None:
    answers = []
    for is_async in (False, True):
        llm = make_llm(tiny_llama, is_async, **config)
        use_rule(llm.engine)
        params = [
            asking(max_tokens=20, temperature=i % 2, n=1 + i % 2, logprobs=1) for i in range(8)
        ]
        outputs = llm.generate([prompt_of(9 + 7 * i, i) for i in range(8)], params, use_tqdm=False)
        answers.append([choice.token_ids for output in outputs for choice in output.outputs])
    assert answers[0] == answers[1]
    assert not any(repeats(tokens) for tokens in answers[0])


def test_a_failure_in_the_gap_tears_the_engine(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny_llama)
    driver = Driver(engine)
    driver.add(prompt_of(20), asking())
    driver.step()

    def broken(self: NoRepeat, logits: Tensor, staged: Mapping[str, Tensor]) -> None:
        raise RuntimeError("the rule fails")

    with monkeypatch.context() as patch:
        patch.setattr(NoRepeat, "apply", broken)
        with pytest.raises(RuntimeError, match="the rule fails"):
            driver.step()
    with pytest.raises(RuntimeError, match="a step of this engine failed"):
        driver.step()
    engine.reset()
    driver.assert_empty()
    key = driver.add(prompt_of(20), asking())
    driver.run()
    assert driver.tokens[key, 0] == alone(engine, prompt_of(20), asking(), use=NoRepeat())


@pytest.mark.gpu
def test_on_the_device(tiny_llama: Path) -> None:
    """With graphs: the next replay comes only after the late sample."""
    answers = []
    for device in ("cuda", "cpu"):
        llm = make_llm(tiny_llama, True, device=device, dtype="float32")
        use_rule(llm.engine)
        prompts = [prompt_of(9 + 7 * i, i) for i in range(8)]
        outputs = llm.generate(prompts, asking(max_tokens=20), use_tqdm=False)
        answers.append([choice.token_ids for output in outputs for choice in output.outputs])
    assert answers[0] == answers[1]
