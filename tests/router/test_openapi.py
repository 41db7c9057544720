"""The OpenAPI document tells the truth: schemathesis sends what it allows and what it forbids, over
HTTP, to the app with fake workers. Bounded: the same examples every time, so many an operation."""

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from router.harness import MODEL, Harness

from pdserve.cluster.deployments.http_server import Address, HttpServer
from pdserve.configs.embedding import EmbeddingModel
from pdserve.configs.router import RouterConfig
from pdserve.router.http.embeddings.requests import EmbeddingRequest
from pdserve.router.http.messages.requests import CountRequest, MessagesRequest
from pdserve.router.http.openai.requests import ChatRequest, CompletionRequest
from pdserve.router.http.openapi.document import openapi_document
from pdserve.router.http.request_form import RequestForm
from pdserve.router.http.responses.requests import ResponsesRequest
from pdserve.router.http.tokenizing.requests import DetokenizeRequest, TokenizeRequest
from pdserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.lengthy

# the requests of each endpoint
PATHS: dict[type[RequestForm], str] = {
    CompletionRequest: "/v1/completions",
    ChatRequest: "/v1/chat/completions",
    ResponsesRequest: "/v1/responses",
    MessagesRequest: "/v1/messages",
    CountRequest: "/v1/messages/count_tokens",
    TokenizeRequest: "/tokenize",
    DetokenizeRequest: "/detokenize",
    EmbeddingRequest: "/v1/embeddings",
}

schemathesis = pytest.importorskip("schemathesis", reason="pip install -e '.[dev]'")

NUM_EXAMPLES = 50
KEY = "a-key-for-the-tests"
OPERATIONS = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/responses/input_tokens", "POST"),
    ("/v1/responses/{name}", "GET"),
    ("/v1/responses/{name}", "DELETE"),
    ("/v1/responses/{name}/input_items", "GET"),
    ("/v1/responses/{name}/cancel", "POST"),
    ("/v1/embeddings", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/tokenizer_info", "GET"),
    ("/ping", "GET"),
    ("/version", "GET"),
    ("/load", "GET"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/health", "GET"),
    ("/live", "GET"),
    ("/ready", "GET"),
    ("/metrics", "GET"),
    ("/openapi.json", "GET"),
]


class _Server(threading.Thread):
    """The app of a harness behind its own HTTP server, on its own event loop; and that of one whose
    model embeds."""

    def __init__(self, tokenizer: Tokenizer, config: RouterConfig) -> None:
        super().__init__(daemon=True)
        self._tokenizer = tokenizer
        self._config = config
        self.ready = threading.Event()
        self.port = 0
        self._embedding_port = 0

    def url_of(self, path: str) -> str:
        port = self._embedding_port if path == "/v1/embeddings" else self.port
        return f"http://127.0.0.1:{port}"

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        parts = self._tokenizer, self._config, 1, 1, 0.3
        harness = await Harness(*parts).start()
        embedding = await Harness(*parts, embedding=EmbeddingModel(size=8)).start()
        servers = [HttpServer(h.app, Address("127.0.0.1", 0), 60) for h in (harness, embedding)]
        for server in servers:
            server.start()
        self.harness = harness
        self.port, self._embedding_port = (server.port for server in servers)
        self.ready.set()
        await self._ending.wait()
        for server in servers:
            await server.close()
        await harness.fleet.close()
        await embedding.fleet.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self.join(60)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[_Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEYS_OF_THE_TEST", KEY)
        thread = _Server(
            tokenizer, RouterConfig(api_key_env="KEYS_OF_THE_TEST", worker_silence_s=3600)
        )
        thread.start()
        assert thread.ready.wait(60)
        yield thread
        thread.stop()


def check(
    server: _Server, document: dict[str, Any], path: str, method: str, mode: str, *without: Any
) -> Counter[int]:
    """Send examples and check the answers against the document. How many of them had which
    status."""
    url = server.url_of(path)
    statuses = Counter[int]()
    operation = schemathesis.openapi.from_dict(document)[path][method]

    @settings(
        max_examples=NUM_EXAMPLES if method == "POST" else 8,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(schemathesis.GenerationMode(mode)))
    def send(case: Any) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = case.call_and_validate(
            base_url=url, headers=headers, excluded_checks=list(without), timeout=120
        )
        statuses[answer.status_code] += 1

    # before 3.11.8 a collection within ast.parse, in two threads, is a SystemError:
    # python/cpython#106905
    gc.disable()
    try:
        send()
    finally:
        gc.enable()
    assert not [status for status in statuses if status >= 500]
    return statuses


def document_of(server: _Server) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"http://127.0.0.1:{server.port}/openapi.json").json()
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_what_the_document_allows_is_answered_as_it_says(
    server: _Server, path: str, method: str
) -> None:
    """Not always with 200: what depends on two fields or on the model is refused, which is
    documented too."""
    without = [schemathesis.checks.positive_data_acceptance] if method == "POST" else []
    check(server, document_of(server), path, method, "positive", *without)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("path", "method"),
    [found for found in OPERATIONS if found[1] == "POST" and not found[0].endswith("/cancel")],
)
def test_what_the_document_forbids_is_refused(server: _Server, path: str, method: str) -> None:
    statuses = check(server, document_of(server), path, method, "negative")
    assert statuses[400] > NUM_EXAMPLES / 4  # the others had a wrong header of another kind


