"""The engine's work besides generating: checks of a Submit, aborts in any state, held and reserved
blocks, totals."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.harness import (
    Driver,
    alone,
    local,
    make_engine,
    paper_engine,
    paper_of,
    plan_step,
    prefix_digests,
    submit_of,
)

from pdserve.engine.stepping import collector
from pdserve.protocol import block_digests
from pdserve.protocol.block_digests import NOBODY, ContentPart
from pdserve.protocol.commands import Start
from pdserve.protocol.events import Delta, Embedded
from pdserve.protocol.handoff import Ticket
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

SAMPLED = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=10)
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=10)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(256) for _ in range(length)]


def ticket() -> Ticket:
    key = RequestKey("test", 0, "other")
    return Ticket(
        engine_id="p",
        incarnation=1,
        key=key,
        content=b"",
        block_size=16,
        block_ids=(1,),
        generations=(1,),
        num_tokens=1,
        lease_s=1.0,
        written_at=1.0,
    )


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"prompt": []}, "prompt must hold at least one token"),
        ({"prompt": [5, 256]}, r"prompt holds a token id outside 0\.\.255"),
        ({"prompt": [-1]}, "prompt holds a token id outside"),
        ({"prompt": [5] * 160}, "prompt has 160 tokens, but a request may have 160 in all"),
        ({"starts": ()}, "starts must name at least one choice"),
        ({"starts": (Start(1), Start(1))}, "each once"),
        ({"starts": tuple(map(Start, range(9)))}, "n is 9, but a step runs at most 8 sequences"),
        ({"starts": (Start(0, (5,)),), "phase": "prefill"}, "takes no forced tokens"),
        (
            {"starts": (Start(0),), "phase": "decode", "ticket": ticket()},
            "starts with a ticket need forced tokens",
        ),
        ({"starts": (Start(0, (5, 256)),)}, r"starts hold a forced token id outside 0\.\.255"),
        ({"starts": (Start(0, (-1,)),)}, "starts hold a forced token id"),
        (
            {"starts": (Start(0), Start(1, (5,) * 10))},
            "choice 1 has 10 forced tokens of at most 10: nothing is left",
        ),
        ({"prompt": [5] * 155, "starts": (Start(0, (5,) * 5),)}, "nothing is left"),
        (
            {"sampling": SamplingParams(min_tokens=158, max_tokens=None)},
            "min_tokens is 158, but only 157 fit",
        ),
        ({"sampling": SamplingParams(stop_token_ids=[256])}, "stop_token_ids holds token id 256"),
        ({"sampling": SamplingParams(logit_bias={256: 1.0})}, "logit_bias holds token id 256"),
    ],
)
def test_what_can_never_run_is_refused(tiny_llama: Path, more: dict[str, Any], named: str) -> None:
    engine = paper_engine(tiny_llama, num_kv_blocks=11, max_num_seqs=8)
    values = {"prompt": [1, 2, 3], "sampling": SAMPLED, **more}
    with pytest.raises(ValueError, match=named):
        engine.make_request(submit_of(**values))


def busy(tiny_llama: Path, **config: Any) -> Driver:
    """An engine in which something runs already."""
    driver = Driver(paper_engine(tiny_llama, **config))
    driver.add(prompt_of(20), GREEDY)
    driver.step()
    return driver


STATES = {
    "waiting": {"steps": 0},
    "half its prompt": {"steps": 1},
    "just forked": {"steps": 4},
    "generating": {"steps": 7},
    "preempted": {"steps": 8, "num_kv_blocks": 7},
    "finished": {"steps": 60},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "choices", [None, (0,), (1,), (0, 2), (1, 2), (0, 1, 2), (), (7,)], ids=str
)
@pytest.mark.parametrize("state", STATES)
def test_abort(
    tiny_llama: Path, state: str, choices: tuple[int, ...] | None, is_async: bool
) -> None:
    """Whatever the state: the choices named say no more, the others all they would have said, and
    nothing is leaked."""
    config = dict(STATES[state])
    steps = config.pop("steps")
    driver = busy(tiny_llama, max_num_batched_tokens=17, async_scheduling=is_async, **config)
    engine = driver.engine
    prompt = prompt_of(50, 1)
    key = driver.add(prompt, SAMPLED)
    for _ in range(steps):
        driver.step()
    before = {choice: len(driver.tokens[key, choice]) for choice in range(3)}
    gone = engine.abort(key, choices)
    assert gone == (not engine.knows(key))
    assert engine.abort(key, choices) == gone
    engine.check_integrity()
    driver.run()
    for choice in range(3):
        want = alone(engine, prompt, SAMPLED, choice)
        if choices is None or choice in choices:
            assert driver.tokens[key, choice] == want[: before[choice]]
        else:
            assert driver.tokens[key, choice] == want
    driver.assert_empty()


def test_abort_of_an_unknown_request(tiny_llama: Path) -> None:
    assert make_engine(tiny_llama).abort(RequestKey("nobody", 0, "x"))


def test_the_same_key_twice_is_an_assertion(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama)
    submit = submit_of([1, 2], GREEDY)
    engine.add(engine.make_request(submit), submit.starts)
    with pytest.raises(AssertionError, match="submitted twice"):
        engine.add(engine.make_request(submit), submit.starts)


@pytest.mark.parametrize("length", [1, 16, 37])
def test_a_prefilled_prompt_is_held_until_released(tiny_llama: Path, length: int) -> None:
    engine = paper_engine(tiny_llama, max_num_batched_tokens=16)
    driver = Driver(engine)
    prompt = prompt_of(length)
    key = driver.add(prompt, SAMPLED, phase="prefill")
    driver.run()
    [held] = driver.held
    assert (held.key, held.num_tokens, len(held.block_ids)) == (key, length, -(-length // 16))
    assert held.content == engine.hasher.content(prompt, NOBODY)
    assert engine.blocks.num_owned == len(held.block_ids) and not engine.knows(key)
    assert [driver.tokens[key, choice] for choice in range(3)] == [
        alone(engine, prompt, SAMPLED, choice)[:1] for choice in range(3)
    ]
    engine.check_integrity()
    engine.release_held(key)
    engine.release_held(key)
    driver.assert_empty()


def test_a_prompt_whose_choices_all_end_is_not_held(tiny_llama: Path) -> None:
    driver = Driver(paper_engine(tiny_llama))
    driver.add([1, 2, 3], SamplingParams(n=2, seed=0, max_tokens=1), phase="prefill")
    driver.run()
    assert driver.held == []
    driver.assert_empty()


def test_reservations(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, num_kv_blocks=8)
    driver = Driver(engine)
    driver.add(prompt_of(33), GREEDY)
    driver.run()  # its two full blocks stay cached
    starts = (Start(0, (9,)),)
    submit = submit_of([*prompt_of(33), 5, 6], GREEDY, starts=starts, phase="decode")
    first = engine.reserve(engine.make_request(submit), starts)
    assert first is not None and first.num_cached == 2 and len(first.destination) == 1
    assert engine.reserve(engine.make_request(submit_of(prompt_of(80, 2), GREEDY)), starts) is None
    engine.check_integrity([(0, first.block_table)])
    assert engine.cancel_reservation(first, settled=False) == first.destination
    assert engine.blocks.num_quarantined == 1
    second = engine.reserve(engine.make_request(submit), starts)
    assert second is not None and not set(second.destination) & set(first.destination)
    assert engine.cancel_reservation(second, settled=True) == []
    engine.blocks.settle(first.destination)
    driver.assert_empty()


def test_waiting_for_blocks_hashes_a_prompt_once(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reservation that is tried on every turn must not cost the whole prompt each time."""
    engine = paper_engine(tiny_llama, num_kv_blocks=20)
    request = engine.make_request(submit_of(prompt_of(200), GREEDY))
    taken = engine.blocks.allocate(15)
    assert engine.reserve(request, (Start(0, (1,)),)) is None
    monkeypatch.setattr(block_digests, "blake2b", None)
    assert engine.reserve(request, (Start(0, (1,)),)) is None
    engine.blocks.release(taken)
    assert engine.reserve(request, (Start(0, (1,)),)) is not None


