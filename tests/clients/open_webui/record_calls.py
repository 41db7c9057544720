"""Records what Open WebUI's server asks of a server of OpenAI's API: calls.json beside this file.

    python record_calls.py URL OPEN_WEBUI

URL: root of a running server of the demo model. OPEN_WEBUI: the command `open-webui` of an
environment in which that package is installed. Open WebUI runs unmodified, and this program stands
between the two. It does what Open WebUI's page does; the fields are those of Chat.svelte of the
package. The prompts for titles, tags and the like are settings of Open WebUI, and are our own here.
Prints the chats that Open WebUI has saved: they show whether it understood the answers.

Run by hand for a new version of Open WebUI. The tests know calls.json alone.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODEL = "pdserve-demo"
TIMEOUT_S = 120.0
KEPT = ("authorization", "content-type", "accept", "accept-encoding")

SUM = "What is 23 + 54?"
NEXT_SUM = "What is 12 + 30?"
# names as in the page, which sends on what is set
CONTROLS = {
    "temperature": 0,
    "max_tokens": 64,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.01,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "seed": 7,
    "stop": ["\n\n"],
    "logit_bias": "5:-10",
}
TOOL = '''
class Tools:
    def get_weather(self, city: str) -> str:
        """
        Get the weather.
        :param city: The city.
        """
        return '{"temperature": 21, "state": "sunny"}'
'''
PROMPTS = {
    "TITLE_GENERATION_PROMPT_TEMPLATE": 'Reply with JSON such as {"title": "Sums"}: which title '
    "fits this chat?\n{{MESSAGES:END:2}}",
    "TAGS_GENERATION_PROMPT_TEMPLATE": 'Reply with JSON such as {"tags": ["Mathematics"]}: which '
    "tags fit this chat?\n{{MESSAGES:END:6}}",
    "FOLLOW_UP_GENERATION_PROMPT_TEMPLATE": 'Reply with JSON such as {"follow_ups": ["Why?"]}: '
    "what could be asked next?\n{{MESSAGES:END:6}}",
    "QUERY_GENERATION_PROMPT_TEMPLATE": 'Reply with JSON such as {"queries": ["sums"]}: what '
    "should be looked up?\n{{MESSAGES:END:6}}",
    "AUTOCOMPLETE_GENERATION_PROMPT_TEMPLATE": 'Reply with JSON such as {"text": "54"}: how does '
    "this go on?\n{{PROMPT}}",
}


class Calls:
    """The calls that came, under the name of what was being done."""

    def __init__(self) -> None:
        self.doing = "start"
        self.found: list[dict[str, Any]] = []

    def add(self, call: dict[str, Any]) -> None:
        """Keeps a call that no earlier one equals."""
        nameless = [{**found, "doing": call["doing"]} for found in self.found]
        if call not in nameless:
            self.found.append(call)

    def handler(self, server: str) -> type[BaseHTTPRequestHandler]:
        """Notes each request and passes it on to the server."""
        calls = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._pass_on(None)

            def do_POST(self) -> None:
                self._pass_on(self.rfile.read(int(self.headers["content-length"])))

            def _pass_on(self, body: bytes | None) -> None:
                sent = {name: self.headers[name] for name in KEPT if name in self.headers}
                call: dict[str, Any] = {
                    "doing": calls.doing,
                    "method": self.command,
                    "path": self.path,
                    "headers": sent,
                }
                if body is not None:
                    call["body"] = json.loads(body)
                calls.add(call)
                request = urllib.request.Request(
                    server + self.path, data=body, headers=sent, method=self.command
                )
                try:
                    answer: Any = urllib.request.urlopen(request, timeout=TIMEOUT_S)
                except urllib.error.HTTPError as error:
                    answer = error
                self.send_response(answer.status)
                for name in ("content-type", "content-encoding"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.end_headers()
                while part := answer.read1(65536):
                    self.wfile.write(part)
                    self.wfile.flush()

            def log_message(self, *_: object) -> None:
                """Nothing: the record says it."""

        return Handler


class Page:
    """Does what Open WebUI's page does. url: of Open WebUI."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._token = ""

    def ask(self, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json", "authorization": f"Bearer {self._token}"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read() or b"null")

    def sign_in(self) -> None:
        user = {"name": "Tester", "email": "tester@example.com", "password": "a-long-pass-1A"}
        self._token = self.ask("/api/v1/auths/signup", user)["token"]

    def send(self, words: str, chat: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """The chat after a message and all that Open WebUI does about it. chat: that goes on; a
        new one without it. more: fields of the request."""
        user, answer = str(uuid.uuid4()), str(uuid.uuid4())
        parent = chat["chat"]["history"]["currentId"] if chat is not None else None
        message = {
            "id": user,
            "parentId": parent,
            "childrenIds": [answer],
            "role": "user",
            "content": words,
            "timestamp": int(time.time()),
            "models": [MODEL],
        }
        body: dict[str, Any] = {
            "stream": True,
            "model": MODEL,
            "params": {"model_controls": {}, "temperature": 0},
            "tool_ids": [],
            "tool_servers": [],
            "features": {},
            "variables": {},
            "session_id": "a-session",
            "id": answer,
            "parent_id": parent,
            "user_message": message,
            "background_tasks": {"follow_up_generation": True},
        }
        if chat is None:
            body["messages"] = [{"role": "user", "content": words}]
            body["background_tasks"] |= {"title_generation": True, "tags_generation": True}
        else:
            body["chat_id"] = chat["id"]
        chat_id = self.ask("/api/chat/completions", body | more)["chat_id"]

        def is_done() -> bool:
            tasks = self.ask(f"/api/tasks/chat/{chat_id}")["task_ids"]
            found = self.ask(f"/api/v1/chats/{chat_id}")["chat"]["history"]["messages"]
            return not tasks and bool(found[answer].get("done"))

        until(is_done)
        saved: dict[str, Any] = self.ask(f"/api/v1/chats/{chat_id}")
        return saved


def until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + TIMEOUT_S
    while not is_so():  # each takes its time
        if time.monotonic() > limit:
            raise TimeoutError("Open WebUI did not get there")
        time.sleep(0.5)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def drive(page: Page, calls: Calls, base: str) -> list[dict[str, Any]]:
    """Everything that is recorded, in its order; returns the chats that Open WebUI has saved."""
    page.sign_in()
    calls.doing = "list the models"
    page.ask("/openai/verify", {"url": base, "key": "no-key-is-needed", "config": {}})
    page.ask("/api/models?refresh=true")
    configure(page)
    calls.doing = "answer a first message"
    first = page.send(SUM)
    quiet: dict[str, Any] = {"background_tasks": {}}  # or each asks for its title again
    calls.doing = "answer a next message"
    chats = [first, page.send(NEXT_SUM, first, **quiet)]
    calls.doing = "think"
    chats.append(page.send(f"{SUM} Think first.", **quiet))
    calls.doing = "call a tool"
    chats.append(page.send("What's the weather in Paris?", tool_ids=["weather"], **quiet))
    calls.doing = "obey the chat's controls"
    system = {"role": "system", "content": "You are a helpful assistant."}
    messages = [system, {"role": "user", "content": SUM}]
    chats.append(page.send(SUM, params=CONTROLS, messages=messages, **quiet))
    calls.doing = "refuse a control"
    for name, value in {"repeat_penalty": 1.05, "reasoning_effort": "low"}.items():
        chats.append(page.send(SUM, params={"temperature": 0, name: value}, **quiet))
    calls.doing = "answer a client of Open WebUI's API"
    asked = {"model": MODEL, "messages": [{"role": "user", "content": SUM}]}
    page.ask("/api/chat/completions", {**asked, "stream": False, "temperature": 0})
    calls.doing = "write queries for a search"
    page.ask("/api/v1/tasks/queries/completions", {**asked, "type": "retrieval"})
    calls.doing = "complete what is typed"
    typed = {**asked, "prompt": "What is 23", "type": "general"}
    page.ask("/api/v1/tasks/auto/completions", typed)
    return chats


def configure(page: Page) -> None:
    """A tool, and the model without Open WebUI's own 28, which are longer than its context."""
    meta = {"description": "Weather", "manifest": {}}
    tool = {"id": "weather", "name": "weather", "content": TOOL, "meta": meta}
    page.ask("/api/v1/tools/create", {**tool, "access_grants": []})
    able = {"capabilities": {"usage": True, "builtin_tools": False}}
    model = {"id": MODEL, "name": MODEL, "meta": able, "params": {}, "base_model_id": None}
    page.ask("/api/v1/models/create", {**model, "access_grants": []})
    page.ask("/api/models?refresh=true")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("open_webui")
    given = parser.parse_args()
    calls = Calls()
    between = ThreadingHTTPServer(("127.0.0.1", 0), calls.handler(given.url.rstrip("/")))
    threading.Thread(target=between.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{between.server_address[1]}/v1"
    with tempfile.TemporaryDirectory() as folder, running(given.open_webui, base, folder) as url:
        version = Page(url).ask("/api/version")["version"]
        chats = drive(Page(url), calls, base)
    record = {"client": "open-webui", "version": version, "calls": calls.found}
    (HERE / "calls.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(chats, indent=1))


@contextmanager
def running(open_webui: str, base: str, folder: str) -> Iterator[str]:
    """URL of Open WebUI, which keeps its data in the folder and asks the server at base."""
    port = free_port()
    environment = {
        **os.environ,
        **PROMPTS,
        "DATA_DIR": folder,
        "USE_SLIM_DOCKER": "true",  # does without torch, which it has for documents and speech
        "OFFLINE_MODE": "true",
        "WEBUI_SECRET_KEY": "for-the-record",
        "ENABLE_OLLAMA_API": "false",
        "OPENAI_API_BASE_URL": base,
        "OPENAI_API_KEY": "no-key-is-needed",
        "ENABLE_AUTOCOMPLETE_GENERATION": "true",
    }
    command = [open_webui, "serve", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(command, cwd=folder, env=environment, stdout=sys.stderr)
    try:
        until(lambda: server.poll() is not None or is_up(url))
        yield url
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