# What depends on two fields, on the model and its template
NARROWER: dict[str, Any] = {
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"enum": [3, 99, 402]}, "minItems": 1},
        ]
    },
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {
            "type": "object",
            "properties": {
                "role": {"enum": ["system", "developer", "user"]},
                "content": {"type": "string", "maxLength": 9},
            },
            "required": ["role", "content"],
        },
    },
    "input": {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": 9},
            {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {"role": {"enum": ["user"]}, "content": {"enum": ["a", "b"]}},
                    "required": ["role", "content"],
                },
            },
        ]
    },
    "text": {"enum": [None, {}, {"format": {"type": "text"}, "verbosity": "medium"}]},
    "reasoning": {"enum": [None, {}, {"effort": "none"}, {"summary": "auto"}]},
    "max_output_tokens": {"enum": [None, 2, 9]},
    "system": {"enum": [None, "", "Be brief.", [{"type": "text", "text": "Be brief."}]]},
    "max_tokens": {"enum": [None, 2, 9]},
    "min_tokens": {"enum": [None, 0, 2]},
    "n": {"enum": [None, 1, 3]},
    "logit_bias": {"enum": [None, {}, {"7": -1.5}]},
    "stop_token_ids": {"enum": [None, [], [8, 402]]},
    "allowed_token_ids": {"enum": [None, [8, 402]]},
    "logit_rules": {"enum": [None, {}, {"bad_words": [[8], [9, 8]]}]},
}
LEFT_OUT = (
    *("best_of", "prompt_logprobs", "max_completion_tokens"),
    *("tools", "tool_choice", "chat_template_kwargs", "documents", "reasoning_effort"),
    *("thinking_token_budget", "continue_final_message", "thinking", "output_config"),
    *("output_format", "truncate_prompt_tokens"),
    "logit_rules",  # each rule's settings have a form of their own
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "guided_whitespace_pattern", "bad_words", "allowed_token_ids"),
)


