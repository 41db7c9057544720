"""Shows where the time of a request goes: HTTP, router, waiting, the engine's host, the device. The
figures are in ms and as shares of the clients' time.

It puts a closed-loop load on a running server for each number of clients. It takes the difference
of the router's own counters (`pdserve_router_request_time_seconds`) before and after the load. The
server must have one router replica.

    python -m benchmarks.cluster.http_share --url http://127.0.0.1:8000 \\
        --out benchmarks/results/http-share.jsonl
    python -m benchmarks.cluster.http_share --url ... --clients 1 32 128 \\
        --input-len 1024 --output-len 128

- outside: Client, network, and everything before the router (HAProxy, Serve's HTTP server).
- admission: Reading the body, checks, tokenising, choosing a worker.
- transport: Messages to and from the worker, text and JSON, writing to the client.
- queue: Waiting at the worker for a step with room, and for KV from another worker. It is only
  known to half a step, because a request that arrives during a step is read after it.
- host: The engine's Python between the device's steps.
- device: The device was busy with this request or others. On CPU these are the steps themselves.
- unreported: Transport and worker time of requests whose worker was lost, or that the router
  stopped (a stop string).

Before the loads, a bare uvicorn shows what a streamed token costs this machine's CPU now.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from benchmarks.cluster.worker_use import uses, worker_counts
from benchmarks.support.markdown import table
from benchmarks.support.served_cluster import metrics
from benchmarks.support.yardstick import bare_us_per_token, beside
from pdserve.bench.load import LoadConfig, LoadResult, run_load
from pdserve.bench.option_values import integer
from pdserve.bench.record import Json, append, check_writable, circumstances, gpu_name
from pdserve.bench.workload import Lengths, Shape

PARTS = ("admission", "transport", "queue", "engine_host", "device", "unreported")
SETTLE_S = 0.2  # the router counts a request only after its last byte


def router_times(url: str) -> dict[str, float]:
    """Returns the seconds by part so far, and "requests" and "total" of the same requests."""
    times = dict.fromkeys(("requests", "total", *PARTS), 0.0)
    for sample in metrics(url, "pdserve_router_"):
        if sample.name == "pdserve_router_request_time_seconds_total":
            times[sample.labels["part"]] = sample.value
        elif sample.name == "pdserve_router_e2e_request_latency_seconds_count":
            times["requests"] = sample.value
        elif sample.name == "pdserve_router_e2e_request_latency_seconds_sum":
            times["total"] = sample.value
    return times


def measure(
    url: str, clients: int, input_len: Lengths, output_len: Lengths, rounds: int, vocab_size: int
) -> Json:
    """Runs share_of() for a closed loop, after an equal loop that warms up."""
    load = LoadConfig(
        url, Shape(clients, input_len, output_len), clients, vocab_size=vocab_size, seed=1
    )
    run_load(load, progress=False)
    shape = Shape(max(clients * rounds, 8), input_len, output_len)
    result, share = share_of(replace(load, shape=shape, num_warmups=0, seed=clients))
    if share is None:
        raise ValueError(
            f"of {shape.num_prompts} requests {len(result.finished)} finished "
            f"({dict(result.errors)}), and this router "
            "may have counted others: end other load on the server, and give it one router replica"
        )
    return share


def share_of(load: LoadConfig) -> tuple[LoadResult, Json | None]:
    """Puts a load without warm-ups on the server.

    Returns the result, and the mean milliseconds of a request by part with their shares of the
    clients' time, and what each worker did (`worker_use`). These are None if some requests failed
    or the router counted others.
    """
    time.sleep(SETTLE_S)
    idle = worker_counts(load.url)
    before = router_times(load.url)
    began = time.monotonic()
    result = run_load(load)
    seconds = time.monotonic() - began
    time.sleep(SETTLE_S)
    spent = {name: value - before[name] for name, value in router_times(load.url).items()}
    num_requests = load.shape.num_prompts
    if not spent["requests"] == len(result.finished) == num_requests:
        return result, None
    seen = sum(outcome.ended_at - outcome.sent_at for outcome in result.finished)
    parts = {"outside": seen - spent["total"], **{part: spent[part] for part in PARTS}}
    return result, {
        "load": load.label,
        "requests": num_requests,
        "input_len": str(load.shape.input_len),
        "output_len": str(load.shape.output_len),
        "request_ms": round(1e3 * seen / num_requests, 2),
        "ms": {part: round(1e3 * seconds / num_requests, 3) for part, seconds in parts.items()},
        "share": {part: round(seconds / seen, 4) for part, seconds in parts.items()},
        "client_cpu_share": round(result.cpu_share, 3),
        "workers": uses(idle, worker_counts(load.url), seconds),
    }


def report(rows: Sequence[Json]) -> str:
    """Returns a Markdown table with one line per load: milliseconds and share by part."""
    names = list(rows[0]["share"])
    lines = []
    for row in rows:
        shares = [f"{row['ms'][name]:.1f} ({row['share'][name]:.1%})" for name in names]
        lengths = f"{row['input_len']}/{row['output_len']}"
        lines.append([str(row["load"]), lengths, f"{row['request_ms']:.1f}", *shares])
    parts = [name.replace("_", " ") for name in names]
    return table(["load", "in/out", "request, ms", *parts], lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=integer(1), nargs="+", default=[1, 32, 128])
    parser.add_argument(
        "--input-len", type=Lengths.parse, default=Lengths(1024, 1024), help="default 1024"
    )
    parser.add_argument(
        "--output-len", type=Lengths.parse, default=Lengths(128, 128), help="default 128"
    )
    parser.add_argument("--rounds", type=integer(1), default=3, help="requests per client")
    parser.add_argument(
        "--vocab-size", type=integer(2), default=1000, help="prompts have token ids below this"
    )
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    args = parser.parse_args()
    rows = []
    try:
        check_writable(args.out)
        router_times(args.url)  # fails at once if there is no server
        bare = bare_us_per_token()
        for clients in args.clients:
            row = measure(
                args.url, clients, args.input_len, args.output_len, args.rounds, args.vocab_size
            )
            shared = {"bare_us_per_token": bare, **circumstances()}
            append(args.out, {"benchmark": "http_share", "device": gpu_name(), **row, **shared})
            rows.append(row)
    except (ValueError, OSError, httpx.HTTPError) as error:
        parser.error(str(error))
    print(f"{report(rows)}\n\n{beside(bare)}")


if __name__ == "__main__":
    main()
