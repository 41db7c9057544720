"""Requests that say what their answer must look like, from the HTTP body to the worker's Submit."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from router import workers
from router.harness import Harness, until
from text.grammars.support import accepts

from pdserve.cluster.client import _call
from pdserve.protocol.logit_rules import RULES, RuleKind
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.choosing.choose import Demand, usable
from pdserve.router.errors import ApiError
from pdserve.router.grammars import bad_word_ids
from pdserve.text.answers.formats import CALL_FORMATS
from pdserve.text.grammars.checker import shared_checker
from pdserve.text.grammars.tools import tools_grammar
from pdserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.processes

Make = Callable[..., Harness]
LARK = 'start: "yes" | "no"'
GOOD = {"model": "demo", "prompt": [10, 11, 12], "max_tokens": 4, "min_tokens": 3}
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4,
    "min_tokens": 3,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
STRICT = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
}
ENDPOINTS = [("/v1/completions", GOOD), ("/v1/chat/completions", CHAT)]


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other halves of these rules are the engine's; a router only passes their settings on."""

    def check(settings: Any, vocab_size: int | None) -> None:
        if not settings:
            raise ValueError("is empty")

    for name in ("grammar", "bad_words", "allowed_token_ids"):
        monkeypatch.setitem(RULES, name, RuleKind("grammar:Grammar", check))


