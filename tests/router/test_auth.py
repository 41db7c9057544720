"""API keys: who may ask, what is never told, how keys change while the router runs, who shares
cached prefixes."""

import asyncio
import hmac
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import ValidationError
from router.harness import MODEL, Harness

from pdserve.configs.router import RouterConfig
from pdserve.configs.schema import ClusterConfig
from pdserve.router.errors import ApiError
from pdserve.router.http.access import auth
from pdserve.router.http.access.auth import ApiKeys

Make = Callable[..., Harness]
GOOD = {"model": MODEL, "prompt": [5, 6], "max_tokens": 2}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SOME_KEYS", "first-key, second-key,")
    return "SOME_KEYS"


async def test_who_has_no_key_gets_nothing_but_an_error(make: Make, variable: str) -> None:
    harness = await make(0, 1, api_key_env=variable).start()
    http = harness.http()
    posts: list[tuple[str, Any]] = [("/v1/completions", GOOD), ("/v1/chat/completions", CHAT)]
    wrong: list[dict[str, str]] = [
        {},
        bearer("third-key"),
        bearer("first-ke"),
        bearer("first-keyx"),
        bearer(""),
        bearer("first-key,second-key"),
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
        {"Authorization": b"Bearer \xff\xfe"},  # type: ignore[dict-item]
    ]
    for headers in wrong:
        answers = [await http.post(path, json=body, headers=headers) for path, body in posts]
        answers += [
            await http.get(path, headers=headers) for path in ("/v1/models", f"/v1/models/{MODEL}")
        ]
        for answer in answers:
            error = answer.json()["error"]
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert "Authorization: Bearer" in error["message"] and "-key" not in error["message"]
    assert not harness.decodes[0].submits()
    for key in ("first-key", "second-key"):
        for path, body in posts:
            assert (await http.post(path, json=body, headers=bearer(key))).status_code == 200
    assert (
        await http.get("/v1/models", headers={"authorization": "bearer  first-key "})
    ).status_code == 200
    page = (await http.get("/metrics")).text
    count = len(wrong) * 4
    assert (
        f'pdserve_router_rejections_total{{reason="invalid_api_key",status="401"}} {count}.0'
        in page
    )


async def test_a_body_without_a_key_is_not_read(make: Make, variable: str) -> None:
    harness = await make(0, 1, api_key_env=variable, max_body_bytes=1024).start()
    answer = await harness.http().post("/v1/completions", content=b"x" * 5000)
    assert answer.status_code == 401


async def test_openais_client_and_its_errors(make: Make, variable: str) -> None:
    harness = await make(0, 1, api_key_env=variable).start()
    client: Any = harness.http()
    for key, is_right in (("second-key", True), ("x", False)):
        api = openai.AsyncOpenAI(
            api_key=key, base_url="http://router/v1", http_client=client, max_retries=0
        )
        params: Any = {
            "model": MODEL,
            "messages": CHAT["messages"],
            "max_tokens": 3,
            "stream": True,
        }
        if is_right:
            assert [chunk async for chunk in await api.chat.completions.create(**params)]
            assert [model.id for model in (await api.models.list()).data] == [MODEL]
        else:
            with pytest.raises(openai.AuthenticationError) as caught:
                await api.chat.completions.create(**params)
            assert caught.value.code == "invalid_api_key"


async def test_what_is_open(make: Make, variable: str) -> None:
    harness = await make(0, 1, api_key_env=variable).start()
    for path in ("/health", "/live", "/metrics", "/openapi.json"):
        assert (await harness.http().get(path)).status_code == 200
    assert (await harness.http().get("/ready")).status_code == 503, "it wants no key, but a P"
    closed = await make(0, 1, api_key_env=variable, metrics_need_key=True).start()
    http = closed.http()
    assert (await http.get("/metrics")).status_code == 401
    assert (await http.get("/metrics", headers=bearer("first-key"))).status_code == 200
    assert "security" in (await http.get("/openapi.json")).json()["paths"]["/metrics"]["get"]


async def test_without_keys_everybody_may_ask_with_any_header(make: Make) -> None:
    harness = await make(0, 1).start()
    assert (
        await harness.http().post("/v1/completions", json=GOOD, headers=bearer("whatever"))
    ).status_code == 200


