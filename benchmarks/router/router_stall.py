"""Can one client make a router stand still for all others, or take its memory?

    python -m benchmarks.router.router_stall --out benchmarks/results/router-stall-cpu.jsonl
    python -m benchmarks.router.router_stall --only chat-10mb stops
    python -m benchmarks.router.router_stall --list

A router runs in a process of its own, as `pdserve up` starts it (its own HTTP server, application
and fleet, under uvloop). An engine on paper is in another process. A third process reads 8 streams
of 50 tokens per second. It asks for /health twenty times per second, each time on a new connection.
A fourth process sends the rows of hostile_requests.py. Each row has a new router, and is measured
twice: without the request (control) and with it.

- gap: Longest time without a token of the 8 streams. Target: at most 100 ms, or 50 ms above the
  control.
- health: Longest time until /health answered.
- memory: Peak of the router's resident memory above its value before. Target: at most 200 MB.
- refusal: Time from the request's last byte to the refusal's first. Target: at most 1 s.
- witness: Largest delay of a timer in the process that measures, which the machine itself adds.
- engine: Largest delay of a step of the engine on paper.

The exit code is 1 if a row misses a target. A row that misses is tried again, --attempts times in
all, because the machine may be busy. The last attempt counts. Everything stays on 127.0.0.1, and
the router may use at most --memory-gb.
"""

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.router.hostile.sending import ROWS, Answer, Row
from benchmarks.router.hostile_requests import run_sender, warm_up
from benchmarks.router.watched_router import run_engine, run_router
from benchmarks.router.watcher import MAX_GAP_MS, NUM_STREAMS, Window, run_watcher
from benchmarks.support.served_cluster import await_ready, free_port
from benchmarks.support.yardstick import bare_us_per_token, beside
from pdserve.bench.option_values import POSITIVE, integer
from pdserve.bench.record import append, check_writable, circumstances

SAMPLE_S = 0.004
CALM_S = 0.5  # streams must have flowed for this long before a row ends
GIVE_UP_S = 60.0  # a router that is still silent this long after the request's end counts as stuck
MAX_ADDED_MS = 50.0
MAX_MEMORY_MB = 200.0
MAX_REFUSAL_S = 1.0

_spawn = multiprocessing.get_context("spawn")


# A row from start to end.


class _Memory:
    """Reads the resident memory of a process, and keeps the largest value."""

    def __init__(self, pid: int) -> None:
        self._path = f"/proc/{pid}/statm"
        self._page = os.sysconf("SC_PAGE_SIZE")
        self.peak_mb = 0.0

    def sample(self) -> float:
        """Returns the current megabytes, or 0 if the process has ended."""
        with contextlib.suppress(OSError), open(self._path) as file:
            now_mb = int(file.read().split()[1]) * self._page / 1e6
            self.peak_mb = max(self.peak_mb, now_mb)
            return now_mb
        return 0.0


@dataclass
class Result:
    """The result of one row. `misses` lists the missed targets."""

    row: str
    gap_ms: float
    control_gap_ms: float
    health_ms: float
    memory_mb: float
    refusal_s: float | None
    statuses: dict[str, int]
    said: str
    seconds: float
    witness_ms: float
    control_witness_ms: float
    engine_late_ms: float
    num_lost: int
    misses: list[str]


@contextlib.contextmanager
def _process(target: Any, *args: Any) -> Iterator[BaseProcess]:
    process = _spawn.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


class Bench:
    """Runs rows one after the other. One process sends all of them."""

    def __init__(self, control_s: float, memory_gb: float, folder: Path) -> None:
        self._control_s = control_s
        self._memory_bytes = int(memory_gb * 1e9)
        self._folder = folder
        self._sender_pipe, theirs = _spawn.Pipe()
        self._sender = _spawn.Process(target=run_sender, args=(theirs,), daemon=True)
        self._sender.start()

    def close(self) -> None:
        self._sender.kill()
        self._sender.join()

    def run(self, row: Row) -> Result:
        self._sender_pipe.send(row.name)
        address = f"ipc://{self._folder}/engine"
        port = free_port()
        log = str(self._folder / "log")
        late = _spawn.Value("d", 0.0)
        with (
            _process(run_engine, address, late),
            _process(run_router, address, port, log, self._memory_bytes) as router,
        ):
            await_ready(router.is_alive, f"http://127.0.0.1:{port}", 60.0)
            warm_up(port)
            self._sender_pipe.recv()  # waits for "ready"
            ours, theirs = _spawn.Pipe()
            with _process(run_watcher, port, theirs):
                return self._measure(row, router, port, ours, late)

    def _measure(
        self, row: Row, router: BaseProcess, port: int, watcher: Connection, late: Any
    ) -> Result:
        assert router.pid is not None
        memory = _Memory(router.pid)
        if not self._calm(watcher, router):
            raise RuntimeError(f"{NUM_STREAMS} streams do not flow before anything else was sent")
        _look(watcher)
        time.sleep(self._control_s)
        control = _look(watcher)
        base_mb = memory.sample()
        late.value = 0.0
        began = time.monotonic()
        self._sender_pipe.send(port)
        while not self._sender_pipe.poll(SAMPLE_S):
            memory.sample()
        answers: list[Answer] = self._sender_pipe.recv()
        seconds = time.monotonic() - began
        self._calm(watcher, router, memory)
        seen = _look(watcher)
        refusals = [answer.seconds for answer in answers if answer.refused]
        result = Result(
            row=row.name,
            gap_ms=round(seen.gap_ms, 1),
            control_gap_ms=round(control.gap_ms, 1),
            health_ms=round(seen.health_ms, 1),
            memory_mb=round(memory.peak_mb - base_mb, 1),
            refusal_s=round(max(refusals), 3) if refusals else None,
            statuses=dict(Counter(_shown(answer.status) for answer in answers)),
            said=next((answer.head for answer in answers if answer.refused), ""),
            seconds=round(seconds, 2),
            witness_ms=round(seen.witness_ms, 1),
            control_witness_ms=round(control.witness_ms, 1),
            engine_late_ms=round(1000 * late.value, 1),
            num_lost=seen.num_lost,
            misses=[],
        )
        result.misses = misses(row, result, router.is_alive())
        return result

    def _calm(
        self, watcher: Connection, router: BaseProcess, memory: _Memory | None = None
    ) -> bool:
        """Waits until all streams have flowed for a while, from now on. Returns False if they do
        not."""
        began = time.monotonic()
        while time.monotonic() < began + GIVE_UP_S and router.is_alive():
            watcher.send("calm")
            if min(watcher.recv(), time.monotonic() - began) >= CALM_S:
                return True
            until = time.monotonic() + 0.1
            while time.monotonic() < until:
                if memory is not None:
                    memory.sample()
                time.sleep(SAMPLE_S)
        return False


