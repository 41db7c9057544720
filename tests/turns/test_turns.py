"""Turns without a server: the formats by name, and what a model's turn is refused for."""

from typing import Any, get_args

import pytest
from router.turn_models import CLOCK, HERMES, MESSAGES, MISTRAL, WEATHER, tokenizer_of

from pdserve.configs.engine import ReasoningFormatName, ToolFormat
from pdserve.text.answers.formats import CALL_FORMATS, REASONING_FORMATS
from pdserve.text.chat_template import ChatTemplate
from pdserve.turns.model_turns import ModelTurns
from pdserve.turns.turn import TURN_OPTIONS, make_turn


def test_the_configuration_names_all_formats() -> None:
    assert set(get_args(ToolFormat)) == {"auto", "none", *CALL_FORMATS}
    assert set(get_args(ReasoningFormatName)) == {"auto", "none", *REASONING_FORMATS}


@pytest.mark.parametrize(
    ("template", "tokens", "calls", "reasoning"),
    [
        (HERMES, (), "hermes", "think"),
        (MISTRAL, ("[TOOL_CALLS]", "[ARGS]"), "mistral-args", None),
        (MISTRAL, ("[THINK]", "[/THINK]"), "mistral-args", "mistral-think"),
        ("{{ messages[0].content }}", (), None, None),
    ],
)
def test_formats_are_found_or_given(
    template: str, tokens: tuple[str, ...], calls: str | None, reasoning: str | None
) -> None:
    tokenizer = tokenizer_of(template, *tokens, special=True)
    found = ModelTurns(tokenizer)
    assert (found.calls.name if found.calls else None) == calls
    assert (found.reasoning.name if found.reasoning else None) == reasoning
    given = ModelTurns(tokenizer, "llama3-json", "none")
    assert given.calls is CALL_FORMATS["llama3-json"] and given.reasoning is None
    with pytest.raises(ValueError, match="is unknown: use one of hermes"):
        ModelTurns(tokenizer, "hermez")


def test_a_plain_turn_is_read_as_content_alone() -> None:
    turns = ModelTurns(tokenizer_of("{{ messages[0].content }}"))
    turn = make_turn(MESSAGES)
    turns.check(turn, has_engine=False)
    assert turns.reading(turn, turns.render(turn)) is None
    assert turns.rules(turn, "", has_engine=True) == {}


def test_delimiters_are_tokens_of_the_vocabulary_where_they_are() -> None:
    tokenizer = tokenizer_of(HERMES, "<tool_call>", "</think>")
    turns = ModelTurns(tokenizer)
    reading = turns.reading(make_turn(MESSAGES, tools=[WEATHER, CLOCK]), "")
    assert reading is not None
    assert set(reading.delimiters.values()) == {"<tool_call>", "</think>"}
    assert set(reading.tools) == {"get_weather", "clock"} and reading.tools["clock"] == {}
    without = turns.reading(make_turn(MESSAGES, tools=[WEATHER], tool_choice="none"), "")
    assert without is not None and without.calls is None


def test_options_are_those_of_a_turn() -> None:
    assert {"tools", "tool_choice", "continue_final_message"} <= TURN_OPTIONS
    with pytest.raises(ValueError, match="messages is empty"):
        make_turn([])


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ messages[0].tool_calls[0].function.arguments | tojson }}", '{"a": "é"}'),
        # as DeepSeek's templates, which join strings
        ("{{ 'x' + messages[0]['tool_calls'][0]['function']['arguments'] }}", 'x{"a": "é"}'),
    ],
)
def test_arguments_are_what_the_template_works_with(source: str, shown: str) -> None:
    call = {"function": {"name": "f", "arguments": '{"a": "é"}'}}
    messages: list[dict[str, Any]] = [{"role": "assistant", "tool_calls": [call]}]
    assert ChatTemplate(source).render(messages, True, None, {}) == shown


def test_null_is_not_given_and_developer_is_system_where_it_is_not_known() -> None:
    source = "{% for m in messages %}{{ m.role }}{% if 'tool_calls' in m %}!{% endif %}{% endfor %}"
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]
    assert ChatTemplate(source).render(messages, True, None, {}) == "systemassistantassistant"
    knowing = ChatTemplate(source + "{# developer #}")
    assert knowing.render(messages, True, None, {}).startswith("developer")


@pytest.mark.parametrize(
    ("source", "ends"),
    [
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "<a b "),
        ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", "<a b"),
    ],
)
def test_a_prompt_that_continues_ends_with_the_last_message(source: str, ends: str) -> None:
    messages = [{"role": "user", "content": "a b "}, {"role": "assistant", "content": "a b "}]
    text = ChatTemplate(source).render(messages, False, None, {}, True)
    assert text.endswith(ends) and text.startswith("<a b")
    with pytest.raises(ValueError, match="does not show the last message"):
        ChatTemplate("{{ messages[0].content }}").render(messages, False, None, {}, True)