@pytest.fixture(scope="module", autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    shared_checker().close()


async def started(make: Make, num_prefill: int = 1, num_decode: int = 1) -> Harness:
    harness = make(num_prefill, num_decode)
    for worker in (*harness.prefills, *harness.decodes):
        worker.grammar_engine = "llguidance 1.9.1"
    return await harness.start()


def rules_of(harness: Harness) -> dict[str, Any]:
    sent = [submit for worker in harness.world.workers.values() for submit in worker.submits()]
    assert sent
    found: list[Any] = [submit.sampling.logit_rules for submit in sent]
    assert all(each == found[0] for each in found)
    return found[0] or {}


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "fits", "does_not"),
    [
        ({"response_format": FORMAT}, '{"a": 1}', "[]"),
        ({"response_format": {"type": "json_object"}}, '{"b": []}', "[]"),
        ({"structured_outputs": {"regex": "[ab]+"}}, "abba", "c"),
        ({"guided_choice": ["yes", "no"]}, "yes", "maybe"),
        ({"guided_grammar": 'root ::= "x"+'}, "xx", "y"),
    ],
)
async def test_the_grammar_reaches_both_workers(
    make: Make, path: str, body: Any, fields: Any, fits: str, does_not: str
) -> None:
    harness = await started(make)
    answer = await harness.http().post(path, json=body | fields)
    assert answer.status_code == 200, answer.text
    grammar = rules_of(harness)["grammar"]
    assert accepts(grammar, fits) and not accepts(grammar, does_not)
    assert harness.prefills[0].submits() and harness.decodes[0].submits()


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_enforced_is_said(
    make: Make, path: str, body: Any, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    harness = await started(make)
    http = harness.http()
    with caplog.at_level("INFO", "pdserve.router.grammars"):
        answer = await http.post(path, json=body | {"response_format": FORMAT, "stream": stream})
    assert answer.headers["x-pdserve-unenforced"] == "not"
    assert "response_format.json_schema.schema: the schema uses" in caplog.text
    page = (await http.get("/metrics")).text
    assert 'pdserve_router_unenforced_keywords_total{keyword="not"} 1.0' in page
    odd = {"guided_json": {"minе\r\nx-evil: 1": 1, "mine": 2, "type": "string", "format": "a b"}}
    answer = await http.post(path, json=body | odd)
    assert set(answer.headers["x-pdserve-unenforced"].split(", ")) == {"mine", "(other)"}
    assert "x-evil" not in answer.headers
    page = (await http.get("/metrics")).text
    assert 'pdserve_router_unenforced_keywords_total{keyword="other"} 1.0' in page
    joined = {"guided_json": {"allOf": [{"properties": {"a": {}}}, {"minProperties": 1}]}}
    answer = await http.post(path, json=body | joined)
    assert answer.headers["x-pdserve-unenforced"] == "minProperties"
    page = (await http.get("/metrics")).text
    assert 'pdserve_router_unenforced_keywords_total{keyword="minProperties"} 1.0' in page
    plain = await http.post(path, json=body)
    assert "x-pdserve-unenforced" not in plain.headers


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"guided_regex": "("}, "guided_regex", "invalid_grammar"),
        ({"response_format": {"type": "yaml"}}, "response_format", "invalid_grammar"),
        (
            {"response_format": STRICT},
            "response_format.json_schema.schema",
            "invalid_grammar",
        ),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "invalid_grammar"),
        (
            {"guided_json": {}, "logit_rules": {"grammar": "start: /a/"}},
            "logit_rules",
            "invalid_grammar",
        ),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos", "invalid_grammar"),
        ({"bad_words": [""]}, "bad_words", None),
        ({"bad_words": ["x"] * 257}, "bad_words", None),
        ({"bad_words": "x"}, "bad_words", None),
        ({"allowed_token_ids": ["x"]}, "allowed_token_ids", None),
        (
            {"structured_outputs": {"regex": r"[^\s\S]"}},
            "structured_outputs.regex",
            "invalid_grammar",
        ),
    ],
)
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_errors_name_the_parameter_and_reach_no_worker(
    make: Make, path: str, body: Any, change: Any, param: str, code: str | None
) -> None:
    harness = await started(make)
    answer = await harness.http().post(path, json=body | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert error["type"] == "invalid_request_error"
    assert not harness.prefills[0].submits() and not harness.decodes[0].submits()


async def test_an_echo_is_not_of_the_form(make: Make) -> None:
    harness = await started(make)
    for more in ({"echo": True}, {"echo": True, "max_tokens": 0}):
        answer = await harness.http().post(
            "/v1/completions", json=GOOD | more | {"guided_regex": "a"}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "echo")
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So: "}]
    chat = CHAT | {"messages": begun, "continue_final_message": True, "echo": True}
    for form in ({"response_format": {"type": "json_object"}}, {"guided_regex": "a"}):
        answer = await harness.http().post("/v1/chat/completions", json=chat | form)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (
            400,
            "echo",
            "invalid_grammar",
        )
        assert error["message"].startswith("echo repeats the last message, which is not of the")
    assert not harness.prefills[0].submits() and not harness.decodes[0].submits()


async def test_words_and_tokens(make: Make) -> None:
    harness = await started(make)
    body = GOOD | {"bad_words": ["cat"], "allowed_token_ids": [5, 6], "guided_regex": "a"}
    answer = await harness.http().post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = rules_of(harness)
    assert found["bad_words"] == bad_word_ids(["cat"], harness.tokenizer)
    assert found["allowed_token_ids"] == [5, 6] and "grammar" in found
    nothing = GOOD | {"bad_words": [], "allowed_token_ids": []}
    assert (await harness.http().post("/v1/completions", json=nothing)).status_code == 200


def test_bad_words_at_a_start_and_after_a_space(tokenizer: Tokenizer) -> None:
    found = bad_word_ids([" cat", "x"], tokenizer)
    assert tokenizer.encode("cat", add_special_tokens=False) in found
    for ids in found:
        assert tokenizer.decode(ids).strip() in ("cat", "x")

    class Words:
        """A tokenizer that has a token for a word with its space, as BPE's do."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            table = {"cat": [1], " cat": [2], "dog": [3], " dog": [4, 3], "-x": [5, 6], " -x": [5]}
            return table[text]

    words: Any = Words()
    assert bad_word_ids(["cat", " dog", "-x"], words) == [[1], [2], [3], [5, 6]]


async def test_without_a_worker_that_enforces_grammars(make: Make) -> None:
    harness = await make(1, 1).start()
    http = harness.http()
    answer = await http.post("/v1/completions", json=GOOD | {"guided_regex": "a"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
    assert error["param"] == "guided_regex" and "llguidance" in error["message"]
    assert (await http.post("/v1/completions", json=GOOD)).status_code == 200


async def test_grammars_go_only_where_they_are_enforced(make: Make) -> None:
    harness = make(1, 2)
    harness.decodes[1].grammar_engine = "llguidance 1.9.1"
    await harness.start()
    for _ in range(4):
        answer = await harness.http().post("/v1/completions", json=GOOD | {"guided_regex": "a"})
        assert answer.status_code == 200
    assert len(harness.decodes[1].submits()) == 4  # whole: the prefill worker enforces nothing
    assert not harness.prefills[0].submits() and not harness.decodes[0].submits()
    harness.decodes[1].die()
    for _ in range(100):
        if len(harness.fleet.workers) == 2:
            break
        await asyncio.sleep(0.01)
    answer = await harness.http().post("/v1/completions", json=GOOD | {"guided_regex": "a"})
    assert answer.status_code == 400


async def test_what_outlasts_a_drain_goes_where_its_grammar_is_enforced(make: Make) -> None:
    """With the same grammar, and the tokens that the answer has. The worker without an engine has
    nothing to do, and does not get it."""
    harness = make(0, 3, drain_s=0.0)
    for decode in harness.decodes[:2]:
        decode.grammar_engine = "llguidance 1.9.1"
    for decode in harness.decodes:
        decode.step_s = 0.01
    await harness.start()
    body = GOOD | {"guided_regex": "[ab]+", "max_tokens": 40, "min_tokens": 40}
    asking = asyncio.create_task(harness.http().post("/v1/completions", json=body))
    await until(lambda: any(worker.num_batches > 5 for worker in harness.decodes))
    first, second = sorted(harness.decodes[:2], key=lambda worker: not worker.submits())
    first.going.clear()
    harness.fleet.leave(first.worker_id)
    await until(lambda: second.submits())
    first.going.set()
    answer = await asking
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 40
    [resumed] = second.submits()
    assert all(len(start.forced) > 5 for start in resumed.starts)
    assert accepts(rules_of(harness)["grammar"], "abba")
    assert not harness.decodes[2].submits()


def test_a_worker_without_an_engine_is_not_usable() -> None:
    worker = workers.made("w")
    assert usable(worker, Demand(20, 30))
    assert not usable(worker, Demand(20, 30, needs_grammar=True))


async def test_the_loop_does_not_wait_for_hostile_grammars(make: Make) -> None:
    harness = await started(make)
    http = harness.http()
    properties = {f"p{i}": {"type": "string"} for i in range(1200)}
    await http.post("/v1/completions", json=GOOD | {"guided_regex": "warm"})
    bodies = [
        GOOD | {"guided_json": {"type": "object", "properties": properties, "title": str(i)}}
        for i in range(4)
    ]
    data = [json.dumps(body) for body in bodies]
    longest_work = longest = 0.0
    answers = asyncio.gather(*(http.post("/v1/completions", content=text) for text in data))
    while not answers.done():
        began, worked = time.perf_counter(), time.thread_time()
        await asyncio.sleep(0)
        longest_work = max(longest_work, time.thread_time() - worked)
        longest = max(longest, time.perf_counter() - began)
    assert all(answer.status_code == 200 for answer in await answers)
    # of the loop's thread; building one of them takes longer
    assert longest_work < 0.1
    assert longest < 2.0  # of a machine that others use too


async def test_the_python_handle_takes_the_same(make: Make) -> None:
    call = _call("hi", SamplingParams(), False, {"structured_outputs": {"choice": ["a", "b"]}})
    assert call.structured_outputs == {"choice": ["a", "b"]}
    with pytest.raises(ValueError, match="structured_outputs must be of type dict"):
        _call("hi", None, False, {"structured_outputs": "a"})


async def test_grammars_of_tools_are_checked_too(make: Make) -> None:
    harness = await started(make)
    form = CALL_FORMATS["hermes"].form
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    found = await harness.service.tool_rules(tools_grammar(form, tools, "required"))
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert accepts(found.settings["grammar"], call) and found.unenforced == ("not",)
    text = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": text}}]
    plain = CALL_FORMATS["qwen3-coder"].form
    found = await harness.service.tool_rules(tools_grammar(plain, tools, "required"))
    assert found.unenforced == ("format:date",)
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}}]
    with pytest.raises(ApiError) as caught:
        await harness.service.tool_rules(tools_grammar(form, bad))
    assert (caught.value.status, caught.value.code) == (400, "invalid_grammar")
    assert (caught.value.param or "").startswith("tools")


def test_rules_are_added_once() -> None:
    sampling = SamplingParams(max_tokens=3).with_rules({"grammar": "start: /a/"})
    assert sampling.logit_rules == {"grammar": "start: /a/"} and sampling.max_tokens == 3
    with pytest.raises(ValueError, match="logit_rules holds grammar already"):
        sampling.with_rules({"grammar": "start: /b/"})
    with pytest.raises(ValueError, match="grammar is empty"):
        SamplingParams().with_rules({"grammar": ""})


async def test_a_known_grammar_needs_no_process(make: Make) -> None:
    harness = await started(make)
    http = harness.http()
    body = GOOD | {"response_format": FORMAT}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    await asyncio.to_thread(shared_checker().close)
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert not shared_checker().is_started


async def test_the_largest_is_told_when_too_many_wait(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await started(make)
    await asyncio.to_thread(shared_checker().start)
    monkeypatch.setattr(shared_checker()._line, "_max_waiting", 0)  # none may wait
    answer = await harness.http().post("/v1/completions", json=GOOD | {"guided_regex": "b"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("overloaded", "rate_limit_error")
    assert "try again in a moment, or send a smaller one" in error["message"]


async def test_a_grammar_of_the_clients_own_is_tried_before_a_worker_hears_of_it(
    make: Make,
) -> None:
    harness = await started(make)
    http = harness.http()
    good = await http.post("/v1/completions", json=GOOD | {"logit_rules": {"grammar": LARK}})
    assert good.status_code == 200
    num_sent = len(harness.prefills[0].submits())
    for text in ("start: (", 'start: "a" missing'):
        answer = await http.post("/v1/completions", json=GOOD | {"logit_rules": {"grammar": text}})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "invalid_grammar", text
        assert error["param"] == "logit_rules" and error["message"].startswith("logit_rules cannot")
    assert len(harness.prefills[0].submits()) == num_sent
