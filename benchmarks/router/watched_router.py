"""A router and an engine on paper, each in a process of its own, to be watched from outside.

router_stall.py uses it.
"""

import asyncio
import logging
import resource
import time
from typing import Any

import uvloop

from benchmarks.router.hostile.sending import CONTEXT, MODEL
from benchmarks.support.paced_engine import STEP_S, PacedEngine, PacedLink
from benchmarks.support.places import DEMO
from pdserve.background.garbage import GarbageCollector
from pdserve.cluster.deployments.http_server import Address, HttpServer
from pdserve.configs.router import RouterConfig
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.http.app import build_app
from pdserve.text.tokenizer import Tokenizer

MAX_FILES = 16_384


# The processes that are measured: a router and its engine.


class _WatchedEngine(PacedEngine):
    """An engine on paper that records in `late` the largest delay of a step, in seconds."""

    def __init__(self, address: str, late: Any) -> None:
        super().__init__(address, "both", STEP_S, max_model_len=CONTEXT)
        self._late = late
        self._stepped_at = time.monotonic()

    def _step(self) -> None:
        now = time.monotonic()
        self._late.value = max(self._late.value, now - self._stepped_at - STEP_S)
        self._stepped_at = now
        super()._step()


def run_engine(address: str, late: Any) -> None:
    _WatchedEngine(address, late).run()


def run_router(address: str, port: int, log: str, memory_bytes: int) -> None:
    """Runs a router like a RouterReplica: HTTP server, application, fleet, log lines in a file."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    logging.basicConfig(filename=log, level=logging.INFO)
    uvloop.run(_serve(address, port))


async def _serve(address: str, port: int) -> None:
    config = RouterConfig()
    fleet = Fleet(config.worker_silence_s, drain_s=config.drain_s)
    app = build_app(fleet, Tokenizer.load(DEMO), config, MODEL)
    server = HttpServer(app, Address("127.0.0.1", port), config.client_timeout_s)
    fleet.join(PacedLink(address))
    GarbageCollector().start()
    server.start()
    await asyncio.Event().wait()