def test_every_key_is_compared_each_time_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare_digest = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare_digest(a, b)

    keys = ApiKeys(RouterConfig(api_key_env="K"), {"K": "aaa,bbb,ccc"})
    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    tags = {keys.check(f"Bearer {key}") for key in ("aaa", "bbb", "ccc")}
    with pytest.raises(ApiError):
        keys.check("Bearer a-much-longer-key-than-the-others")
    assert len(compared) == 4 * 3 and len(tags) == 3
    assert {len(side) for pair in compared for side in pair} == {32}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_changed_file_counts_within_a_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    clock = Clock()
    file.write_text("# operators\n\n  old-key  \n")
    file.chmod(0o600)
    with caplog.at_level(logging.INFO):
        keys = ApiKeys(RouterConfig(api_keys_file=str(file)), {}, clock)
        assert not caplog.text
        keys.check("Bearer old-key")
        (tmp_path / "new").write_text("old-key\nnew-key\n")
        os.replace(tmp_path / "new", file)
        with pytest.raises(ApiError):
            keys.check("Bearer new-key")
        clock.now += 1.0
        keys.check("Bearer new-key")
        for broken in ("", "# nothing\n", "a key with spaces\n"):
            file.write_text(broken)
            clock.now += 1.0
            keys.check("Bearer new-key")
        file.unlink()
        clock.now += 1.0
        keys.check("Bearer old-key")
        file.write_text("third-key")
        clock.now += 1.0
        keys.check("Bearer third-key")
        for gone in ("old-key", "new-key", "# nothing"):
            with pytest.raises(ApiError):
                keys.check(f"Bearer {gone}")
    assert "stay as they were" in caplog.text
    assert not any(key in caplog.text for key in ("old-key", "new-key", "third-key", "a key with"))


def test_a_file_that_others_can_read_is_remarked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("a-key\n")
    file.chmod(0o644)
    ApiKeys(RouterConfig(api_keys_file=str(file)), {})
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize(
    ("environment", "text", "complaint"),
    [
        ({}, None, "variable K is not set"),
        ({"K": " , "}, None, "variable K is not set"),
        ({"K": "good,my secret"}, None, "variable K, key 2: a key must be printable"),
        ({"K": "good,\u00e9secret"}, None, "key 2"),
        ({"K": "good"}, "", "holds no key"),
        ({"K": "good"}, "fine\nmy secret\n", "line 2"),
    ],
)
def test_bad_keys_are_named_by_their_place_alone(
    tmp_path: Path, environment: dict[str, str], text: str | None, complaint: str
) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    config = RouterConfig(api_key_env="K", api_keys_file=None if text is None else str(file))
    with pytest.raises(ValueError) as caught:
        ApiKeys(config, environment)
    assert complaint in str(caught.value) and "secret" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        ApiKeys(RouterConfig(api_keys_file=str(tmp_path / "x")), {})


@pytest.mark.parametrize(
    "router",
    [
        {"api_key": "sk-secret"},
        {"api_keys": ["sk-secret"]},
        {"api_key_env": "sk-secret"},
        {"api_key_env": ["sk-secret"]},
        {"api_keys_file": ["sk-secret"]},
        {"api_keys_file": "sk-secret"},
    ],
)
def test_keys_in_the_yaml_are_refused_and_not_repeated(router: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ClusterConfig.model_validate({"router": router})
    assert (
        "sk-secret" not in str(caught.value) and "sk-secret" not in caught.value.errors()[0]["msg"]
    )
    assert "api_keys_file" in str(caught.value)


def test_options_that_need_keys() -> None:
    for name in ("salt_by_key", "metrics_need_key"):
        with pytest.raises(ValidationError, match="needs API keys"):
            RouterConfig(**{name: True})


async def test_each_key_has_its_own_cached_prefixes(make: Make, variable: str) -> None:
    async def salts(**config: Any) -> list[str]:
        harness = await make(0, 1, api_key_env=variable, **config).start()
        for key, salt in (
            ("first-key", None),
            ("second-key", None),
            ("first-key", "s"),
            ("first-key", "s"),
        ):
            body = GOOD | ({"cache_salt": salt} if salt else {})
            await harness.http().post("/v1/completions", json=body, headers=bearer(key))
        await harness.http().post("/v1/chat/completions", json=CHAT, headers=bearer("first-key"))
        return [submit.cache_salt for submit in harness.decodes[0].submits()]

    assert await salts() == ["", "", "s", "s", ""]
    first, second, *salted, chat = await salts(salt_by_key=True)
    assert (
        first
        and first == chat
        and first != second
        and salted[0] == salted[1] not in (first, second)
    )
    assert not any("key" in salt for salt in (first, second, *salted))
    assert [first, second, *salted, chat] == await salts(salt_by_key=True), (
        "the same on every router"
    )


async def test_keys_are_in_no_log_timeline_or_metric(
    make: Make, variable: str, caplog: pytest.LogCaptureFixture
) -> None:
    harness = await make(0, 1, api_key_env=variable, salt_by_key=True).start()
    http = harness.http()
    shown = ""
    with caplog.at_level(logging.DEBUG):
        for key in ("first-key", "second-kez"):
            headers = bearer(key) | {"x-pdserve-timeline": "1"}
            shown += (await http.post("/v1/completions", json=GOOD, headers=headers)).text
        harness.decodes[0].fail_submit = lambda submit: "internal"
        shown += (await http.post("/v1/completions", json=GOOD, headers=bearer("first-key"))).text
        shown += (await http.get("/metrics")).text
        await asyncio.sleep(0.01)
    assert '"timeline"' in shown and "timeline of" in caplog.text
    assert not any(key in shown + caplog.text for key in ("first-key", "second-ke"))
