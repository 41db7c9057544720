"""Errors of /v1/messages, in Anthropic's form for each status; keys; and paths that are none."""

from collections.abc import Callable
from typing import Any

import pytest
from router.harness import Harness, until
from router.messages_client import ASK, BODY, COUNT, PATH

from pdserve.router.errors import ApiError
from pdserve.router.http.messages.errors import error_body, renamed

Make = Callable[..., Harness]
COUNTED = {"model": BODY["model"], "messages": ASK}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error")),
        *((404, "not_found_error"), (405, "invalid_request_error"), (408, "invalid_request_error")),
        *((413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error")),
        *((503, "overloaded_error"), (529, "overloaded_error")),
    ],
)
def test_the_type_follows_from_the_status(status: int, kind: str) -> None:
    assert error_body(ApiError("no", status=status), "r1") == {
        "type": "error",
        "error": {"type": kind, "message": "no"},
        "request_id": "r1",
    }


@pytest.mark.parametrize(
    ("message", "param", "shown"),
    [
        (
            "tools[3].function.parameters.type must be",
            "tools",
            "tools[3].input_schema.type must be",
        ),
        ("tools[0].function.name must", "tools[0].function.name", "tools[0].name must"),
        ("stop must hold", "stop", "stop_sequences must hold"),
        ("stop_token_ids must hold", "stop_token_ids", "stop_token_ids must hold"),
        ("too long", "messages", "messages: too long"),
        ("thinking_token_budget cannot", "thinking_token_budget", "thinking.budget_tokens cannot"),
        ("no field", None, "no field"),
    ],
)
def test_messages_begin_with_the_field_as_clients_call_it(
    message: str, param: str | None, shown: str
) -> None:
    error = renamed(ApiError(message, param=param))
    assert error_body(error, "")["error"]["message"] == shown


async def test_keys_come_as_anthropics_clients_send_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEYS", "first-key")
    harness = await make(1, 1, api_key_env="SOME_KEYS").start()
    http = harness.http()
    unknown = f"{PATH}/batches"
    for path, body in ((PATH, BODY), (COUNT, COUNTED), (unknown, {})):
        for headers in ({}, {"x-api-key": "other"}, {"x-api-key": ""}):
            answer = await http.post(path, json=body, headers=headers)
            assert answer.status_code == 401
            error = answer.json()["error"]
            assert error["type"] == "authentication_error" and "x-api-key" in error["message"]
            assert "first" not in answer.text
        for headers in ({"x-api-key": "first-key"}, {"Authorization": "Bearer first-key"}):
            answer = await http.post(path, json=body, headers=headers)
            assert answer.status_code == (404 if path == unknown else 200), answer.text
    assert len(harness.prefills[0].submits()) == 2


async def test_paths_and_methods_that_are_none(make: Make) -> None:
    http = (await make(0, 1).start()).http()
    for method, path, status, says in (
        ("GET", PATH, 405, "send POST"),
        ("DELETE", COUNT, 405, "send POST"),
        ("POST", f"{PATH}/batches", 404, "one by one"),
        ("GET", f"{PATH}/batches/x/results", 404, COUNT),
    ):
        answer = await http.request(method, path)
        assert answer.headers.get("allow") == ("POST" if status == 405 else None)
        found = answer.json()
        assert answer.status_code == status and found["type"] == "error"
        assert says in found["error"]["message"] and path in found["error"]["message"]
        assert found["request_id"] == answer.headers["request-id"]


async def test_refusals_that_pass_come_with_retry_after(make: Make) -> None:
    harness = await make(0, 1, max_concurrent_prompts=1).start()
    http = harness.http()
    harness.service.admission.num_prompts += 1
    for path, body in ((PATH, BODY), (COUNT, COUNTED)):
        answer = await http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1
    harness.service.admission.num_prompts -= 1
    harness.decodes[0].die()
    await until(lambda: not harness.fleet.worker_ids)
    for path, body in ((PATH, BODY), (COUNT, COUNTED)):
        answer = await http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
        assert answer.headers["retry-after"] == "1"


async def test_a_body_that_is_too_large_or_no_json(make: Make) -> None:
    http = (await make(0, 1, max_body_bytes=2000).start()).http()
    for path in (PATH, COUNT):
        large = await http.post(path, content=b"x" * 5000)
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        for content in (b"{", b"[]", b"\xff"):
            answer = await http.post(path, content=content)
            assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]


async def test_the_name_of_a_request_is_the_clients(make: Make) -> None:
    http = (await make(0, 1).start()).http(headers={"x-request-id": "mine"})
    answer = await http.post(PATH, json=BODY)
    assert answer.json()["id"] == "msg_mine" and answer.headers["request-id"] == "mine"
    wrong: Any = {"x-request-id": "a b"}
    for path, body in ((PATH, BODY), (COUNT, COUNTED)):
        refused = await http.post(path, json=body, headers=wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("x-request-id")
