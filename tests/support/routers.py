"""Router processes without Ray: HTTP on a port of their own, workers found by their shells' sockets
in a folder.

GET /tasks says how many asyncio tasks one has.
"""

import asyncio
import multiprocessing
import os
import socket
import time
from pathlib import Path

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from support.ports import free_port
from support.processes import die_with_parent
from support.shell import watch

from pdserve.configs.router import RouterConfig
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.http.app import build_app
from pdserve.router.request.service import Service
from pdserve.text.tokenizer import Tokenizer

_spawn = multiprocessing.get_context("spawn")


def _serve(
    model: Path, config: RouterConfig, resume_wait_s: float, folder: Path, port: int, parent: int
) -> None:
    die_with_parent(parent)
    asyncio.run(_run(model, config, resume_wait_s, folder, port))


async def _run(
    model: Path, config: RouterConfig, resume_wait_s: float, folder: Path, port: int
) -> None:
    fleet = Fleet(config.worker_silence_s, attempt_deadline_s=config.attempt_deadline_s)
    tokenizer = Tokenizer.load(model)
    service = Service(fleet, tokenizer, config, model.name, resume_wait_s=resume_wait_s)
    app = build_app(fleet, tokenizer, config, model.name, service)
    app.router.routes.append(Route("/tasks", _tasks))
    watching = asyncio.create_task(watch(fleet, folder))
    options = uvicorn.Config(
        app, host="127.0.0.1", port=port, log_level="warning", lifespan="off", access_log=False
    )
    await uvicorn.Server(options).serve()
    watching.cancel()
    await fleet.close()


async def _tasks(request: Request) -> JSONResponse:
    return JSONResponse(len(asyncio.all_tasks()))


class RouterProcess:
    """A router that serves http://127.0.0.1:port/v1 under the model folder's name, also after
    `start` again. num_kills: counted by who kills it."""

    def __init__(
        self, model: Path, config: RouterConfig, resume_wait_s: float, folder: Path
    ) -> None:
        self._settings = model, config, resume_wait_s, folder
        self.port = free_port()
        self.num_kills = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = _spawn.Process(
            target=_serve, args=(*self._settings, self.port, os.getpid()), daemon=True
        )
        self.process.start()

    def wait(self, seconds: float = 300.0) -> None:
        """Until it takes connections."""
        limit = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert self.process.is_alive(), "the router died at its start"
                assert time.monotonic() < limit, "the router did not start in time"
                time.sleep(0.1)

    def close(self) -> None:
        self.process.kill()
        self.process.join(60)
