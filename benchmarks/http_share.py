"""Where the time of a request goes: HTTP, router, waiting, the engine's host, the device; in ms and as shares of what
clients saw.

Puts a closed-loop load on a running server for each number of clients and takes the difference of the router's own
counters (`pdserve_router_request_time_seconds`) before and behind it. Needs a server with one router replica.

    .venv/bin/python benchmarks/http_share.py --url http://127.0.0.1:8000 --out benchmarks/results/http-share.jsonl
    .venv/bin/python benchmarks/http_share.py --url ... --clients 1 32 128 --input-len 1024 --output-len 128

    outside   client, network, and what stands before the router: HAProxy, Serve's HTTP server
    admission reading the body, checks, tokenising, choosing a worker
    transport messages to and from the worker, text and JSON, writing to the client
    queue     waiting at the worker for a step with room, and for KV from another worker
              (known to half a step: what comes during one is read behind it)
    host      the engine's Python between the device's steps
    device    the device was busy, with this request or others (on CPU: the steps themselves)
"""

import argparse
import time
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pdserve.bench.load import LoadConfig, run_load
from pdserve.bench.record import Json, append, check_writable, circumstances, gpu_name
from pdserve.bench.workload import Lengths, Shape

PARTS = ("admission", "transport", "queue", "engine_host", "device")
SETTLE_S = 0.2  # the router counts a request behind its last byte


def router_times(url: str) -> dict[str, float]:
    """Seconds by part so far; "requests" and "total" of the same requests."""
    page = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
    times = dict.fromkeys(("requests", "total", *PARTS), 0.0)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "pdserve_router_request_time_seconds_total":
                times[sample.labels["part"]] = sample.value
            elif sample.name == "pdserve_router_e2e_request_latency_seconds_count":
                times["requests"] = sample.value
            elif sample.name == "pdserve_router_e2e_request_latency_seconds_sum":
                times["total"] = sample.value
    return times


def measure(url: str, clients: int, input_len: Lengths, output_len: Lengths, rounds: int, vocab_size: int) -> Json:
    """One load; mean milliseconds of a request by part. ValueError when the router counted other requests."""
    num_requests = max(clients * rounds, 8)
    warm_up = Shape(clients, input_len, output_len)
    run_load(LoadConfig(url, warm_up, clients=clients, vocab_size=vocab_size, num_warmups=1, seed=1), progress=False)
    time.sleep(SETTLE_S)
    before = router_times(url)
    shape = Shape(num_requests, input_len, output_len)
    load = LoadConfig(url, shape, clients=clients, vocab_size=vocab_size, num_warmups=0, seed=clients)
    result = run_load(load)
    time.sleep(SETTLE_S)
    spent = {name: value - before[name] for name, value in router_times(url).items()}
    if not spent["requests"] == len(result.finished) == num_requests:
        raise ValueError(
            f"{num_requests} requests were sent, {len(result.finished)} finished ({dict(result.errors)}), and this "
            f"router counted {spent['requests']:g}: end other load on the server, and give it one router replica"
        )
    seen = sum(outcome.ended_at - outcome.sent_at for outcome in result.finished)
    parts = {"outside": seen - spent["total"], **{part: spent[part] for part in PARTS}}
    return {
        "clients": clients,
        "requests": num_requests,
        "input_len": str(input_len),
        "output_len": str(output_len),
        "request_ms": round(1e3 * seen / num_requests, 2),
        "ms": {part: round(1e3 * seconds / num_requests, 3) for part, seconds in parts.items()},
        "share": {part: round(seconds / seen, 4) for part, seconds in parts.items()},
        "client_cpu_share": round(result.cpu_share, 3),
    }


def table(rows: list[Json]) -> str:
    """Markdown: a line a load, milliseconds and share by part."""
    names = list(rows[0]["share"])
    lines = [
        "| clients | in/out | request, ms | " + " | ".join(name.replace("_", " ") for name in names) + " |",
        "|" + "---|" * (3 + len(names)),
    ]
    for row in rows:
        cells = [f"{row['ms'][name]:.1f} ({row['share'][name]:.1%})" for name in names]
        lengths = f"{row['input_len']}/{row['output_len']}"
        lines.append(f"| {row['clients']} | {lengths} | {row['request_ms']:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--input-len", type=Lengths.parse, default=Lengths(1024, 1024), help="default 1024")
    parser.add_argument("--output-len", type=Lengths.parse, default=Lengths(128, 128), help="default 128")
    parser.add_argument("--rounds", type=int, default=3, help="requests of each client")
    parser.add_argument("--vocab-size", type=int, default=1000, help="prompts hold token ids below it")
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    args = parser.parse_args()
    check_writable(args.out)
    rows = []
    for clients in args.clients:
        row = measure(args.url, clients, args.input_len, args.output_len, args.rounds, args.vocab_size)
        append(args.out, {"benchmark": "http_share", "device": gpu_name(), **row, **circumstances()})
        rows.append(row)
    print(table(rows))


if __name__ == "__main__":
    main()
