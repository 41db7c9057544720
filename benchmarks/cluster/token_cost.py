"""CPU time that a streamed token costs the processes of a server, by kind of process.

A server is a process and all that descend from it. The clients are in this process and do not
count. cluster_cpu.py uses this module.
"""

import re
import time
from collections import defaultdict
from pathlib import Path

import psutil

from benchmarks.support.places import DEMO
from benchmarks.support.served_cluster import Server
from pdserve.bench.load import LoadConfig, run_load
from pdserve.bench.record import Json
from pdserve.bench.workload import Shape

PROMPT_TOKENS = 64


def titled(process: psutil.Process) -> str:
    """Returns a short name of the process's kind."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return "gone"
    line = " ".join(words)
    found = re.match(r"ray::ServeReplica:\w+:(\w+)|ray::(\w+)", line)
    if found:
        return found.group(1) or found.group(2)
    return (
        "pdserve up" if "ENGINE_HOST" in line else Path(words[0]).name if words else process.name()
    )


def cpu_seconds(pid: int) -> dict[psutil.Process, float]:
    """Returns the user and system time of every living process of the tree."""
    root = psutil.Process(pid)
    taken = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            taken[process] = sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
    return taken


def spent(
    before: dict[psutil.Process, float], after: dict[psutil.Process, float]
) -> dict[str, float]:
    """Returns the seconds between two readings, by kind of process."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for process, taken in after.items():
        seconds[titled(process)] += taken - before.get(process, 0.0)
    return seconds


def stream_round(server: Server, streams: int, tokens: int, idle_share: float) -> Json:
    """Runs one load of `streams` clients, each with one answer of `tokens`."""
    load = LoadConfig(
        server.url,
        Shape.parse(f"{streams}x{PROMPT_TOKENS}x{tokens}"),
        clients=streams,
        num_warmups=0,
        model=DEMO.name,
    )
    before = cpu_seconds(server.pid)
    began = time.monotonic()
    result = run_load(load, progress=False)
    seconds = time.monotonic() - began
    by_kind = spent(before, cpu_seconds(server.pid))
    if len(result.finished) != streams:
        raise ValueError(
            f"{streams - len(result.finished)} of {streams} streams failed: {dict(result.errors)}"
        )
    num_tokens = sum(outcome.num_tokens for outcome in result.finished)
    largest_first = sorted(by_kind.items(), key=lambda item: -item[1])
    total = sum(by_kind.values())
    return {
        "us_per_token": 1e6 * total / num_tokens,
        "us_per_token_less_idle": 1e6 * (total - idle_share * seconds) / num_tokens,
        "by_kind": {kind: round(1e6 * taken / num_tokens, 2) for kind, taken in largest_first},
        "tokens_per_s": num_tokens / seconds,
        "tpot_ms": result.figures()["tpot_ms"],
        "client_cpu_share": result.cpu_share,
    }