def chat(server: _Server, **fields: Any) -> int:
    """The status of a chat request with these fields."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        **fields,
    }
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    return httpx.post(url, json=body, headers={"Authorization": f"Bearer {KEY}"}).status_code


TOOL = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fields", "is_allowed"),
    [
        ({"stream_options": {"include_usage": True}}, False),
        ({"stream_options": {"include_usage": True}, "stream": True}, True),
        ({"stream_options": None}, True),
        ({"top_logprobs": 2}, False),
        ({"top_logprobs": 2, "logprobs": True}, True),
        ({"top_logprobs": 0}, True),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, True),
        ({"tool_choice": "auto", "tools": [TOOL]}, True),
        ({"tool_choice": ALLOWED, "tools": [TOOL]}, True),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": [TOOL]},
            False,
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, False),
        ({"response_format": {"type": "json_schema"}}, False),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, False),
        ({"response_format": {"type": "xml"}}, False),
        ({"response_format": SCHEMA}, True),
        ({"response_format": SCHEMA | {"schema": {}}}, False),
        ({"response_format": SCHEMA | {"schema": None}}, True),
        ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, True),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, False),
        ({"structured_outputs": {"yaml": 1}}, False),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, True),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": 1}}, False),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, False),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": False}}, True),
        ({"structured_outputs": {"disable_additional_properties": True}}, False),
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, False),
        ({"structured_outputs": {"choice": ["a"], "regex": None}}, True),
        ({"structured_outputs": {"choice": ["a"], "json_object": False}}, True),
        ({"structured_outputs": {"json_object": None}}, True),
        ({"structured_outputs": {}}, True),
        ({"structured_outputs": {"choice": ["a"], "whitespace_pattern": "x"}}, False),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, True),
    ],
    ids=str,
)
def test_rules_about_several_fields_are_schemas(
    server: _Server, fields: dict[str, Any], is_allowed: bool
) -> None:
    document = document_of(server)
    schema = document["components"]["schemas"]["ChatRequest"]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
    validator = jsonschema.Draft202012Validator(schema | {"components": document["components"]})
    assert validator.is_valid(body) == is_allowed
    forms = {"response_format", "structured_outputs", "tools"} & set(fields)
    if not (forms and is_allowed):  # these workers enforce nothing and know no tools
        assert (chat(server, **fields) == 200) == is_allowed


@pytest.mark.parametrize(
    ("fields", "is_allowed"),
    [
        ({"top_logprobs": 2}, False),
        ({"top_logprobs": 2, "include": None}, False),
        ({"top_logprobs": 2, "include": ["reasoning.encrypted_content"]}, False),
        ({"top_logprobs": 2, "include": ["message.output_text.logprobs"]}, True),
        ({"top_logprobs": 0}, True),
        ({"stream_options": {"include_obfuscation": False}}, False),
        ({"stream_options": {"include_obfuscation": False}, "stream": True}, True),
    ],
    ids=str,
)
def test_rules_about_two_fields_of_responses_are_schemas(
    server: _Server, fields: dict[str, Any], is_allowed: bool
) -> None:
    document = document_of(server)
    schema = document["components"]["schemas"]["ResponsesRequest"]
    body = {"model": MODEL, "input": "x", "max_output_tokens": 2, **fields}
    validator = jsonschema.Draft202012Validator(schema | {"components": document["components"]})
    assert validator.is_valid(body) == is_allowed
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"http://127.0.0.1:{server.port}{PATHS[ResponsesRequest]}"
    answer = httpx.post(url, json=body, headers=headers)
    assert (answer.status_code == 200) == is_allowed, answer.text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", PATHS)
def test_all_the_rest_that_it_allows_is_taken(server: _Server, kind: type[RequestForm]) -> None:
    document = document_of(server)
    properties = document["components"]["schemas"][kind.__name__]["properties"]
    required = document["components"]["schemas"][kind.__name__].get("required", [])
    narrower = deepcopy(NARROWER)
    if kind is TokenizeRequest:  # a text or a conversation
        properties.pop("messages")
        document["components"]["schemas"][kind.__name__]["required"] = ["prompt"]
        narrower["prompt"] = {"type": "string"}
    if kind is DetokenizeRequest:
        narrower["tokens"] = {"type": "array", "items": {"enum": [3, 99, 400]}}
    if kind is EmbeddingRequest:
        narrower["input"] = narrower["prompt"]
        narrower["dimensions"] = {"enum": [None, 1, 8]}
    if kind in (ResponsesRequest, MessagesRequest, CountRequest):
        narrower["n"] = {"enum": [None, 1]}
    properties |= {name: schema for name, schema in narrower.items() if name in properties}
    for name in (*LEFT_OUT, *(["echo"] if kind is ChatRequest else [])):
        properties.pop(name, None)
    if kind in (MessagesRequest, CountRequest):  # further members and other roles are refused
        message = properties["messages"]["items"] | {"additionalProperties": False}
        message["properties"] |= {"role": {"enum": ["system", "user"]}}
        properties["messages"] |= {"items": message}
    if kind is MessagesRequest:  # where it must be there
        properties["max_tokens"] = {"enum": [2, 9]}
    integers = [
        name
        for name, schema in properties.items()
        if {"type": "integer"}.items() <= schema.items() and name not in required
    ]
    assert not integers, "all integers may be null"
    assert check(server, document, PATHS[kind], "POST", "positive")[200] > NUM_EXAMPLES / 2


def test_the_document_names_every_field_and_the_configured_limits() -> None:
    config = RouterConfig(max_n=7, max_logprobs=3)
    document = openapi_document(config, MODEL, needs_key=False)
    assert "security" not in document["paths"]["/v1/completions"]["post"]
    for kind in PATHS:
        properties = document["components"]["schemas"][kind.__name__]["properties"]
        assert set(properties) == {*kind.__struct_fields__, *kind.ignored, *kind.neutral}
    for kind in (CompletionRequest, ChatRequest):
        properties = document["components"]["schemas"][kind.__name__]["properties"]
        assert {"type": "integer", "minimum": 1, "maximum": 7} in properties["n"]["anyOf"]
        assert {"type": "integer", "minimum": 0, "maximum": 3} in properties["prompt_logprobs"][
            "anyOf"
        ]
    own = ResponsesRequest
    properties = document["components"]["schemas"]["ResponsesRequest"]["properties"]
    assert set(properties) == {*own.__struct_fields__, *own.ignored, *own.neutral}
    assert {"type": "integer", "minimum": 0, "maximum": 3} in properties["top_logprobs"]["anyOf"]


def test_descriptions_are_prose_without_the_breaks_of_a_docstring() -> None:
    schemas = openapi_document(RouterConfig(), MODEL, needs_key=False)["components"]["schemas"]
    for kind in PATHS:
        assert "\n" in (kind.__doc__ or ""), "it is long enough to tell"
        assert "\n" not in schemas[kind.__name__]["description"]


def test_parameters_that_a_chat_template_is_given_anyway_cannot_be_set(server: _Server) -> None:
    for name in ("messages", "tools", "self", "add_generation_prompt"):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            "chat_template_kwargs": {name: 1},
        }
        url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers={"Authorization": f"Bearer {KEY}"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (
            400,
            "chat_template_kwargs",
        )