@pytest.mark.parametrize("num_forced", [1, 15, 16, 17, 40])
def test_forced_tokens_across_block_borders(tiny_llama: Path, num_forced: int) -> None:
    """Several choices with different accepted tokens, computed in chunks that end anywhere."""
    engine = paper_engine(tiny_llama, max_num_batched_tokens=23)
    driver = Driver(engine)
    sampling = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=num_forced + 20)
    prompt = prompt_of(25)
    starts = (
        Start(0, tuple(prompt_of(num_forced, 1))),
        Start(1, tuple(prompt_of(num_forced // 2, 2))),
    )
    key = driver.add(prompt, sampling, starts=starts)
    driver.run()
    for start in starts:
        assert driver.tokens[key, start.choice] == alone(
            engine, prompt, sampling, start.choice, start.forced
        )
    driver.assert_empty()


def test_long_prompt_logprobs_come_in_several_events(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "SCORES_PER_EVENT", 48)
    driver = Driver(make_engine(tiny_llama))
    key = driver.add(
        prompt_of(40), SamplingParams(temperature=0, seed=0, max_tokens=2, prompt_logprobs=2)
    )
    driver.run()
    events = driver.scored[key]
    assert [(e.start, len(e.logprobs or ()), e.final) for e in events] == [
        (0, 16, False),
        (16, 16, False),
        (32, 8, True),
    ]


def test_the_prompt_is_reported_once_and_before_its_first_token(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, num_kv_blocks=6)
    driver = Driver(engine)
    kinds: dict[RequestKey, list[str]] = {}
    for i in range(3):
        driver.add(prompt_of(20, i), SamplingParams(n=2, seed=i, max_tokens=40))
    while engine.has_work:
        for key, event in driver.step().events:
            kinds.setdefault(key, []).append(type(event).__name__)
    assert engine.scheduler.num_preemptions > 0
    assert all(
        names[0] == "PromptScored" and names.count("PromptScored") == 1 for names in kinds.values()
    )


def test_tokens_of_a_slots_last_sequence_are_not_counted(tiny_llama: Path) -> None:
    """A resumed request begins at the position which the one before it in its slot has reached."""
    engine = paper_engine(tiny_llama)
    driver = Driver(engine)
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=3, repetition_penalty=8.0)
    driver.add(list(range(256)), sampling)
    driver.run()
    resumed = SamplingParams(temperature=0, seed=0, max_tokens=20, repetition_penalty=8.0)
    forced = (5, 6, 7)
    key = driver.add([1, 2, 3], resumed, starts=(Start(0, forced),))
    driver.run()
    assert driver.tokens[key, 0] == alone(engine, [1, 2, 3], resumed, forced=forced)


def test_totals(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama)
    driver = Driver(engine)
    driver.add(prompt_of(40), GREEDY)
    driver.run()
    driver.add(prompt_of(40), SAMPLED)  # 32 tokens are cached
    driver.run()
    assert engine.stats.prompt_tokens == 40 + 8
    assert engine.stats.generation_tokens == 10 + 30
    assert engine.stats.num_steps == 20


def test_an_idle_step_does_nothing(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    result = engine.step()
    assert (result.events, result.held, result.num_rows) == ([], [], 0)
    assert engine.stats.num_steps == 0


def test_blocks_are_copied_with_contiguous_ids(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel reads the ids by pointer: columns of one `[pairs, 2]` tensor gave it every other
    block."""
    engine = make_engine(tiny_llama)
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    copy = local(engine).runner.ops.kv.copy_blocks

    def spy(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
        calls.append((src, dst))
        copy(pool, src, dst)

    monkeypatch.setattr(local(engine).runner.ops.kv, "copy_blocks", spy)
    driver = Driver(engine)
    for i in range(2):
        driver.add(prompt_of(20, i), SAMPLED)
    driver.run()
    assert any(len(src) > 1 for src, _ in calls)
    assert all(ids.is_contiguous() and ids.dtype == torch.int64 for pair in calls for ids in pair)


def test_a_row_to_sample_copies_no_tokens(tiny_llama: Path) -> None:
    """Else every step would cost more the longer its sequences are."""
    driver = Driver(make_engine(tiny_llama))
    driver.add([1, 2, 3], GREEDY)
    step = plan_step(driver.engine)
    [seq], [row] = step.members, step.rows
    assert row.token_ids is seq.token_ids and step.positions == [0]


def test_positions_and_reasons_of_deltas(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama)
    driver = Driver(engine)
    key = driver.add(
        [1, 2], SamplingParams(temperature=0, seed=0, max_tokens=3), starts=(Start(0, (7,)),)
    )
    deltas = []
    while engine.has_work:
        deltas += [event for _, event in driver.step().events if isinstance(event, Delta)]
    assert [(d.position, len(d.token_ids), d.finish_reason) for d in deltas] == [
        (1, 1, None),
        (2, 1, "length"),
    ]
    assert all(
        (d.request_id, d.attempt, d.choice) == (key.request_id, key.attempt, 0) for d in deltas
    )


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("where", ["forward", "sample", "padding"])
def test_after_an_error_in_a_step_nothing_is_served_until_reset(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, where: str, is_async: bool
) -> None:
    engine = paper_engine(tiny_llama, async_scheduling=is_async, max_num_batched_tokens=64)
    driver = Driver(engine)
    keys = [driver.add(prompt_of(40, i), SAMPLED) for i in range(3)]
    for _ in range(3):
        driver.step()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            driver.step()
    for call in (driver.step, lambda: driver.add([1, 2], GREEDY)):
        with pytest.raises(RuntimeError, match="a step of this engine failed"):
            call()
    engine.reset()
    assert not any(engine.knows(key) for key in keys) and engine.blocks.cached_digests() == []
    driver.assert_empty()
    again = driver.add(prompt_of(20, 7), GREEDY)
    driver.run()
    assert driver.tokens[again, 0] == alone(engine, prompt_of(20, 7), GREEDY)
    driver.assert_empty()


def test_rows_under_way_never_join_an_engine_whose_step_failed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were cached for them may never have been written, and their blocks cannot be given
    to others."""
    engine = paper_engine(tiny_llama)
    driver = Driver(engine)
    starts = (Start(0, (9,)),)
    submit = submit_of(prompt_of(40), GREEDY, starts=starts, phase="decode")
    reservation = engine.reserve(engine.make_request(submit), starts)
    assert reservation is not None
    driver.add(prompt_of(40, 1), GREEDY)
    with monkeypatch.context() as patch:
        patch.delattr(type(engine.executor), "forward")
        with pytest.raises(AttributeError):
            driver.step()
    for call in (
        lambda: engine.join(reservation),
        lambda: engine.reserve(engine.make_request(submit), starts),
    ):
        with pytest.raises(RuntimeError, match="a step of this engine failed"):
            call()
    with pytest.raises(AssertionError, match="1 reservations are out"):
        engine.reset()
    engine.cancel_reservation(reservation, settled=False)
    with pytest.raises(AssertionError, match="3 blocks wait for transfers"):
        engine.reset()
    engine.blocks.settle(reservation.destination)
    engine.reset()
    driver.assert_empty()


def test_a_closed_engine_serves_nothing(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, async_scheduling=True)
    driver = Driver(engine)
    driver.add(prompt_of(40), SAMPLED)
    driver.step()
    engine.close()
    assert all(step.ready() for step in paper_of(engine).steps)
    with pytest.raises(RuntimeError, match="or it is closed"):
        driver.step()


def test_a_prompt_is_embedded(tiny_llama: Path) -> None:
    """Beside requests that generate, in chunks, cached or not: the hidden row of the last token,
    and nothing stays."""
    engine = paper_engine(tiny_llama, max_num_batched_tokens=24)
    driver = Driver(engine)
    other = driver.add(prompt_of(30, 3), GREEDY)
    prompts = [prompt_of(length) for length in (1, 20, 70, 70)]
    keys = [driver.add(prompt, GREEDY, kind="embed") for prompt in prompts]
    embedded = {}
    while engine.has_work:
        for key, event in driver.step().events:
            if isinstance(event, Embedded):
                embedded[key] = event
    for key, prompt in zip(keys, prompts, strict=True):
        want = np.float32(prefix_digests(prompt)[-1])
        assert np.frombuffer(embedded[key].values, dtype="<f4").tolist() == [want]
        assert not engine.knows(key) and not driver.tokens[key, 0]
    assert embedded[keys[3]].cached_tokens == 64 or embedded[keys[2]].cached_tokens == 0
    assert driver.tokens[other, 0] == alone(engine, prompt_of(30, 3), GREEDY)
    driver.assert_empty()


def test_an_embedding_is_what_the_model_computes(tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    engine = make_engine(tiny_llama, max_num_batched_tokens=32)
    driver = Driver(engine)
    prompt = prompt_of(50)
    driver.add(prompt, GREEDY, kind="embed")
    events = [event for _ in range(3) for _, event in driver.step().events]
    [event] = [event for event in events if isinstance(event, Embedded)]
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.inference_mode():
        want = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    got = torch.from_numpy(np.frombuffer(event.values, dtype="<f4").copy())
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    driver.assert_empty()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kind": "embed", "phase": "prefill"}, 'kind "embed" takes phase "full"'),
        ({"kind": "embed", "starts": (Start(0), Start(1))}, "and one start"),
        ({"kind": "embed", "starts": (Start(0, (3,)),)}, "without forced tokens"),
        ({"adapter": "blue"}, "adapter 'blue' is not served here"),
        ({"parts": (ContentPart(0, 2, b"x" * 16),)}, "parts: the model takes only token ids"),
    ],
)
def test_kinds_that_cannot_be_served_are_named(
    tiny_llama: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(tiny_llama).make_request(submit_of([1, 2, 3], GREEDY, **more))
