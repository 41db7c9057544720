"""A form that a chat asks for and the reasoning before it, from the HTTP body and the Python handle
to the workers' Submit."""

import asyncio
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from router.harness import MODEL, Harness
from router.turn_models import (
    HERMES,
    MESSAGES,
    WEATHER,
    Say,
    message_of,
    some_at_once,
    speaking,
    streamed,
    tokenizer_of,
)
from text.grammars.support import accepts

from pdserve.cluster.client import _chat_call
from pdserve.cluster.deployments.router_replica import RouterReplica
from pdserve.router.errors import ApiError
from pdserve.router.http.body_parsing import LONG_BODY
from pdserve.router.http.calls import LONG_AT_ONCE
from pdserve.text.grammars.checker import QUICK_SECONDS, SECONDS, shared_checker
from pdserve.text.tokenizer import Tokenizer
from pdserve.turns.model_turns import ModelTurns

pytestmark = pytest.mark.processes

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"guided_json": SCHEMA},
    {"guided_regex": r'\{"a": 1\}'},
    {"guided_choice": ['{"a": 1}']},
]
TAGS: dict[str, Any] = {
    "response_format": {
        "type": "structural_tag",
        "structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}],
        "triggers": ["<a>"],
    }
}
FITS = '{"a": 1}'
SLACK_S = 1.0  # what a busy machine may add to a limit
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200}
OPEN = {"chat_template_kwargs": {"enable_thinking": True}}
CLOSED = {"chat_template_kwargs": {"enable_thinking": False}}
ANSWER = '<think>\nOne, or {"a": two}.\n</think>\n\n{"a": 1}'


