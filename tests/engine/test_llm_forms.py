"""Forms after reasoning over the real engine: a model of random weights that reasons until its
budget ends it, by `LLM.chat` and split over P and D."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router.turn_models import HERMES, MESSAGES, WEATHER
from support.grammars import SCHEMA, assert_follows_schema, demo_builder
from support.pair import Pair
from support.tiny_models import make_tiny
from text.backends import byte_level_backend, write_folder

from pdserve.engine.grammars import forms
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.engine.llm_run import CompletionOutput
from pdserve.text.grammars.checker import shared_checker

pytestmark = pytest.mark.processes

EOS = 2
OPEN: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
CLOSED: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
FORM = {"json": SCHEMA, "whitespace_pattern": " ?"}
TAGS = {
    "structural_tag": {
        "format": {
            "type": "tag",
            "begin": "<a>",
            "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
            "end": "</a>",
        }
    }
}


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Whether the delimiters of reasoning are tokens of the vocabulary, as Qwen3's are."""
    backend = byte_level_backend(*(["<think>", "</think>"] if request.param else []))
    path = tmp_path_factory.mktemp("forms")
    make_tiny("llama3", path, vocab_size=backend.get_vocab_size(), eos_token_id=EOS)
    return write_folder(path, backend, eos_token="<|im_end|>", chat_template=HERMES)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = LLM(str(folder), device="cpu", num_kv_blocks=256)
    yield made
    assert not made.engine.has_work
    shared_checker().close()


PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=300, n=4)


def chatted(llm: LLM, params: SamplingParams = PARAMS, **options: Any) -> list[CompletionOutput]:
    [output] = llm.chat(MESSAGES, params, use_tqdm=False, **options)
    return output.outputs


@pytest.mark.parametrize("budget", [0, 1, 9, 24])
def test_reasoning_is_free_and_content_has_the_form(llm: LLM, budget: int) -> None:
    """A budget of any size may end inside a character, which the grammar completes first."""
    choices = chatted(llm, structured_outputs=FORM, thinking_token_budget=budget, **OPEN)
    for choice in choices:
        assert choice.finish_reason == "stop", choice
        assert_follows_schema(choice.text)
        assert "\ufffd" not in choice.reasoning
    reasoned = {choice.reasoning for choice in choices}
    assert reasoned == {""} if budget == 0 else len(reasoned) > 1


def test_a_model_that_may_reason_need_not(llm: LLM) -> None:
    for more in ({}, CLOSED):
        for choice in chatted(llm, structured_outputs=FORM, thinking_token_budget=5, **more):
            assert choice.finish_reason == "stop", choice
            assert_follows_schema(choice.text)
            assert not (more and choice.reasoning)


def test_a_structural_tag_and_a_choice(llm: LLM) -> None:
    limited: dict[str, Any] = {"thinking_token_budget": 6, **OPEN}
    for form, texts in (
        (TAGS, ("<a>1</a>", "<a>2</a>")),
        ({"choice": ["yes", "no"]}, ("yes", "no")),
    ):
        for choice in chatted(llm, structured_outputs=form, **limited):
            assert choice.text in texts and choice.reasoning


def test_conversations_of_one_call_reason_each_as_its_prompt_says(llm: LLM) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "So: "}]
    thinking = [*MESSAGES, {"role": "assistant", "content": "<think>I"}]
    outputs = llm.chat(
        [begun, thinking],
        PARAMS,
        use_tqdm=False,
        continue_final_message=True,
        structured_outputs=FORM,
        thinking_token_budget=8,
    )
    for output, reasons in zip(outputs, (False, True), strict=True):
        for choice in output.outputs:
            assert_follows_schema(choice.text)
            assert bool(choice.reasoning) is reasons


def test_what_excludes_a_form_is_refused(llm: LLM) -> None:
    own = SamplingParams(logit_rules={"grammar": 'start: "a"'})
    for params, more, says in (
        (own, {}, "logit_rules: its grammar and structured_outputs.json exclude"),
        (PARAMS, {"tools": [WEATHER], "tool_choice": "required"}, "tool_choice 'required'"),
    ):
        with pytest.raises(ValueError, match=says):
            chatted(llm, params, structured_outputs=FORM, **more)
    with pytest.raises(ValueError, match="nothing can match it"):
        chatted(llm, structured_outputs={"regex": r"[^\s\S]"}, **OPEN)


def test_keywords_of_tools_that_are_not_enforced_are_logged(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {}}}, "minProperties": 2}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    few = SamplingParams(max_tokens=2)
    forms._warn.cache_clear()
    for more in ({"tool_choice": "required"}, {}, {"structured_outputs": FORM}):
        chatted(llm, few, tools=[tool], **more)
    messages = [r.getMessage() for r in caplog.records if r.name == forms.__name__]
    said = ": the schema uses keywords that are not enforced: minProperties, not"
    assert messages == [f"tools{said}", f"structured_outputs.json{said}"]
    with pytest.raises(ValueError, match="tools cannot be used as a grammar"):
        wrong = {"name": "f", "parameters": {"properties": {"a": {"type": "thing"}}}}
        chatted(llm, few, tools=[{"type": "function", "function": wrong}])


def test_split_answers_are_those_of_one_engine(llm: LLM, folder: Path) -> None:
    builders = [demo_builder(folder), demo_builder(folder)]
    pair = Pair(folder, p={"grammars": builders[0]}, d={"grammars": builders[1]})
    asked: list[SamplingParams] = []
    make_run = llm._make_run
    llm._make_run = lambda prompt, params, *more: (  # type: ignore[method-assign]
        asked.append(params) or make_run(prompt, params, *more)  # type: ignore[func-returns-value]
    )
    try:
        for budget in (3, 17):
            [output] = llm.chat(
                MESSAGES,
                PARAMS,
                use_tqdm=False,
                structured_outputs=FORM,
                thinking_token_budget=budget,
                **OPEN,
            )
            alone = {choice.index: choice.token_ids for choice in output.outputs}
            assert asked[-1].logit_rules is not None and len(asked[-1].logit_rules) == 2
            assert pair.split(output.prompt_token_ids, asked[-1]) == alone
        pair.assert_empty()
    finally:
        llm._make_run = make_run  # type: ignore[method-assign]
        pair.close()
        for builder in builders:
            builder.close()
