"""A Hugging Face Hub on loopback with one model: what its pages say to huggingface_hub, and how it
can refuse."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from support.waiting import until

COMMIT = "a" * 40


class FakeHub:
    """A Hub that serves one folder.

    - `refusal`: status and error code that every page answers with.
    - `token`: the token that it wants.
    - `cut_after`: bytes after which the next file breaks off, once.
    - `sizes`: sizes that it reports for files instead of their own.
    - `served`: bytes that went out, by file, in the order of requests.
    - `pause_s`: pause before each file; files go out one after another.
    - `min_askers`: no file goes out before this many have asked for anything of the model.
    - `min_getters`: no file goes out before this many have asked for a file's bytes.
    - `askers`: those who asked for anything of the model, by their tokens. (huggingface_hub asks
      for other pages too, without a token.)
    - `getters`: those of them who asked for a file's bytes.
    - `takers`: those who got files, in order.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.refusal: tuple[int, str] | None = None
        self.token: str | None = None
        self.cut_after: int | None = None
        self.sizes: dict[str, int] = {}
        self.served: list[tuple[str, int]] = []
        self.pause_s = 0.0
        self.min_askers = 0
        self.min_getters = 0
        self.askers: set[str] = set()
        self.getters: set[str] = set()
        self.takers: list[str] = []
        self.one_file = threading.Lock()
        self.url = ""

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def named(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def size(self, path: Path) -> int:
        return self.sizes.get(self.named(path), path.stat().st_size)


@contextmanager
def fake_hub(name: str, folder: Path) -> Iterator[FakeHub]:
    hub = FakeHub(name, folder)

    class Handler(_Handler):
        server_hub = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # so that closing waits for them
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_hub: FakeHub

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    @property
    def _asker(self) -> str:
        return self.headers["authorization"] or ""

    def _answer(self, has_body: bool) -> None:
        hub = self.server_hub
        path = unquote(urlsplit(self.path).path)
        if f"/{hub.name}/" in f"{path}/":
            hub.askers.add(self._asker)
        if hub.refusal is not None:
            return self._refuse(*hub.refusal)
        if hub.token is not None and self.headers["authorization"] != f"Bearer {hub.token}":
            return self._refuse(401, "" if self.headers["authorization"] else "RepoNotFound")
        api = f"/api/models/{hub.name}"
        if path == api or path == f"{api}/revision/main" or path == f"{api}/revision/{COMMIT}":
            return self._json(self._info())
        if path in (f"{api}/tree/{COMMIT}", f"{api}/tree/main"):
            return self._json(self._tree())
        if path.startswith(f"{api}/revision/"):
            return self._refuse(404, "RevisionNotFound")
        for revision in (COMMIT, "main"):
            start = f"/{hub.name}/resolve/{revision}/"
            if path.startswith(start) and (hub.folder / path[len(start) :]).is_file():
                return self._file(hub.folder / path[len(start) :], has_body)
        self._refuse(404, "EntryNotFound" if f"/{hub.name}/" in path else "RepoNotFound")

    def _info(self) -> dict[str, Any]:
        hub = self.server_hub
        files = [{"rfilename": hub.named(path), "size": hub.size(path)} for path in hub.files]
        return {"id": hub.name, "modelId": hub.name, "sha": COMMIT, "siblings": files}

    def _tree(self) -> list[dict[str, Any]]:
        hub = self.server_hub
        return [
            {"type": "file", "path": hub.named(path), "size": hub.size(path), "oid": _tag(path)}
            for path in hub.files
        ]

    def _file(self, path: Path, has_body: bool) -> None:
        hub = self.server_hub
        content = path.read_bytes()
        begin = 0
        if said := self.headers["range"]:
            begin = int(said.removeprefix("bytes=").split("-")[0])
        rest = content[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("content-length", str(len(rest)))
        if begin:
            self.send_header("content-range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("etag", f'"{_tag(path)}"')
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("accept-ranges", "bytes")
        self.end_headers()
        if not has_body:
            return
        hub.getters.add(self._asker)
        until(lambda: len(hub.askers) >= hub.min_askers and len(hub.getters) >= hub.min_getters)
        if hub.pause_s:
            with hub.one_file:
                time.sleep(hub.pause_s)
                hub.takers.append(self._asker)
        if hub.cut_after is not None and len(rest) > hub.cut_after:
            rest, hub.cut_after = rest[: hub.cut_after], None
            self.close_connection = True
        self.wfile.write(rest)
        hub.served.append((hub.named(path), len(rest)))

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("x-error-code", code)
        elif status == 401:
            said = "Invalid credentials in Authorization header"
            self.send_header("x-error-message", said)
        self.send_header("content-length", "0")
        self.end_headers()


def _tag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
