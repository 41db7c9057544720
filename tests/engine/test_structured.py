"""Grammars and other masks through the whole engine: asynchronous or not, drawn, preempted, resumed
after any number of tokens, every answer follows its grammar and is the same."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.harness import Driver, submit_of
from support.grammars import (
    assert_follows_schema,
    demo_builder,
    demo_tokenizer,
    json_grammar,
)
from support.tiny_models import DEMO
from torch import Tensor

from pdserve.engine.execution.local_executor import LocalExecutor
from pdserve.engine.grammars.grammar import Grammar
from pdserve.engine.llm import LLM, RequestOutput
from pdserve.protocol.commands import Start
from pdserve.protocol.events import Failed
from pdserve.protocol.sampling_params import SamplingParams

PROMPTS = ["Tom lives in", "What is 3 + 4?", "Mira", "Who is it? A person:"]


def make_llm(is_async: bool = True, **config: Any) -> LLM:
    values = {"device": "cpu", "num_kv_blocks": 256, **config}
    return LLM(str(DEMO), async_scheduling=is_async, **values)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = make_llm()
    yield llm
    assert llm._grammars is not None
    llm._grammars._threads.shutdown()


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    builder = demo_builder()
    built = builder.build(json_grammar())
    builder.close()
    return built


def asking(text: str | None = None, **more: Any) -> SamplingParams:
    rules = {"grammar": text or json_grammar()} | more.pop("rules", {})
    return SamplingParams(**{"max_tokens": 80, "seed": 3, **more}, logit_rules=rules)


def mixed() -> list[SamplingParams]:
    """Constrained and free, greedy and drawn, one choice and three."""
    return [
        asking(temperature=0),
        SamplingParams(temperature=0, max_tokens=40),
        asking(temperature=1.5, n=3),
        asking(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, logprobs=2),
        SamplingParams(temperature=1.0, seed=1, max_tokens=30),
        asking(temperature=1.0, min_tokens=5),
        SamplingParams(temperature=1, seed=2, logit_rules={"bad_words": [[20, 21], [40]]}),
        asking(temperature=1.0, rules={"thinking_budget": {"tokens": 500, "end": [70]}}),
    ]


def answers(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


TIGHT = {
    "block_size": 16,
    "num_kv_blocks": 14,
    "max_num_batched_tokens": 32,
    "max_model_len": 160,
}


@pytest.mark.parametrize("config", [{}, TIGHT], ids=["roomy", "tight"])
def test_asynchronous_answers_are_the_synchronous_ones(config: dict[str, Any]) -> None:
    both = []
    params = mixed()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    for is_async in (False, True):
        llm = make_llm(is_async, **config)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for asked, output in zip(params, outputs, strict=True):
            for choice in output.outputs:
                if "grammar" in (asked.logit_rules or {}):
                    assert choice.finish_reason == "stop"
                    assert_follows_schema(choice.text)
        assert bool(llm.engine.stats.num_late_steps) == is_async
        assert bool(llm.engine.scheduler.num_preemptions) == bool(config)
        llm.engine.check_integrity()
        both.append(outputs)
    assert answers(both[0]) == answers(both[1])
    assert both[0][3].outputs[0].logprobs == both[1][3].outputs[0].logprobs


def test_log_probabilities_are_those_of_the_raw_distribution(llm: LLM) -> None:
    """So the token of a mask may be an unlikely one, and the likeliest one was not allowed."""
    [output] = llm.generate(PROMPTS[0], asking(temperature=0, logprobs=1), use_tqdm=False)
    entries = output.outputs[0].logprobs
    assert entries is not None
    assert any(entry.rank > 1 and entry.top[0][0] != entry.token_id for entry in entries)


def test_min_tokens_gives_way_to_a_grammar_that_is_over(llm: LLM) -> None:
    [output] = llm.generate(
        PROMPTS[0], asking('start: "no"', temperature=0, min_tokens=6, max_tokens=9), use_tqdm=False
    )
    [choice] = output.outputs
    assert choice.text == "no" and choice.finish_reason == "stop"
    assert len(choice.token_ids) == 7, "ends of sequence until min_tokens is reached"


def test_stop_token_ids_end_a_whole_answer(llm: LLM) -> None:
    [stop] = demo_tokenizer().encode("z", add_special_tokens=False)[-1:]
    params = asking(
        'start: "no"', temperature=0, ignore_eos=True, stop_token_ids=[stop], max_tokens=30
    )
    [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert output.outputs[0].stop_reason == stop and output.outputs[0].text.startswith("no")


def test_a_stop_string_ends_a_constrained_choice(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], asking(temperature=0, stop=[","]), use_tqdm=False)
    assert output.outputs[0].text in ('{"name":"Tom"', '{"name":"Mira"')


def test_the_thinking_budget_forces_its_end(llm: LLM) -> None:
    end = [70, 71, 72]
    params = SamplingParams(
        temperature=1,
        seed=1,
        max_tokens=20,
        ignore_eos=True,
        logit_rules={"thinking_budget": {"tokens": 5, "end": end, "start": None}},
    )
    [output] = llm.generate([[9, 10, 11]], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    assert tokens[5:8] == end and len(tokens) == 20


def test_a_request_without_a_token_to_draw_ends_alone(llm: LLM) -> None:
    bad = asking(temperature=0, n=2, rules={"allowed_token_ids": [40]})
    outputs = llm.generate(PROMPTS[:2], [bad, asking(temperature=0)], use_tqdm=False)
    for choice in outputs[0].outputs:
        assert choice.finish_reason == "error"
        assert "allowed_token_ids and grammar leave no token" in str(choice.stop_reason)
    assert_follows_schema(outputs[1].outputs[0].text)
    llm.engine.check_integrity()
    assert llm.engine.is_at_rest


def test_a_bad_grammar_is_refused_before_anything_runs(llm: LLM) -> None:
    before = llm.engine.stats.num_steps
    with pytest.raises(ValueError, match=r"^logit_rules: grammar cannot be built: .*unknown name"):
        llm.generate(PROMPTS[:2], [asking(), asking("start: foo")], use_tqdm=False)
    assert llm.engine.stats.num_steps == before
    without = LLM(str(DEMO), tokenizer=False, device="cpu", num_kv_blocks=32)
    with pytest.raises(ValueError, match="grammar needs a tokenizer: leave it out, or create LLM"):
        without.generate([[1, 2]], asking(), use_tqdm=False)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_resumption_after_any_number_of_tokens(
    llm: LLM, grammar: Grammar, temperature: float
) -> None:
    """As after a failover, and as a decode worker begins."""
    params = asking(temperature=temperature)
    engine = llm.engine
    prompt = demo_tokenizer().encode(PROMPTS[0])

    def run(forced: tuple[int, ...]) -> list[int]:
        driver = Driver(engine)
        submit = submit_of(prompt, params, starts=(Start(0, forced),))
        engine.add(engine.make_request(submit, grammar), submit.starts)
        driver.tokens[submit.key, 0] += forced
        driver.run(check=False)
        return driver.tokens[submit.key, 0]

    whole = run(())
    assert_follows_schema(demo_tokenizer().decode(whole))
    for count in range(1, len(whole)):
        assert run(tuple(whole[:count])) == whole


def test_tokens_that_the_grammar_rejects_fail_their_request(llm: LLM, grammar: Grammar) -> None:
    engine = llm.engine
    submit = submit_of([9, 10], asking(), starts=(Start(0, (40,)),))
    engine.add(engine.make_request(submit, grammar), submit.starts)
    events = []
    while engine.has_work:
        events += engine.step().events
    failed = [event for _, event in events if isinstance(event, Failed)]
    assert [event.kind for event in failed] == ["invalid"]
    assert "grammar does not allow token 40 at position 0" in failed[0].message
    engine.check_integrity()


def test_a_request_comes_with_its_grammar_built(llm: LLM) -> None:
    submit = submit_of([9, 10], asking())
    with pytest.raises(AssertionError, match="before its grammar is built"):
        llm.engine.add(llm.engine.make_request(submit), submit.starts)


@pytest.mark.processes
@pytest.mark.lengthy
@pytest.mark.parametrize("config", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=str)
def test_engines_of_several_ranks_mask_too(llm: LLM, config: dict[str, Any]) -> None:
    """Rank 0 alone samples."""
    params = [asking(temperature=0), asking(temperature=1.0, n=2), asking(temperature=0)]
    ranks = LLM(str(DEMO), device="cpu", num_kv_blocks=256, **config)
    outputs = ranks.generate(PROMPTS[:3], params, use_tqdm=False)
    assert answers(outputs) == answers(llm.generate(PROMPTS[:3], params, use_tqdm=False))
    for output in outputs:
        for choice in output.outputs:
            assert_follows_schema(choice.text)


# --- functions ---


def counting(tokens: list[int], logits: Tensor) -> Tensor:
    """Token 70, 71, 72 ... by how many there are."""
    return torch.full_like(logits, float("-inf")).index_fill_(
        0, torch.tensor([70 + len(tokens)], device=logits.device), 0.0
    )


def test_logits_processors_of_a_request_and_of_all(llm: LLM) -> None:
    own = SamplingParams(temperature=0, max_tokens=5, logit_rules={"logits_processors": [counting]})
    plain = SamplingParams(temperature=0, max_tokens=5)
    outputs = llm.generate([[9, 10], [9, 10]], [own, plain], use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == [70, 71, 72, 73, 74]
    assert outputs[1].outputs[0].token_ids != [70, 71, 72, 73, 74]

    def next_one(tokens: list[int], logits: Tensor) -> Tensor:
        return logits.roll(1)

    both = LLM(
        str(DEMO),
        device="cpu",
        num_kv_blocks=64,
        async_scheduling=True,
        logits_processors=[counting],
    )
    rolled = SamplingParams(
        temperature=0, max_tokens=3, logit_rules={"logits_processors": [next_one]}
    )
    outputs = both.generate([[9, 10], [9, 10]], [rolled, plain], use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == [71, 72, 73]
    assert outputs[1].outputs[0].token_ids == [70, 71, 72, 73, 74]


def test_masks_come_after_functions(llm: LLM) -> None:
    rules = {"logits_processors": [counting], "allowed_token_ids": [71, 72]}
    params = SamplingParams(temperature=0, max_tokens=2, logit_rules=rules)
    [output] = llm.generate([[9, 10]], params, use_tqdm=False)
    assert output.outputs[0].token_ids[1] == 71


def test_a_function_that_returns_no_logits_is_named(llm: LLM) -> None:
    params = SamplingParams(
        logit_rules={"logits_processors": [lambda tokens, logits: logits[:3]]}, max_tokens=2
    )
    with pytest.raises(ValueError, match="must return the logits, a tensor of shape"):
        llm.generate([[9, 10]], params, use_tqdm=False)
    with pytest.raises(ValueError, match="must be a list of callables"):
        LLM(str(DEMO), logits_processors=[3])  # type: ignore[list-item]


@pytest.mark.gpu
def test_on_the_device(tmp_path: Path) -> None:
    params = mixed()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    outputs = [
        make_llm(device=device, dtype="float32").generate(prompts, params, use_tqdm=False)
        for device in ("cpu", "cuda")
    ]
    assert answers(outputs[0]) == answers(outputs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{}, TIGHT], ids=["roomy", "tight"])
def test_behind_a_delayed_stream(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is late by more than a step of the host changes no answer."""
    params = mixed()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    values = {"device": "cuda", "dtype": "float32", **config}
    expected = make_llm(False, **values).generate(prompts, params, use_tqdm=False)
    llm = make_llm(**values)
    calls = {"forward": 0, "sample": 0}
    for name in calls:
        work = getattr(LocalExecutor, name)

        def late(*args: Any, name: str = name, work: Callable[..., Any] = work) -> Any:
            calls[name] += 1
            torch.cuda._sleep(10_000_000)  # about five milliseconds
            return work(*args)

        monkeypatch.setattr(LocalExecutor, name, late)
    found = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.stats.num_late_steps and min(calls.values()) > 20
    assert bool(llm.engine.scheduler.num_preemptions) == bool(config)
    assert answers(found) == answers(expected)