@pytest.fixture(scope="module", autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    shared_checker().close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Delimiters of reasoning are text, which a test can read in the grammar."""
    return tokenizer_of(HERMES)


@pytest.fixture
async def say(tokenizer: Tokenizer) -> Any:
    """Returns say(answer, **options of speaking), which returns a router whose workers enforce
    grammars."""
    made: list[Harness] = []

    async def build(answer: str, tokenizer: Tokenizer = tokenizer, **options: Any) -> Harness:
        made.append(speaking(tokenizer, answer, **options))
        for worker in (*made[-1].prefills, *made[-1].decodes):
            worker.grammar_engine = "llguidance 1.9.1"
        return await made[-1].start()

    yield build
    for harness in made:
        await harness.fleet.close()
        await harness.world.close()


async def asked(harness: Harness, **fields: Any) -> dict[str, Any]:
    """The logit rules that both workers get."""
    answer = await harness.http().post("/v1/chat/completions", json=CHAT | fields)
    assert answer.status_code == 200, answer.text
    rules = [w.submits()[-1].sampling.logit_rules for w in (*harness.prefills, *harness.decodes)]
    assert rules[0] == rules[1]
    found: dict[str, Any] = rules[0] or {}
    return found


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
async def test_where_reasoning_may_must_or_must_not_come(say: Say, form: dict[str, Any]) -> None:
    harness = await say(ANSWER)
    thought = 'One, or {"a": two}.\n</think>\n\n'
    cases: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
        ({}, (FITS, f"<think>\n{thought}{FITS}"), (thought + FITS, "<think>\n" + thought)),
        (OPEN, (thought + FITS,), (FITS, thought)),
        (CLOSED, (FITS,), (f"<think>\n{thought}{FITS}", thought + FITS)),
    ]
    for more, fits, does_not in cases:
        grammar = (await asked(harness, **form, **more))["grammar"]
        for text in fits:
            assert accepts(grammar, text), (more, text)
        for text in does_not:
            assert not accepts(grammar, text), (more, text)


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
async def test_calls_may_come_instead_of_the_form(say: Say, form: dict[str, Any]) -> None:
    harness = await say(CALL)
    thought = "One.\n</think>\n\n"
    bad = CALL.replace('"Rome"', "3")
    for more, before in (({}, ""), (OPEN, thought), (CLOSED, "")):
        grammar = (await asked(harness, tools=[WEATHER], **form, **more))["grammar"]
        assert accepts(grammar, before + FITS) and accepts(grammar, before + CALL), more
        assert accepts(grammar, f"{before}{CALL}\n{CALL}")
        assert not accepts(grammar, before + bad) and not accepts(grammar, before + FITS + CALL)
        one = {"parallel_tool_calls": False, "tools": [WEATHER]}
        grammar = (await asked(harness, **one, **form, **more))["grammar"]
        assert accepts(grammar, before + CALL)
        assert not accepts(grammar, f"{before}{CALL}\n{CALL}")
        none = {"tool_choice": "none", "tools": [WEATHER]}
        grammar = (await asked(harness, **none, **form, **more))["grammar"]
        assert accepts(grammar, before + FITS) and not accepts(grammar, before + CALL)
    answer = await harness.http().post(
        "/v1/chat/completions", json=CHAT | form | {"tools": [WEATHER]}
    )
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'


async def test_a_form_that_nothing_fits_is_refused_beside_calls_too(say: Say) -> None:
    harness = await say(CALL)
    never = {"guided_json": {"type": "object", "required": ["a"], "properties": {"a": False}}}
    body = CHAT | never | {"tools": [WEATHER]}
    answer = await harness.http().post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_json")


async def test_a_response_has_its_form_after_reasoning_too(say: Say) -> None:
    harness = await say(ANSWER)
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA | {"not": {}}}}
    thought = "One.\n</think>\n\n"
    for more, fits, does_not in (
        ({}, "<think>" + thought + FITS, thought + FITS),
        (OPEN, thought + FITS, FITS),
        (CLOSED, FITS, "<think>" + thought + FITS),
    ):
        body = {"model": MODEL, "input": "What?", "text": form, **more}
        answer = await harness.http().post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-pdserve-unenforced"] == "not"
        grammar = harness.decodes[0].submits()[-1].sampling.logit_rules["grammar"]
        assert accepts(grammar, fits) and not accepts(grammar, does_not), more


async def test_structural_tags_are_enforced_after_reasoning_alone(say: Say) -> None:
    harness = await say(ANSWER)
    grammar = (await asked(harness, **TAGS))["grammar"]
    assert accepts(grammar, "<think><a>two</a></think>So: <a>1</a>")
    assert accepts(grammar, "So: <a>1</a>")
    assert not accepts(grammar, "<think><a>two</a></think>So: <a>two</a>")
    assert not accepts(grammar, "<think><a>1</a>")
    grammar = (await asked(harness, **TAGS, **OPEN))["grammar"]
    assert accepts(grammar, "<a>two</a></think>So: <a>1</a>")
    assert not accepts(grammar, "So: <a>1</a>")
    grammar = (await asked(harness, **TAGS, **CLOSED))["grammar"]
    assert accepts(grammar, "So: <a>1</a>")
    assert not accepts(grammar, "<think><a>two</a></think>So: <a>1</a>")


async def test_a_continued_answer_has_no_reasoning_behind_its_beginning(say: Say) -> None:
    harness = await say(FITS)
    for begun, fits, does_not in (
        ("So: ", FITS, f"<think>x</think>{FITS}"),
        ("<think>I t", f"hink</think>{FITS}", FITS),
        ("<think>x</think>", FITS, f"x</think>{FITS}"),
    ):
        messages = [*MESSAGES, {"role": "assistant", "content": begun}]
        rules = await asked(
            harness, **FORMS[1], messages=messages, continue_final_message=True, echo=False
        )
        assert accepts(rules["grammar"], fits) and not accepts(rules["grammar"], does_not), begun


async def test_a_grammar_of_the_requests_own_stays_as_it_is_written(say: Say) -> None:
    harness = await say("yes")
    own = {"logit_rules": {"grammar": 'start: "yes"'}}
    assert await asked(harness, **own) == own["logit_rules"]
    refused = await harness.http().post("/v1/chat/completions", json=CHAT | own | OPEN)
    assert refused.status_code == 400 and "no way out" in refused.json()["error"]["message"]


async def test_the_budget_bounds_the_reasoning_before_a_form(say: Say) -> None:
    ids = tokenizer_of(HERMES, "<think>", "</think>")
    begin, end = (ids.encode(text, add_special_tokens=False) for text in ("<think>", "</think>"))
    harness = await say(ANSWER, tokenizer=ids)
    for more, start in (({}, begin), (OPEN, None)):
        rules = await asked(harness, **FORMS[0], thinking_token_budget=7, **more)
        assert rules["thinking_budget"] == {"tokens": 7, "end": end, "start": start}
        assert f"<[{end[0]}]>" in rules["grammar"]
    rules = await asked(harness, **FORMS[0], thinking_token_budget=7, **CLOSED)
    assert rules.keys() == {"grammar"} and "<[" not in rules["grammar"]


@pytest.mark.parametrize("more", [{}, OPEN], ids=["may", "must"])
async def test_content_is_the_form_alone_streamed_and_whole(say: Say, more: Any) -> None:
    harness = await say(ANSWER.removeprefix("<think>\n" if more else ""))
    body = CHAT | FORMS[0] | more
    answer = (await harness.http().post("/v1/chat/completions", json=body)).json()
    message = answer["choices"][0]["message"]
    assert json.loads(message["content"]) == {"a": 1}
    assert message["reasoning"] == 'One, or {"a": two}.'
    for seed in range(3):
        for worker in harness.world.workers.values():
            worker.tokens_at_once = some_at_once(seed)
        fields = FORMS[0] | more | {"tools": []}
        found, _ = message_of(await streamed(harness, **fields))
        assert found == {k: v for k, v in message.items() if k != "role"}


async def test_reasoning_that_the_prompt_closed_is_content(say: Say) -> None:
    """As a second <think> is: the first stood in the prompt."""
    harness = await say("<think>a</think>b")
    for more, content in ((CLOSED, "<think>a</think>b"), ({}, "b")):
        answer = await harness.http().post("/v1/chat/completions", json=CHAT | more)
        assert answer.json()["choices"][0]["message"]["content"] == content


async def test_each_grammar_is_built_once(say: Say) -> None:
    harness = await say(ANSWER)
    properties = {"only_here": {"type": "integer"}}
    form = {"guided_json": {"type": "object", "properties": properties}}
    before = shared_checker().num_built
    for more, num_built in ((OPEN, 1), (OPEN, 1), ({}, 2), (CLOSED, 3), (OPEN, 3)):
        await asked(harness, **form, **more)
        assert shared_checker().num_built - before == num_built, more
    tool = {"type": "function", "function": {"name": "only_here", "parameters": form}}
    await asked(harness, tools=[tool])
    assert shared_checker().num_built - before == 4


def hostile(number: int) -> dict[str, Any]:
    """A schema of 800 bytes that takes longer than any limit."""
    parts = {f"p{i}": {"type": "integer", "multipleOf": 99991 - i} for i in range(12)}
    return {"type": "object", "title": f"{number}", "properties": parts, "required": list(parts)}


async def test_hostile_grammars_are_answered_in_time_and_delay_nobody(
    say: Say,
) -> None:
    """Six at once, beside known grammars, new small ones, and small ones of tools."""
    harness = await say(FITS)
    known: dict[str, Any] = {"guided_regex": "known"}

    async def ask(**fields: Any) -> tuple[int, float, str]:
        began = time.monotonic()
        answer = await harness.http().post("/v1/chat/completions", json=CHAT | fields)
        return answer.status_code, time.monotonic() - began, answer.text

    assert (await ask(**known))[0] == 200

    asking = asyncio.gather(*(ask(guided_json=hostile(number)) for number in range(6)))
    waits: dict[str, list[float]] = {"known": [], "new": [], "tools": []}
    while not asking.done():
        number = len(waits["new"])
        tool = {"type": "function", "function": {"name": f"f{number}", "parameters": SCHEMA}}
        for name, fields in (
            ("known", known),
            ("new", {"guided_grammar": f'start: "{number}"'}),
            ("tools", {"tools": [tool]}),
        ):
            status, took, text = await ask(**fields)
            assert status == 200, text
            waits[name].append(took)
    for status, took, text in await asking:
        assert took < SECONDS + SLACK_S
        assert status == (400 if "it takes longer" in text else 429), text
        if status == 429:
            assert '"overloaded"' in text and "guided_json: other grammars took the 5 s" in text
    assert {status for status, _, _ in await asking} == {400, 429}
    assert max(waits["known"]) < SLACK_S
    assert max(waits["new"] + waits["tools"]) < QUICK_SECONDS + SLACK_S


async def test_long_bodies_do_not_wait_for_hostile_grammars(say: Say) -> None:
    """Few long bodies are worked on at once, and one that waits for its grammar is not one."""
    harness = await say(FITS)
    text = "a long prompt. " * 4000
    long_chat = CHAT | {"messages": [{"role": "user", "content": text}]}
    assert len(text) > LONG_BODY
    assert (await harness.http().post("/v1/chat/completions", json=long_chat)).status_code == 200

    async def ask(number: int) -> int:
        fields = {"guided_json": hostile(number) | {"description": text}}
        answer = await harness.http().post("/v1/chat/completions", json=CHAT | fields)
        return answer.status_code

    asking = asyncio.gather(*(ask(100 + number) for number in range(2 * LONG_AT_ONCE)))
    await asyncio.sleep(0)
    waits = []
    while not asking.done():
        began = time.monotonic()
        answer = await harness.http().post("/v1/chat/completions", json=long_chat)
        assert answer.status_code == 200
        waits.append(time.monotonic() - began)
    assert set(await asking) <= {400, 429}
    assert max(waits) < SECONDS / 2, waits


@pytest.mark.parametrize("tokenizer_name", ["hermes", "coder"])
async def test_an_error_in_a_schema_names_its_tool(say: Say, tokenizer_name: str) -> None:
    """In the words of each API, also beside a form, and where not all tools may be called."""
    harness = await say(FITS)
    if tokenizer_name == "coder":
        harness.service.turns = ModelTurns(harness.tokenizer, "qwen3-coder", "think")
    wrong = {"type": "array", "items": {"type": "string", "pattern": "("}}
    schemas: list[dict[str, Any]] = [SCHEMA] * 20
    schemas[7] = {"type": "object", "properties": {"a": wrong}}
    names = [f"{tokenizer_name}_{number}" for number in range(20)]
    pairs = list(zip(names, schemas, strict=True))
    tools = [{"name": name, "parameters": schema} for name, schema in pairs]
    chat = CHAT | {"tools": [{"type": "function", "function": tool} for tool in tools]}
    few = [{"type": "function", "function": {"name": names[number]}} for number in (7, 9)]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": few}}
    flat = {"model": MODEL, "input": "hi", "tools": [{"type": "function"} | t for t in tools]}
    message = {"model": MODEL, "messages": MESSAGES, "max_tokens": 9}
    message["tools"] = [{"name": name, "input_schema": schema} for name, schema in pairs]
    asks = [
        ("/v1/chat/completions", chat, "tools[7].function.parameters"),
        (
            "/v1/chat/completions",
            chat | {"tool_choice": "required"},
            "tools[7].function.parameters",
        ),
        ("/v1/chat/completions", chat | {"tool_choice": few[0]}, "tools[7].function.parameters"),
        ("/v1/chat/completions", chat | {"tool_choice": allowed}, "tools[7].function.parameters"),
        ("/v1/chat/completions", chat | FORMS[0], "tools[7].function.parameters"),
        ("/v1/responses", flat, "tools[7].parameters"),
        ("/v1/messages", message, "tools[7].input_schema"),
    ]
    for path, body, place in asks * 2:  # the second time, the verdict is known
        answer = await harness.http().post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400, path
        assert error["message"] == (
            f"{place} of '{names[7]}' cannot be used as a grammar: error: unclosed group; mend or "
            "simplify it"
        )
        assert error.get("param", place) == place and error.get("code") in (None, "invalid_grammar")
    right = await harness.http().post(
        "/v1/chat/completions", json=chat | {"tool_choice": {**few[1]}}
    )
    assert right.status_code == 200, "a tool that is not called is not enforced"


async def test_what_excludes_a_form_is_refused_before_any_work(say: Say) -> None:
    harness = await say(FITS)
    for more, param in (
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"logit_rules": {"grammar": 'start: "a"'}}, "logit_rules"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {"type": "object", "required": ["a"], "properties": {"a": False}}}, None),
    ):
        body = CHAT | OPEN | ({} if "guided_json" in more else FORMS[1]) | more
        answer = await harness.http().post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param or "guided_json"), error
    assert not harness.prefills[0].submits()


async def test_the_python_handle_asks_for_a_form_in_a_chat(say: Say) -> None:
    harness = await say(ANSWER)
    replica: Any = SimpleNamespace(_service=harness.service)

    async def admitted(outputs: Any, **options: Any) -> Any:
        call = _chat_call(MESSAGES, None, False, {"structured_outputs": outputs, **options})
        return await RouterReplica._admitted(replica, call, "r")

    generation = await admitted({"json": SCHEMA})
    try:
        [choice] = await generation.collect()
    finally:
        generation.close()
    assert json.loads(choice.text) == {"a": 1} and choice.pieces
    rules = harness.prefills[0].submits()[-1].sampling.logit_rules
    assert accepts(rules["grammar"], ANSWER) and not accepts(rules["grammar"], "no")
    for outputs, options, says in (
        ({"regex": "("}, {}, "structured_outputs.regex cannot"),
        ({}, {}, "structured_outputs is empty"),
        ({"regex": "a"}, {"tools": [WEATHER], "tool_choice": "required"}, "tool_choice 'required'"),
    ):
        with pytest.raises(ApiError) as caught:
            await admitted(outputs, **options)
        assert caught.value.status == 400 and says in str(caught.value)
