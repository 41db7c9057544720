"""The machine's own yardstick for figures of CPU time: the cost of a token in a bare uvicorn.

This is the cheapest server that streams completions: one process and no router, under the load that
cluster_cpu.py puts on a cluster. Machines differ, and one machine differs from hour to hour, so a
figure of CPU time means little without it. Every benchmark that reports such figures uses it.
"""

import asyncio
import contextlib
import json
import multiprocessing
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from benchmarks.support.paced_engine import STEP_S
from benchmarks.support.served_cluster import Server, await_ready, free_port
from pdserve.bench.load import LoadConfig, run_load
from pdserve.bench.record import Json, repeated
from pdserve.bench.workload import Shape

STREAMS = 64
PROMPT_TOKENS = 64
TOKENS = 100
ROUNDS = 3


def bare_us_per_token() -> Json:
    """Measures the median and spread of a few seconds' load. Takes about ten seconds."""
    shape = Shape.parse(f"{STREAMS}x{PROMPT_TOKENS}x{TOKENS}")
    costs = []
    with bare_server() as server:
        for _ in range(ROUNDS):
            before = _cpu_s(server)
            run_load(
                LoadConfig(server.url, shape, clients=STREAMS, num_warmups=0, model="bare"),
                progress=False,
            )
            costs.append(1e6 * (_cpu_s(server) - before) / (STREAMS * TOKENS))
    return repeated(costs)


def _cpu_s(server: Server) -> float:
    """Asks the server for its CPU seconds by its own clock, because the system counts in ticks of
    up to 100 ms."""
    with urllib.request.urlopen(f"{server.url}/cpu", timeout=30) as answer:
        return float(answer.read())


def beside(bare: Json) -> str:
    """Returns the yardstick in words, for the line that has the figure."""
    return f"bare uvicorn {bare['median']:.1f} us per token (spread {bare['spread']:.1f})"


def serve_bare(port: int) -> None:
    """Runs the cheapest server that streams completions. Each stream has a clock of its own and
    sends one token of text per step."""

    async def complete(request: Request) -> StreamingResponse:
        asked = json.loads(await request.body())

        async def events() -> AsyncIterator[bytes]:
            for position in range(asked["max_tokens"]):
                await asyncio.sleep(STEP_S)
                reason = "length" if position == asked["max_tokens"] - 1 else None
                choice = {
                    "index": 0,
                    "text": f" {position}",
                    "token_ids": [position],
                    "finish_reason": reason,
                }
                data = {"id": "x", "object": "text_completion", "choices": [choice]}
                yield f"data: {json.dumps(data)}\n\n".encode()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({})

    async def cpu(request: Request) -> PlainTextResponse:
        return PlainTextResponse(repr(time.process_time()))

    routes = [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/health", health),
        Route("/cpu", cpu),
    ]
    uvicorn.run(
        Starlette(routes=routes), host="127.0.0.1", port=port, log_level="warning", access_log=False
    )


@contextlib.contextmanager
def bare_server() -> Iterator[Server]:
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(
        target=serve_bare, args=(port,), daemon=True
    )
    process.start()
    assert process.pid is not None
    try:
        await_ready(process.is_alive, f"http://127.0.0.1:{port}", 30.0)
        yield Server(f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        process.join()