def _look(watcher: Connection) -> Window:
    watcher.send("look")
    window = watcher.recv()
    assert isinstance(window, Window)
    return window


def _shown(status: int | None) -> str:
    return {None: "open", 0: "closed"}.get(status, str(status))


def misses(row: Row, result: Result, is_alive: bool) -> list[str]:
    """Returns the missed targets, in words."""
    found = []
    if not is_alive:
        found.append("the router died")
    if result.num_lost:
        found.append(f"{result.num_lost} streams lost")
    if result.gap_ms > max(MAX_GAP_MS, result.control_gap_ms + MAX_ADDED_MS):
        found.append(f"gap {result.gap_ms:.0f} ms")
    if result.memory_mb > MAX_MEMORY_MB:
        found.append(f"memory {result.memory_mb:.0f} MB")
    if result.refusal_s is not None and result.refusal_s > MAX_REFUSAL_S:
        found.append(f"refused after {result.refusal_s:.1f} s")
    if "500" in result.statuses:
        found.append("HTTP 500")
    if row.wanted != "open" and "open" in result.statuses:
        found.append(f"no answer within {row.limit_s:g} s")
    if row.wanted == "answered" and set(result.statuses) != {"200"}:
        found.append(f"a fair request got {result.statuses}")
    return found


def table(results: Sequence[Result]) -> str:
    """Returns a Markdown table with one line per row."""
    names = (
        "gap, ms",
        "control",
        "/health",
        "memory, MB",
        "refused, s",
        "witness, ms",
        "engine, ms",
    )
    lines = [
        f"| row | {' | '.join(names)} | answers | misses |",
        "|---|" + "---:|" * len(names) + "---|---|",
    ]
    for result in results:
        cells = [
            result.row,
            f"{result.gap_ms:.0f}",
            f"{result.control_gap_ms:.0f}",
            f"{result.health_ms:.0f}",
            f"{result.memory_mb:.0f}",
            "" if result.refusal_s is None else f"{result.refusal_s:.2f}",
            f"{result.witness_ms:.0f}",
            f"{result.engine_late_ms:.0f}",
            ", ".join(f"{count} x {status}" for status, count in result.statuses.items()),
            "; ".join(result.misses),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(ROWS), metavar="ROW", help="run only these rows (--list)"
    )
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument(
        "--attempts", type=integer(1), default=2, help="attempts of a row that misses"
    )
    parser.add_argument(
        "--control-s", type=POSITIVE, default=3.0, help="seconds without the request"
    )
    parser.add_argument(
        "--memory-gb",
        type=POSITIVE,
        default=6.0,
        help="memory limit of the router, so that it ends and not the machine",
    )
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    options = parser.parse_args()
    if options.list:
        for row in ROWS.values():
            print(f"{row.name:20} {row.what}")
        return 0
    check_writable(options.out)
    bare = bare_us_per_token()
    results = []
    with tempfile.TemporaryDirectory(prefix="pdserve-") as folder:
        bench = Bench(options.control_s, options.memory_gb, Path(folder))
        try:
            for row in (bar := tqdm([ROWS[name] for name in options.only or ROWS], unit="row")):
                bar.set_description(row.name)
                result = bench.run(row)
                for _ in range(options.attempts - 1):
                    result = bench.run(row) if result.misses else result
                results.append(result)
                figures = {"benchmark": "router_stall", "what": row.what, **asdict(result)}
                machine = {"cores": os.cpu_count(), "bare_us_per_token": bare}
                append(options.out, figures | machine | circumstances())
                if result.misses:
                    tqdm.write(f"{row.name}: {'; '.join(result.misses)}")
        finally:
            bench.close()
    print(f"{table(results)}\n\n{beside(bare)}")
    missed = [result.row for result in results if result.misses]
    print(
        f"{len(results) - len(missed)} of {len(results)} rows as wanted"
        + (f"; not {', '.join(missed)}" if missed else "")
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
