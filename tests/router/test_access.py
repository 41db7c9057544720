"""From where a server may be asked: kinds of bodies, names of this server, pages of other origins,
a proxy's prefix, and methods."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from router.harness import MODEL, Harness

from pdserve.configs.router import RouterConfig
from pdserve.router.http.access.hosts import is_loopback
from pdserve.router.http.app import build_app

Make = Callable[..., Harness]
GOOD = b'{"model": "demo", "prompt": [5, 6], "max_tokens": 2}'
PAGE = "https://chat.example.org"


def over_loopback(harness: Harness, host: str | None) -> httpx.AsyncClient:
    """A client of the same router as if its server listened on loopback."""
    config = harness.service.config
    app = build_app(
        harness.fleet, harness.tokenizer, config, MODEL, harness.service, on_loopback=True
    )
    headers = {"content-type": "application/json"} | ({} if host is None else {"host": host})
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://router", headers=headers)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
        *("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize"),
    ],
)
@pytest.mark.parametrize(
    "kind",
    [
        *("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"),
        *("application/jsonx", "text/json"),
    ],
)
async def test_a_body_that_is_not_said_to_be_json_is_refused(
    make: Make, path: str, kind: str
) -> None:
    harness = await make(1, 1).start()
    http = harness.http()
    http.headers.pop("content-type")
    answer = await http.post(path, content=GOOD, headers={"content-type": kind} if kind else {})
    assert answer.status_code == 415
    assert "content-type: application/json" in answer.json()["error"]["message"]
    assert (kind or "no content type") in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"],
)
async def test_json_by_any_of_its_names_is_taken(make: Make, kind: str) -> None:
    harness = await make(1, 1).start()
    answer = await harness.http().post(
        "/v1/completions", content=GOOD, headers={"content-type": kind}
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", {"POST"}),
        ("PUT", "/v1/chat/completions", {"POST"}),
        ("DELETE", "/v1/messages", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("GET", "/tokenize", {"POST"}),
        ("PUT", "/ping", {"GET", "HEAD", "POST"}),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(
    make: Make, method: str, path: str, allow: set[str]
) -> None:
    harness = await make(1, 1).start()
    answer = await harness.http().request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].replace(" ", "").split(",")) == allow
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("LOCALHOST.:8000", 200),
        ("127.0.0.1:8000", 200),
        ("127.8.8.8", 200),
        ("[::1]:8000", 200),
        ("pages.localhost:8000", 200),
        ("evil.example.org", 403),
        ("evil.example.org:8000", 403),
        ("127.0.0.1.evil.example.org", 403),
        ("localhost.evil.example.org:8000", 403),
        ("10.0.0.7:8000", 403),
        ("[2001:db8::1]:8000", 403),
        ("localhost@evil", 403),
        ("", 403),
    ],
)
async def test_a_server_on_loopback_knows_its_names(make: Make, host: str, status: int) -> None:
    harness = await make(1, 1).start()
    async with over_loopback(harness, host) as http:
        for path in ("/v1/models", "/health", "/v1/models"):
            answer = await http.get(path)
            assert answer.status_code == status, (path, answer.text)
        answer = await http.post("/v1/completions", content=GOOD)
        assert answer.status_code == status
        if status == 403:
            error = answer.json()["error"]
            assert error["code"] == "host_not_allowed"
            assert "router.allowed_hosts" in error["message"] and "localhost" in error["message"]
        assert len(harness.prefills[0].submits()) == (1 if status == 200 else 0)


async def test_other_names_may_be_allowed(make: Make) -> None:
    harness = await make(1, 1, allowed_hosts=["models.example.org"]).start()
    for host, status in (
        ("models.example.org:8000", 200),
        ("Models.Example.org", 200),
        ("localhost", 200),
        ("evil.models.example.org", 403),
    ):
        async with over_loopback(harness, host) as http:
            assert (await http.get("/v1/models")).status_code == status
    any_name = await make(1, 1, allowed_hosts=["*"]).start()
    async with over_loopback(any_name, "evil.example.org") as http:
        assert (await http.get("/v1/models")).status_code == 200


async def test_a_server_for_others_is_asked_by_any_name(make: Make) -> None:
    harness = await make(1, 1).start()
    answer = await harness.http().get("/v1/models", headers={"host": "models.example.org"})
    assert answer.status_code == 200


def test_addresses_of_loopback() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "", "::ffff:10.0.0.1"):
        assert not is_loopback(host)


PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_no_page_of_another_origin_may_ask_by_default(make: Make) -> None:
    harness = await make(1, 1).start()
    http = harness.http()
    answers = [
        await http.options("/v1/completions", headers=PREFLIGHT),
        await http.get("/v1/models", headers={"origin": PAGE}),
    ]
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control-")]
    assert answers[0].status_code == 405


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_pages_of_allowed_origins_may_ask(
    make: Make, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("SOME_KEYS", "first-key")  # which a preflight cannot have
    harness = await make(1, 1, allowed_origins=[PAGE], api_key_env="SOME_KEYS").start()
    http = harness.http()
    answer = await http.options(path, headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    other = await http.options(path, headers=PREFLIGHT | {"origin": "https://evil.example.org"})
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers
    # errors can be read too, and streams
    refused = await http.post(path, content=GOOD, headers={"origin": PAGE})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in refused.headers["access-control-expose-headers"].lower()


async def test_a_stream_for_a_page(make: Make) -> None:
    harness = await make(1, 1, allowed_origins=["*"]).start()
    body: dict[str, Any] = {"model": MODEL, "prompt": [5, 6], "max_tokens": 4, "stream": True}
    answer = await harness.http().post("/v1/completions", json=body, headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_methods_headers_and_credentials_are_as_configured(make: Make) -> None:
    harness = await make(
        1,
        1,
        allowed_origins=[PAGE],
        allowed_methods=["GET", "POST"],
        allowed_headers=["authorization", "content-type"],
        allow_credentials=True,
    ).start()
    http = harness.http()
    answer = await http.options("/v1/completions", headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-credentials"] == "true"
    for change in (
        {"access-control-request-method": "DELETE"},
        {"access-control-request-headers": "x-other"},
    ):
        answer = await http.options("/v1/completions", headers=PREFLIGHT | change)
        assert answer.status_code == 400


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"allowed_origins": ["chat.example.org"]}, "router.allowed_origins"),
        ({"allowed_origins": ["https://chat.example.org/"]}, "router.allowed_origins"),
        ({"allowed_origins": ["*"], "allow_credentials": True}, "name the origins"),
        ({"allowed_hosts": ["Models.example.org"]}, "router.allowed_hosts"),
        ({"allowed_hosts": ["models.example.org:8000"]}, "router.allowed_hosts"),
        ({"root_path": "llm"}, "router.root_path"),
        ({"root_path": "/llm/"}, "router.root_path"),
        ({"root_path": "/"}, "router.root_path"),
    ],
)
def test_what_they_cannot_be(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        RouterConfig(**values)


@pytest.fixture
async def prefixed(make: Make) -> AsyncIterator[httpx.AsyncClient]:
    harness = await make(1, 1, root_path="/llm/one").start()
    yield harness.http()


@pytest.mark.parametrize("prefix", ["", "/llm/one"])
async def test_a_proxys_prefix(prefixed: httpx.AsyncClient, prefix: str) -> None:
    """Whether the proxy takes it off or not."""
    answer = await prefixed.post(f"{prefix}/v1/completions", content=GOOD)
    assert answer.status_code == 200, answer.text
    assert (await prefixed.get(f"{prefix}/v1/models/{MODEL}")).status_code == 200
    answer = await prefixed.post(f"{prefix}/v1/messages/none", content=b"{}")
    assert answer.json()["type"] == "error"
    document = (await prefixed.get(f"{prefix}/openapi.json")).json()
    assert document["servers"] == [{"url": "/llm/one"}]


async def test_other_prefixes_are_none(prefixed: httpx.AsyncClient, make: Make) -> None:
    for path in ("/llm/v1/models", "/llm/onev1/models", "/other/v1/models"):
        assert (await prefixed.get(path)).status_code == 404
    plain = await make(1, 1).start()
    assert (await plain.http().get("/llm/one/v1/models")).status_code == 404
    assert "servers" not in (await plain.http().get("/openapi.json")).json()
