"""CPU time of the router process per streamed token. uvicorn and the router are in one process, and
a paced engine on paper is in another.

The engine sends what a worker sends over the same wire: one batch per step with one Delta per
stream. Clients read raw bytes. The cost of Serve, HAProxy and the engine is left out. Beside the
figures stands the cost of a token in a bare uvicorn on this machine.

    python -m benchmarks.router.router_cpu --out benchmarks/results/router-cpu.jsonl
    python -m benchmarks.router.router_cpu --streams 128 --profile /tmp/router.prof
"""

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tqdm import tqdm

from benchmarks.support.paced_engine import PacedEngine, PacedLink
from benchmarks.support.places import DEMO
from benchmarks.support.served_cluster import await_ready, free_port
from benchmarks.support.yardstick import bare_us_per_token, beside
from pdserve.bench.record import append, git_commit
from pdserve.configs.router import RouterConfig
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.http.app import build_app
from pdserve.text.tokenizer import Tokenizer

MODEL = "pdserve-demo"


def run_engine(address: str, step_s: float) -> None:
    PacedEngine(address, "both", step_s).run()


def run_router(address: str, port: int, profile: Path | None) -> None:
    profiler = cProfile.Profile() if profile else None
    if profiler:
        profiler.enable()
    try:
        asyncio.run(_serve(address, port))
    finally:
        if profiler:
            profiler.disable()
            profiler.dump_stats(str(profile))


async def _serve(address: str, port: int) -> None:
    fleet = Fleet(worker_silence_s=1e6)
    app = build_app(fleet, Tokenizer.load(DEMO), RouterConfig(split="always"), MODEL)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, log_level="warning", lifespan="off", access_log=False
    )
    server = uvicorn.Server(config)

    async def cpu(request: Request) -> PlainTextResponse:
        return PlainTextResponse(repr(time.process_time()))

    async def stop(request: Request) -> PlainTextResponse:
        server.should_exit = True
        return PlainTextResponse("")

    app.router.routes += [Route("/cpu", cpu), Route("/stop", stop)]
    fleet.join(PacedLink(address))
    await server.serve()
    await fleet.close()


async def stream(port: int, api: str, num_tokens: int, with_ids: bool) -> int:
    """Reads one stream. Returns the number of tokens that the client saw."""
    prompt = (
        {"prompt": [5, 6, 7]}
        if api == "completions"
        else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    asked = {
        "model": MODEL,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": with_ids,
    }
    body = json.dumps(prompt | asked).encode()
    path = "/v1/completions" if api == "completions" else "/v1/chat/completions"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.read(-1)
    writer.close()
    assert b"data: [DONE]" in answer, answer[:500]
    return answer.count(b"data: ") - 1


async def measure(
    port: int, api: str, num_streams: int, num_tokens: int, with_ids: bool
) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        before = float((await client.get("/cpu")).text)
        began = time.monotonic()
        events = sum(
            await asyncio.gather(
                *[stream(port, api, num_tokens, with_ids) for _ in range(num_streams)]
            )
        )
        wall = time.monotonic() - began
        cpu = float((await client.get("/cpu")).text) - before
    tokens = num_streams * num_tokens
    return {
        "benchmark": "router_cpu",
        "api": api,
        "token_ids": with_ids,
        "streams": num_streams,
        "tokens": tokens,
        "events": events,
        "cpu_us_per_token": round(1e6 * cpu / tokens, 1),
        "cpu_share": round(cpu / wall, 3),
    }


async def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    await measure(args.port, args.api, 2, 50, args.token_ids)
    rows = []
    for num_streams in tqdm(args.streams, desc="router", unit="load"):
        num_tokens = max(args.tokens, 4000 // num_streams)
        rounds = [
            await measure(args.port, args.api, num_streams, num_tokens, args.token_ids)
            for _ in range(args.rounds)
        ]
        rows.append(sorted(rounds, key=lambda row: row["cpu_us_per_token"])[len(rounds) // 2])
    async with httpx.AsyncClient() as client:
        await client.get(f"http://127.0.0.1:{args.port}/stop")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument(
        "--tokens", type=int, default=200, help="tokens per stream (a lone stream gets 4000)"
    )
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="step of the engine (use 2 for a lone stream)"
    )
    parser.add_argument("--api", choices=("completions", "chat"), default="completions")
    parser.add_argument(
        "--token-ids", action="store_true", help="ask for token ids, as load generators do"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median counts")
    parser.add_argument("--port", type=int, default=free_port(), help="port (default: a free one)")
    parser.add_argument(
        "--profile", type=Path, help="file for the router's cProfile, which slows it down"
    )
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pdserve-") as folder:
        address = f"ipc://{folder}/engine"
        engine = spawn.Process(target=run_engine, args=(address, args.step_ms / 1000), daemon=True)
        router = spawn.Process(
            target=run_router, args=(address, args.port, args.profile), daemon=True
        )
        engine.start()
        router.start()
        await_ready(router.is_alive, f"http://127.0.0.1:{args.port}", 60)
        rows = asyncio.run(run_all(args))
        router.join(10)
        engine.terminate()
    shared = {"step_ms": args.step_ms, "commit": git_commit(), "machine": platform.machine()}
    shared["bare_us_per_token"] = bare = bare_us_per_token()
    print(beside(bare))
    for row in rows:
        row = row | shared
        print(json.dumps(row))
        append(args.out, row)


if __name__ == "__main__":
    main()
