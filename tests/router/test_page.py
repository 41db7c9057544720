"""The page at `/`: where it is served, by which headers, that nothing else changes with it, and
that its files can make no script of text. What it does in a browser is tested in tests/page."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from router.harness import MODEL, Harness
from starlette.applications import Starlette
from starlette.routing import Route

import pdserve.router.http.page as room
from pdserve.router.http.app import build_app

Make = Callable[..., Harness]
FOLDER = Path(room.__file__).parent / "files"
NAMES = sorted(path.name for path in FOLDER.iterdir())


def app_of(harness: Harness, on_loopback: bool) -> Starlette:
    config = harness.service.config
    return build_app(
        harness.fleet, harness.tokenizer, config, MODEL, harness.service, on_loopback=on_loopback
    )


def client_of(app: Starlette) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("page", "on_loopback", "status"),
    [
        (None, True, 200),
        (None, False, 404),
        (True, True, 200),
        (True, False, 200),
        (False, True, 404),
        (False, False, 404),
    ],
)
async def test_it_is_there_on_loopback_or_where_it_is_asked_for(
    make: Make, page: bool | None, on_loopback: bool, status: int
) -> None:
    harness = make(1, 1, page=page)
    async with client_of(app_of(harness, on_loopback)) as http:
        for path in ("/", "/page/page.js", "/page/page.css"):
            answer = await http.get(path)
            assert answer.status_code == status, path
            if status == 404:
                assert answer.json()["error"]["type"] == "not_found_error"


async def test_headers_let_a_browser_run_these_files_alone(make: Make) -> None:
    async with client_of(app_of(make(1, 1), True)) as http:
        answers = {name: await http.get(f"/page/{name}") for name in NAMES}
        answers["/"] = await http.get("/")
    for name, answer in answers.items():
        assert answer.status_code == 200, name
        policy = dict(
            part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
        )
        assert policy.pop("default-src") == "'none'"
        assert policy.pop("require-trusted-types-for") == "'script'"
        allowed = {key for key, value in policy.items() if value == "'self'"}
        assert allowed == {"script-src", "style-src", "connect-src", "img-src"}
        others = {key: value for key, value in policy.items() if key not in allowed}
        nothing = ("base-uri", "form-action", "frame-ancestors", "trusted-types")
        assert others == dict.fromkeys(nothing, "'none'")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-dns-prefetch-control"] == "off"
        assert answer.headers["x-request-id"]
    assert answers["/"].content == (FOLDER / "index.html").read_bytes()
    kinds = {name.rpartition(".")[2]: a.headers["content-type"] for name, a in answers.items()}
    assert kinds["js"] == "text/javascript; charset=utf-8"
    assert kinds["css"] == "text/css; charset=utf-8"
    assert answers["/"].headers["content-type"] == "text/html; charset=utf-8"


async def test_it_needs_no_key_but_what_it_asks_for_does(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGE_TEST_KEY", "a-key-of-the-test")
    async with client_of(app_of(make(1, 1, api_key_env="PAGE_TEST_KEY"), True)) as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401


async def test_a_stranger_name_of_this_machine_gets_no_page(make: Make) -> None:
    async with client_of(app_of(make(1, 1), True)) as http:
        for path in ("/", "/page/page.js"):
            answer = await http.get(path, headers={"host": "evil.example.org"})
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_it_works_below_a_proxys_prefix(make: Make, prefix: str) -> None:
    """Its addresses are relative, so they hold below any prefix."""
    async with client_of(app_of(make(1, 1, root_path="/llm"), True)) as http:
        page = await http.get(f"{prefix}/")
        for address in re.findall(r'(?:src|href)="([^"]*)"', page.text):
            assert (await http.get(str(page.url.join(address)))).status_code == 200


async def test_nothing_else_changes_with_it(make: Make) -> None:
    shown: dict[bool, Any] = {}
    routes: dict[bool, set[tuple[str, Any]]] = {}
    for page in (True, False):
        harness = await make(1, 1, page=page).start()
        app = app_of(harness, True)
        own = [route for route in app.routes if isinstance(route, Route)]
        routes[page] = {(route.path, frozenset(route.methods or ())) for route in own}
        async with client_of(app) as http:
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "seed": 3}
            answer = await http.post("/v1/chat/completions", json=chat | {"max_tokens": 5})
            document = (await http.get("/openapi.json")).json()
            wrong = await http.post("/", content=b"x")
            assert wrong.status_code == (405 if page else 404)
            unknown = [(await http.get(path)).status_code for path in ("/page", "/page/", "/x")]
            assert unknown == [404, 404, 404]
            headers = sorted(answer.headers)
            shown[page] = [answer.json()["choices"], document, headers]
    assert shown[True] == shown[False]
    assert routes[False] < routes[True]
    added = {path for path, _ in routes[True] - routes[False]}
    assert added == {"/", *(f"/page/{name}" for name in NAMES)}


async def test_files_outside_are_not_served(make: Make) -> None:
    async with client_of(app_of(make(1, 1), True)) as http:
        for path in ("/page/../routes.py", "/page/%2e%2e/routes.py", "/page/routes.py"):
            assert (await http.get(path)).status_code == 404


# What makes elements, scripts or styles of strings, or leaves the page's origin.
FORBIDDEN = [
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "setHTML", "DOMParser", "srcdoc"),
    *("createContextualFragment", "document.write", "eval(", "new Function", "Function("),
    *("localStorage", "document.cookie", "importScripts", "XMLHttpRequest", "WebSocket"),
    *("sendBeacon", "EventSource", "javascript:", "window.open", "postMessage", "import("),
]


@pytest.mark.parametrize("name", NAMES)
def test_files_make_no_script_of_text(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert not [word for word in FORBIDDEN if word in text]
    assert not re.search(r"set(?:Timeout|Interval)\(\s*['\"`]", text), "a string that is run"
    addresses = set(re.findall(r"https?://\w[^\s\"']*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "the name of SVG, which nobody loads"
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:\w+:|//)", text)
    assert text.count("\n") <= 400
    if name.endswith(".html"):
        assert not re.search(r"\son\w+\s*=", text), "an inline handler"
        assert not re.search(r"\sstyle\s*=|<style", text), "an inline style"
        for script in re.findall(r"<script[^>]*>(.*?)</script>", text, re.S):
            assert script == "", "an inline script"
        assert not re.search(r"<(?:base|iframe|object|embed)\b", text)
    if name.endswith(".css"):
        assert "url(" not in text and "@import" not in text


def test_what_is_shown_is_put_in_as_text() -> None:
    """`fetch` is called at one place, and elements are made at one."""
    scripts = {name: (FOLDER / name).read_text() for name in NAMES if name.endswith(".js")}
    assert [name for name, text in scripts.items() if "fetch(" in text] == ["server.js"]
    assert scripts["server.js"].count("fetch(") == 1
    assert [name for name, text in scripts.items() if "createElement" in text] == ["dom.js"]
    keeps = [name for name, text in scripts.items() if "sessionStorage" in text]
    assert keeps == ["server.js"]
