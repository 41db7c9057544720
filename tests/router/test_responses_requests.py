"""Requests of /v1/responses: what reaches the template and the workers, and what is refused, under
the names that this API has for it."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from router.harness import MODEL, Harness
from router.responses_support import ASK, CALL, CLOCK, PATH, WEATHER, streamed, whole
from router.turn_models import HERMES, Say, speaking, tokenizer_of
from text.grammars.support import accepts

from pdserve.protocol.logit_rules import RULES, RuleKind
from pdserve.router.http.body_parsing import LONG_BODY
from pdserve.router.http.responses.requests import INCLUDES
from pdserve.router.request.prompts import MAX_MESSAGES
from pdserve.text.grammars.checker import shared_checker
from pdserve.text.tokenizer import Tokenizer
from pdserve.turns.model_turns import ModelTurns

SWITCHED = HERMES + "{% if verbosity %}[{{ verbosity }}]{% endif %}"
BLIND = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CALLED = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": '{"a":1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "noon"}


@pytest.fixture
def enforcing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Harness], None]]:
    """Returns enforcing(harness), which gives its workers a grammar engine.

    Rules are passed on as they are, since their other half is the engine's. The processes that try
    grammars end with the test.
    """
    for name in ("grammar", "thinking_budget"):
        monkeypatch.setitem(RULES, name, RuleKind("none:None", lambda settings, vocab_size: None))

    def enforce(harness: Harness) -> None:
        for state in harness.fleet.workers:
            monkeypatch.setattr(type(state), "enforces_grammars", True)

    yield enforce
    shared_checker().close()


def rules_of(harness: Harness) -> dict[str, Any]:
    rules: Any = harness.prefills[0].submits()[-1].sampling.logit_rules
    return rules or {}


async def prompt_of(harness: Harness, **fields: Any) -> str:
    """The prompt that a worker got."""
    await whole(harness, **fields)
    ids = harness.prefills[0].submits()[-1].prompt_token_ids
    return harness.tokenizer.decode(ids, skip_special_tokens=False)


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def thought(text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [part]}


async def test_items_become_the_messages_of_chat_completions(say: Say) -> None:
    harness = await say("x")
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
        thought("I look"),
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
        },
        CALLED,
        OUTPUT | {"output": [{"type": "input_text", "text": "noon"}]},
    ]
    text = await prompt_of(harness, input=items, instructions="Be brief.")
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning": "I look",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "clock", "arguments": '{"a":1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    assert text == await chat_prompt(harness, chat)
    assert text.index("Be brief.") < text.index("Be kind.") and "I look" in text


async def chat_prompt(harness: Harness, messages: list[Any]) -> str:
    """Returns the prompt that chat completions would send."""
    tools = [
        {"type": "function", "function": {n: v for n, v in tool.items() if n != "type"}}
        for tool in (WEATHER, CLOCK)
    ]
    body = {"model": MODEL, "messages": messages, "tools": tools}
    answer = await harness.http().post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    ids = harness.prefills[0].submits()[-1].prompt_token_ids
    return harness.tokenizer.decode(ids, skip_special_tokens=False)


SHOWN = """{% for m in messages %}{{ m.role }}={{ m.content or '' }}
{%- if m.reasoning_content %}~{{ m.reasoning_content }}{% endif %}
{%- for c in m.tool_calls or [] %}#{{ c.id }}{% endfor %}
{%- if m.tool_call_id %}@{{ m.tool_call_id }}{% endif %};{% endfor %}"""
SECOND = CALLED | {"call_id": "c2"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([thought("t"), said("assistant", "a"), CALLED, SECOND], "assistant=a~t#c1#c2;"),
        ([thought("t"), CALLED, thought("u"), SECOND], "assistant=~t\nu#c1#c2;"),
        ([said("assistant", "a"), said("assistant", "b")], "assistant=a;assistant=b;"),
        ([said("assistant", "a"), CALLED, said("assistant", "b")], "assistant=ab#c1;"),
        (
            [thought("t"), said("assistant", "a"), thought("u"), said("assistant", "b")],
            "assistant=a~t;assistant=b~u;",
        ),
        ([CALLED, OUTPUT, SECOND], "assistant=#c1;tool=noon@c1;assistant=#c2;"),
        ([CALLED, said("user", "u"), OUTPUT], "assistant=#c1;user=u;tool=noon@c1;"),
        ([thought("t"), said("user", "u")], "assistant=~t;user=u;"),
        ([{"role": "assistant", "content": "a"}, said("system", "s")], "assistant=a;system=s;"),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, CALLED],
            "assistant=~s#c1;",
        ),
        (
            [{"type": "reasoning", "encrypted_content": "x", "summary": []}, CALLED],
            "assistant=#c1;",
        ),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            "assistant=no;",
        ),
    ],
)
async def test_items_of_one_turn_are_one_message(say: Say, items: Any, messages: str) -> None:
    tokenizer = tokenizer_of(SHOWN)
    harness = await say("x", tokenizer=tokenizer)
    harness.service.turns = ModelTurns(tokenizer, "hermes", "think")
    asked = [said("user", "q"), *items]
    assert await prompt_of(harness, input=asked, tools=[]) == f"user=q;{messages}"


async def test_a_long_conversation_is_taken(say: Say) -> None:
    harness = await say("x")
    items = [said("user", f"word {number}") for number in range(400)]
    assert len(json.dumps(items)) < LONG_BODY
    text = await prompt_of(harness, input=items)
    assert "word 399" in text
    padded = [item | {"id": "x" * 200} for item in items]
    assert len(json.dumps(padded)) > LONG_BODY
    assert await prompt_of(harness, input=padded) == text


async def test_vllms_parameters_reach_the_workers(say: Say) -> None:
    harness = await say("abc def")
    given = {"top_k": 5, "min_p": 0.25, "seed": 7, "repetition_penalty": 1.5, "min_tokens": 2}
    own = {"max_output_tokens": 9, "temperature": 0.5, "stop": "def", "priority": 3}
    answer = await whole(harness, **given, **own, cache_salt="s", tools=[])
    assert answer["output"][0]["content"][0]["text"] == "abc "
    submit = harness.prefills[0].submits()[-1]
    assert {name: getattr(submit.sampling, name) for name in given} == given
    assert (submit.sampling.temperature, submit.priority) == (0.5, 3)
    assert submit.sampling.n == 1 and submit.sampling.max_tokens is not None


async def test_what_asks_for_nothing_is_taken(say: Say) -> None:
    harness = await say("x")
    neutral = {
        "store": True,
        "background": False,
        "truncation": "disabled",
        "max_tool_calls": None,
        "previous_response_id": None,
        "conversation": None,
        "prompt": None,
        "n": 1,
        "include": list(INCLUDES),
        "service_tier": "auto",
        "prompt_cache_retention": "24h",
        "top_logprobs": 0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": None, "summary": "detailed"},
        "parallel_tool_calls": True,
    }
    assert await whole(harness, **neutral)
    assert await streamed(harness, **neutral, stream_options={"include_obfuscation": True})
    assert await whole(harness, tools=[], tool_choice="auto"), "OpenAI's clients send it always"


async def test_effort_and_verbosity_go_to_the_template(say: Say) -> None:
    harness = await say("x", tokenizer=tokenizer_of(SWITCHED))
    text = await prompt_of(
        harness, reasoning={"effort": "none"}, text={"verbosity": "low"}, tools=[]
    )
    assert text.endswith("(none)[low]"), "a template that reads efforts reads this one too"
    qwen = HERMES.replace("reasoning_effort", "nothing")
    template = qwen.replace("{% if enable_thinking %}", "{% if enable_thinking is not false %}")
    thinking = await say("x", tokenizer=tokenizer_of(template))
    assert (await prompt_of(thinking, tools=[])).rstrip().endswith("<think>")
    quiet = await prompt_of(thinking, tools=[], reasoning={"effort": "none"})
    assert not quiet.rstrip().endswith("<think>")
    blind = await say("x", tokenizer=tokenizer_of(BLIND))
    assert await whole(blind, tools=[], reasoning={"effort": "none"}), "it does not reason"


async def test_thinking_can_be_bounded(
    say: Say, hermes: Tokenizer, enforcing: Callable[[Harness], None]
) -> None:
    harness = await say("x")
    enforcing(harness)
    await whole(harness, tools=[], thinking_token_budget=5)
    assert rules_of(harness)["thinking_budget"]["tokens"] == 5


@pytest.mark.processes
async def test_forced_tools(say: Say, enforcing: Callable[[Harness], None]) -> None:
    harness = await say(CALL)
    enforcing(harness)
    both = ("clock" in (grammar := await grammar_of(harness)), "get_weather" in grammar)
    assert both == (True, True)
    named = await grammar_of(harness, tool_choice={"type": "function", "name": "clock"})
    assert "clock" in named and "get_weather" not in named
    required = await grammar_of(harness, tool_choice="required")
    assert required not in (grammar, named)
    only = [{"type": "function", "name": "get_weather"}]
    for mode, same in (("auto", "auto"), ("required", "required")):
        allowed = {"type": "allowed_tools", "mode": mode, "tools": only}
        found = await grammar_of(harness, tool_choice=allowed)
        assert found == await grammar_of(harness, tool_choice=same, tools=[WEATHER])
    answer = await whole(harness, tool_choice="required")
    assert answer["tool_choice"] == "required" and answer["status"] == "completed"


@pytest.mark.processes
async def test_a_demanded_call_has_no_content_that_a_format_could_be_of(
    say: Say, enforcing: Callable[[Harness], None]
) -> None:
    """As instructor sends both: the grammar of the call holds."""
    harness = await say(CALL)
    enforcing(harness)
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    only = [{"type": "function", "name": "get_weather"}]
    for choice in (
        "required",
        {"type": "function", "name": "clock"},
        {"type": "allowed_tools", "mode": "required", "tools": only},
    ):
        alone = await grammar_of(harness, tool_choice=choice)
        assert await grammar_of(harness, tool_choice=choice, text=text) == alone
    for choice in ("auto", {"type": "allowed_tools", "mode": "auto", "tools": only}):
        alone = await grammar_of(harness, tool_choice=choice)
        assert await grammar_of(harness, tool_choice=choice, text=text) != alone


@pytest.mark.processes
async def test_what_of_a_tools_schema_is_not_enforced_is_said(
    say: Say, enforcing: Callable[[Harness], None]
) -> None:
    harness = await say("x")
    enforcing(harness)
    number: dict[str, Any] = {"type": "integer", "not": {"const": 1}}
    parameters = {"type": "object", "properties": {"n": number}}
    tools = [{"type": "function", "name": "f", "parameters": parameters}]
    fields = {"input": "x", "tools": tools, "tool_choice": "required", "max_output_tokens": 40}
    answer = await harness.http().post(PATH, json={"model": MODEL, **fields})
    assert answer.status_code == 200 and answer.headers["x-pdserve-unenforced"] == "not"
    del number["not"]
    answer = await harness.http().post(PATH, json={"model": MODEL, **fields})
    assert answer.status_code == 200 and "x-pdserve-unenforced" not in answer.headers


async def grammar_of(harness: Harness, **fields: Any) -> str:
    await whole(harness, **fields)
    return str(rules_of(harness)["grammar"])


class Place(BaseModel):
    city: str
    people: int


@pytest.mark.processes
async def test_a_form_as_openais_client_parses_it(
    say: Say, enforcing: Callable[[Harness], None]
) -> None:
    right = '{"city": "Köln", "people": 1000000}'
    harness = await say(right)
    enforcing(harness)
    client = harness.openai()
    answer = await client.responses.parse(model=MODEL, input="Where?", text_format=Place)
    assert answer.output_parsed == Place(city="Köln", people=1_000_000)
    grammar = rules_of(harness)["grammar"]
    assert accepts(grammar, right) and not accepts(grammar, '{"city": 3}')
    async with client.responses.stream(model=MODEL, input="Where?", text_format=Place) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == answer.output_parsed
    await whole(harness, tools=[], text={"format": {"type": "json_object"}})
    assert accepts(rules_of(harness)["grammar"], "{}")
    text: dict[str, Any] = {"format": {"type": "json_object"}}
    text["format"]["schema"] = {"properties": {"a": {"type": "integer"}}}
    await whole(harness, tools=[], text=text)
    grammar = rules_of(harness)["grammar"]
    assert accepts(grammar, '{"a": 1}') and not accepts(grammar, '{"a": "x"}')
    await whole(harness, tools=[], structured_outputs={"choice": ["yes", "no"]})
    assert accepts(rules_of(harness)["grammar"], "yes")
    schema = {"type": "object", "not": {"const": 3}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    loose = await harness.http().post(PATH, json=ASK | {"tools": [], "text": text})
    assert loose.headers["x-pdserve-unenforced"] == "not"
    text = {"format": text["format"] | {"strict": True}}
    strict = await harness.http().post(PATH, json=ASK | {"tools": [], "text": text})
    error = strict.json()["error"]
    assert (strict.status_code, error["param"]) == (400, "text.format.schema")
    assert error["message"].startswith("text.format.schema uses not")


def function(**more: Any) -> dict[str, Any]:
    return {"tools": [CLOCK, {"type": "function", "name": "f"} | more]}


def item(*items: Any) -> dict[str, Any]:
    return {"input": [said("user", "q"), *items]}


def choice(value: Any) -> dict[str, Any]:
    return {"tool_choice": value}


def form(**more: Any) -> dict[str, Any]:
    return {"text": {"format": more}, "tools": []}


IMAGE = {"type": "input_image", "image_url": "http://x"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    # what refers to stored things, or to a platform
    ({"previous_response_id": "resp_1"}, "previous_response_id", "output items"),
    ({"conversation": "conv_1"}, "conversation", "as input"),
    ({"prompt": {"id": "p"}}, "prompt", "send input and instructions"),
    ({"background": True}, "background", "background false"),
    ({"truncation": "auto"}, "truncation", "truncation disabled"),
    ({"max_tool_calls": 3}, "max_tool_calls", "count the calls"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "yourself"),
    ({"moderation": {"model": "m"}}, "moderation", "yourself"),
    ({"n": 2}, "n", "several requests"),
    (item({"type": "item_reference", "id": "msg_1"}), "input[1]", "send the item itself"),
    (item({"id": "msg_1"}), "input[1]", "send the item itself"),
    # names of chat completions
    ({"messages": []}, "messages", "send input"),
    ({"max_tokens": 3}, "max_tokens", "max_output_tokens"),
    ({"max_completion_tokens": 3}, "max_completion_tokens", "max_output_tokens"),
    ({"response_format": {"type": "text"}}, "response_format", "text: {format"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "reasoning: {effort"),
    ({"verbosity": "low"}, "verbosity", "text: {verbosity"),
    ({"logprobs": True}, "logprobs", "include"),
    ({"guided_json": {}}, "guided_json", "text.format"),
    ({"echo": True}, "echo", "only what is generated"),
    ({"inputs": "x"}, "inputs", "did you mean input"),
    # values
    ({"input": []}, "input", "at least one item"),
    ({"input": 3}, "input", "input"),
    ({"input": None}, "input", "required field"),
    ({"input": [said("user", "x")] * (MAX_MESSAGES + 1)}, "input", "at most 4096 items"),
    ({"input": ["x"]}, "input", "object"),
    ({"instructions": ["x"]}, "instructions", "str"),
    ({"include": ["file_search_call.results"]}, "include", "leave it out"),
    ({"include": "x"}, "include", "array"),
    ({"top_logprobs": 2}, "top_logprobs", "send both"),
    ({"top_logprobs": 99, "include": [INCLUDES[0]]}, "top_logprobs", "must not exceed 20"),
    ({"top_logprobs": -2, "include": [INCLUDES[0]]}, "top_logprobs", "top_logprobs must be"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
    ({"max_output_tokens": 10**6}, "max_output_tokens", "lower max_output_tokens"),
    (
        {"max_output_tokens": 2, "min_tokens": 3},
        "min_tokens",
        "must not exceed max_output_tokens",
    ),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown"),
    ({"metadata": {"a": 1}}, "metadata", "str"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "at most 16"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "512"),
    ({"reasoning": {"effort": 3}}, "reasoning", "str"),
    ({"reasoning": {"budget": 3}}, "reasoning", "unknown"),
    ({"thinking_token_budget": -1}, "thinking_token_budget", "[0, "),
    ({"text": {"verbosity": "huge"}}, "text.verbosity", "low, medium, high"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "instructions"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "server"),
    ({"priority": 2**40}, "priority", "lowest runs first"),
    # items
    (item({"type": "computer_call"}), "input[1].type", "function_call_output or reasoning"),
    (item({"content": "x"}), "input[1].type", "must be message"),
    (item({"role": "user", "content": [IMAGE]}), "input[1].content[0]", "text only"),
    (item({"role": "user", "content": [{"type": "input_text"}]}), "input[1].content[0].text", ""),
    (item({"role": "user", "content": None}), "input[1].content", "string or a list"),
    (item({"role": 3, "content": ""}), "input[1].role", "non-empty string"),
    (item({"role": "tool", "content": "x"}), "input[1].role", "function_call_output"),
    (
        item({"role": "assistant", "content": "", "tool_calls": []}),
        "input[1].tool_calls",
        "'function_call'",
    ),
    (item({"type": "reasoning", "content": "x"}), "input[1].content", "list of parts"),
    (item({"type": "reasoning", "summary": ["x"]}), "input[1].summary[0]", "object"),
    (item(OUTPUT), "input[1].call_id", "output items too"),
    (item(OUTPUT, CALLED), "input[1].call_id", "before it"),
    (item(CALLED, OUTPUT | {"call_id": None}), "input[2].call_id", "call_id"),
    (item(CALLED, OUTPUT | {"output": [IMAGE]}), "input[2].output[0]", "text only"),
    (item(CALLED | {"call_id": ""}), "input[1].call_id", "call_id"),
    (item(CALLED | {"name": None}), "input[1].name", "name of a function"),
    # what only chat completions' checks see: the item is named all the same
    (item(CALLED | {"arguments": "{"}), "input[1].arguments", "not valid JSON"),
    (
        item(thought("t"), said("assistant", "a"), CALLED, SECOND | {"arguments": "[]"}),
        "input[4].arguments",
        "JSON object",
    ),
    # tools
    ({"tools": [CLOCK, {"type": "web_search"}]}, "tools[1].type", "send a function"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type", "send a function"),
    ({"tools": [{"type": "function", "function": CLOCK}]}, "tools[0]", "beside the type"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].name", "appears twice"),
    ({"tools": [WEATHER] * 257}, "tools", "at most 256"),
    (function(name="a b"), "tools[1].name", "without spaces"),
    (function(name=[3]), "tools[1].name", "without spaces"),
    (function(parameters=[]), "tools[1].parameters", "JSON schema"),
    (function(description=3), "tools[1].description", "string"),
    (function(strict=True), "tools[1].strict", "leave strict out"),
    (choice("any"), "tool_choice", "'allowed_tools'"),
    (choice("required"), "tool_choice", "send 'auto'"),
    (choice({"type": "function", "name": "x"}), "tool_choice", "clock"),
    (choice({"type": "function", "function": {"name": "clock"}}), "tool_choice", "'name': ...}"),
    (choice({"type": "web_search"}), "tool_choice", "must be"),
    (choice({"type": "allowed_tools"}), "tool_choice.mode", "'auto' or 'required'"),
    (choice({"type": "allowed_tools", "mode": "auto"}), "tool_choice.tools", "at least one"),
    (
        choice({"type": "allowed_tools", "mode": "auto", "tools": [CLOCK | {"name": "x"}]}),
        "tool_choice.tools[0].name",
        "not among tools",
    ),
    (
        {
            **function(strict=True),
            **choice({"type": "allowed_tools", "mode": "auto", "tools": function()["tools"][1:]}),
        },
        "tools[1].strict",
        "leave strict out",
    ),
    ({"tools": None} | choice("required"), "tool_choice", "leave it out"),
    # forms
    (form(type="yaml"), "text.format", "json_object or json_schema"),
    (form(type="structural_tag"), "text.format", "structured_outputs"),
    (form(type="json_schema", json_schema={}), "text.format.json_schema", "beside the type"),
    (form(type="json_schema", schema={}), "text.format.name", "name"),
    (form(type="json_schema", name="x"), "text.format.schema", "missing"),
    (form(type="json_schema", name="x", schema={}, strict=1), "text.format.strict", "true"),
    (form(type="json_object"), "text.format", "grammar"),
    (form(type="json_object", strict=True), "text.format.strict", "use type, schema"),
    (form(type="json_object", schema={"type": "array"}), "text.format.schema", "grammar"),
    (form(type="text", name="x"), "text.format.name", "leave it out"),
    (form(type="json_schema", name="x", schema={}, strct=True), "text.format.strct", "strict"),
    (form(type="json_object") | {"structured_outputs": {"regex": "a"}}, "text.format", "exclude"),
    (form(type="json_object") | {"ignore_eos": True}, "ignore_eos", "text.format"),
]


@pytest.mark.parametrize(("change", "param", "says"), BAD)
async def test_wrong_input_is_named_with_the_cure_before_any_work(
    say: Say, change: dict[str, Any], param: str, says: str
) -> None:
    harness = await say("x")
    answer = await harness.http().post(PATH, json=ASK | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert says in error["message"], error["message"]
    assert not harness.prefills[0].submits() and not harness.decodes[0].submits()
    assert harness.service.admission.queued_tokens == 0


async def test_what_the_template_does_not_read_is_refused(say: Say) -> None:
    harness = await say("x", tokenizer=tokenizer_of(BLIND))
    harness.service.turns = ModelTurns(harness.tokenizer, "hermes", "think")
    for fields, param, says in (
        ({"tools": [CLOCK]}, "tools", "leave tools out"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "does not read it"),
        ({"reasoning": {"effort": "none"}}, "reasoning.effort", "thinking_token_budget 0"),
    ):
        answer = await harness.http().post(PATH, json=ASK | {"tools": []} | fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert says in error["message"]
    both = await say("x", tokenizer=tokenizer_of(HERMES.replace("reasoning_effort", "nothing")))
    wants = {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}}
    answer = await both.http().post(PATH, json=ASK | wants)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning.effort")


async def test_a_model_or_a_key_that_is_not_there(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYS_OF_THE_TEST", "right")
    harness = await say("x", api_key_env="KEYS_OF_THE_TEST")
    key = {"Authorization": "Bearer right"}
    http = harness.http()
    answer = await http.post(PATH, json=ASK | {"model": "other"}, headers=key)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    for answer in (await http.post(PATH, json=ASK), await http.get(f"{PATH}/resp_1")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (await http.post(PATH, json=ASK, headers=key)).status_code == 200


async def test_a_conversation_that_cannot_fit_names_the_input(hermes: Tokenizer) -> None:
    harness = speaking(hermes, "x")
    for worker in (*harness.prefills, *harness.decodes):
        worker.max_tokens = 256
    await harness.start()
    for text in ("word " * 200, "word " * 20_000):
        for fields in ({"input": text}, item(said("user", text)), {"instructions": text}):
            answer = await harness.http().post(PATH, json=ASK | fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
            assert error["param"] in ("input", "instructions")
            assert "max_tokens" not in error["message"].replace("max_output_tokens", "x")
    await harness.fleet.close()
    await harness.world.close()
