"""Measures the rows of a table of targets, of one engine offline and of a server, and shows them
beside vLLM's figures.

    python -m benchmarks.targets --out benchmarks/results/targets-h200.jsonl  # all rows, one GPU
    python -m benchmarks.targets --only offline --only http-32  # parts and single rows
    python -m benchmarks.targets --only pair  # two GPUs: 1P + 1D
    python -m benchmarks.targets --only pair-15 --split auto --slo 150 6.5  # with promises
    python -m benchmarks.targets --only pair --replicas  # or two whole workers
    python -m benchmarks.targets --from benchmarks/results/targets-h200.jsonl  # only the table
    python -m benchmarks.targets --table benchmarks/targets/qwen3-30b-a3b.toml  # another model

Rows and figures are in targets.toml. Other models have tables of their own beside it. A table names
its model (--model takes another) and has ids of its own, so one --out file can hold several models.

The start row runs first, then the other offline rows with one engine. Both run in processes of
their own, which free the device when they end. HTTP rows follow, against `pdserve up` with one
aggregated worker (or --url). Offline figures are medians of --repeats runs. HTTP figures come from
one run with as many requests as the table says. With a server of its own, two more tables show
where the time of these requests went, and what each worker did. Options of the engine are those of
`pdserve bench`. Each result is printed and appended to --out at once.
"""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.cluster.http_share import report as share_report
from benchmarks.cluster.http_share import share_of
from benchmarks.cluster.worker_use import report as use_report
from benchmarks.support.places import BENCHMARKS
from benchmarks.support.served_cluster import CLI, cluster_yaml, environment, free_port, serving
from benchmarks.support.stand_in_tokenizer import servable_folder
from benchmarks.targets.table import (
    HttpRow,
    OfflineRow,
    Row,
    choose,
    read_model,
    read_results,
    read_rows,
    render,
)
from pdserve.bench.cli import (
    add_model_arguments,
    add_output_arguments,
    engine_fields,
    model_fields,
    offline_line,
    serve_report,
)
from pdserve.bench.load import LoadConfig, LoadResult, run_load
from pdserve.bench.option_values import POSITIVE, integer
from pdserve.bench.record import Json, append, check_writable, circumstances, gpu_name, repeated
from pdserve.bench.workload import Shape

DEADLINE_S = 300.0
JOIN_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table",
        type=Path,
        default=BENCHMARKS / "targets" / "targets.toml",
        help="table of rows and figures to beat; it also names the model if --model is not given",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="measure only these rows: offline, http, pair or a row's id; may be repeated",
    )
    parser.add_argument(
        "--sequential",
        action="store_true",
        help="pair rows: D pulls only after P has computed the whole prompt",
    )
    parser.add_argument(
        "--split",
        choices=["always", "auto"],
        default="always",
        help="pair rows: which prompts P computes",
    )
    parser.add_argument(
        "--slo",
        type=promised,
        nargs=2,
        metavar=("TTFT_MS", "TPOT_MS"),
        help="HTTP rows: what the cluster promises (`none`: nothing); late requests are not "
        "refused",
    )
    parser.add_argument(
        "--replicas",
        action="store_true",
        help="pair rows: two workers that do whole requests, instead of P and D",
    )
    parser.add_argument(
        "--from", type=Path, dest="saved", help="only show the results of this file"
    )
    parser.add_argument(
        "--url", help="send HTTP rows to this running server instead of starting one"
    )
    parser.add_argument(
        "--haproxy", action="store_true", help="start the server with HAProxy in front"
    )
    parser.add_argument(
        "--repeats", type=integer(1), default=3, help="timed runs of each offline row (default 3)"
    )
    add_model_arguments(parser)
    parser.set_defaults(model=None, load_format="dummy")
    parser.set_defaults(engine_max_num_batched_tokens="8192", engine_max_num_seqs="512")
    add_output_arguments(parser)
    options = parser.parse_args()
    try:
        options.model = options.model or str(read_model(options.table))
        rows = choose(read_rows(options.table), options.only)
        results, failures = (
            (read_results(options.saved), []) if options.saved else measure(rows, options)
        )
    except (ValueError, OSError) as error:
        print(f"targets: {error}", file=sys.stderr)
        return 2
    print("\n" + render(rows, results))
    if shares := [
        share
        for row in rows
        if (result := results.get(row.id)) and (share := result["figures"].get("share"))
    ]:
        print(
            "\nWhere the time of these requests went (benchmarks.cluster.http_share)\n\n"
            + share_report(shares)
        )
        if known := [share for share in shares if "workers" in share]:
            print("\nWhat the workers did (benchmarks.cluster.worker_use)\n\n" + use_report(known))
    for failure in failures:
        print(f"targets: {failure}", file=sys.stderr)
    return 1 if failures else 0


def promised(text: str) -> float | None:
    """Parses a promised time in milliseconds, or `none`."""
    return None if text == "none" else POSITIVE(text)


def exit_at_signal(*_: object) -> None:
    """Exits on a signal. Everything that was started here is stopped."""
    sys.exit(128 + signal.SIGTERM)


def measure(rows: Sequence[Row], options: argparse.Namespace) -> tuple[dict[str, Json], list[str]]:
    """Measures rows. Returns the results by row id, and the failures of parts. Raises ValueError if
    the options are wrong."""
    check_writable(options.out)
    engine = engine_fields(options)
    device = "cpu" if options.engine_device == "cpu" else gpu_name()
    results: dict[str, Json] = {}
    failures: list[str] = []
    http = (_http(rows, options, is_pair) for is_pair in (False, True))
    for part in (_start(rows, options), _offline(rows, options), *http):
        try:
            for row, figures in part:
                result = {
                    "benchmark": "targets",
                    "row": row.id,
                    "model": Path(options.model).name,
                    "device": device,
                    "shape": str(row.shape),
                    "figures": figures,
                    "engine": engine,
                    **circumstances(options.commit),
                }
                append(options.out, result)
                results[row.id] = result
        except (ValueError, OSError) as error:
            failures.append(str(error))
    return results, failures


def _engine_arguments(options: argparse.Namespace) -> list[str]:
    """Returns the options of model and engine as words of a command line."""
    given = {
        name: text
        for name, text in vars(options).items()
        if name.startswith("engine_") and text is not None
    }
    flags = {
        f"--{name.removeprefix('engine_').replace('_', '-')}": text for name, text in given.items()
    }
    model = {"model": options.model, **model_fields(options)}
    flags |= {
        f"--{name.replace('_', '-')}": value for name, value in model.items() if value is not None
    }
    return [part for flag in flags.items() for part in flag]


def _start(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[tuple[Row, Json]]:
    for row in rows:
        if isinstance(row, OfflineRow) and row.kind == "start":
            yield row, start_figures(options)


def start_figures(options: argparse.Namespace) -> Json:
    """Measures the seconds from starting a Python process to its first token. Also returns the
    number of compiled kernels that Triton had cached before."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    num_cached = len(list(cache.glob("*"))) if cache.is_dir() else 0
    command = [
        *CLI,
        "bench",
        "latency",
        *_engine_arguments(options),
        "--input-len",
        "16",
        "--output-len",
        "1",
    ]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, "--repeats", "1"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        watchdog = threading.Timer(DEADLINE_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # the process prints it after the first token
            seconds = time.perf_counter() - began
            process.stdout.read()
            if process.wait() != 0 or not line:
                errors.seek(0)
                raise ValueError(
                    "the start row failed: "
                    f"{errors.read()[-2000:] or f'no end in {DEADLINE_S:g} s'}"
                )
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()
    print(
        f"start: {seconds:.1f} s ({num_cached} kernels in Triton's cache before); {line.strip()}",
        flush=True,
    )
    return {"seconds": repeated([seconds]), "num_cached_kernels": num_cached}


def _offline(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[tuple[Row, Json]]:
    offline = [row for row in rows if isinstance(row, OfflineRow) and row.kind != "start"]
    if not offline:
        return
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_offline, args=(offline, options, sender))
    process.start()
    sender.close()
    try:
        for row in offline:
            try:
                figures = receiver.recv()
            except EOFError as error:
                raise ValueError(f"the offline rows ended before {row.id}, with no word") from error
            if isinstance(figures, str):
                raise ValueError(figures)
            print(f"{row.id}: {offline_line(figures)}", flush=True)
            yield row, figures
    finally:
        process.join(JOIN_S)
        process.kill()


def _measure_offline(
    rows: Sequence[OfflineRow], options: argparse.Namespace, out: Connection
) -> None:
    """Sends the figures of each row. If a row fails, a text with the reason is sent instead."""
    from pdserve.bench.offline import Bench, OfflineConfig

    try:
        engine = engine_fields(options)
        bench = Bench(OfflineConfig(options.model, model_fields(options), engine, options.repeats))
        for row in rows:
            assert row.shape is not None
            run = {"latency": bench.latency, "throughput": bench.throughput}[row.kind]
            for _, figures in run([row.shape]):
                out.send(figures)
    except (ValueError, OSError, RuntimeError) as error:
        out.send(str(error))


def _http(
    rows: Sequence[Row], options: argparse.Namespace, is_pair: bool
) -> Iterator[tuple[Row, Json]]:
    http = [row for row in rows if isinstance(row, HttpRow) and row.is_pair == is_pair]
    if not http:
        return
    vocab_size = json.loads((Path(options.model) / "config.json").read_text())["vocab_size"]
    with _server(options, is_pair) as url:
        for row in http:
            load = LoadConfig(url, row.shape, row.clients, row.rate, vocab_size=vocab_size)
            result, share = (run_load(load), None) if options.url else _load_with_share(load)
            print(f"{row.id}: {serve_report(load, result)}", flush=True)
            yield row, result.figures() | ({"share": share} if share else {})


def _load_with_share(load: LoadConfig) -> tuple[LoadResult, Json | None]:
    """Runs a load. Also returns where its time went, by the router's counters. Warm-ups are not
    counted."""
    warm_up = Shape(load.num_warmups, load.shape.input_len, load.shape.output_len)
    run_load(
        replace(load, shape=warm_up, clients=1, rate=None, num_warmups=0, seed=load.seed + 1),
        progress=False,
    )
    return share_of(replace(load, num_warmups=0))


@contextmanager
def _server(options: argparse.Namespace, is_pair: bool) -> Iterator[str]:
    """Yields --url, or the URL of a `pdserve up` that ends with the context."""
    if options.url:
        yield options.url
        return
    with tempfile.TemporaryDirectory(prefix="pdserve-targets-") as scratch:
        port = free_port()
        document = cluster_document(options, Path(scratch), port, is_pair)
        began = time.perf_counter()
        with serving(
            document, port, CLI, DEADLINE_S, ["--haproxy"] if options.haproxy else []
        ) as server:
            print(f"pdserve up: ready after {time.perf_counter() - began:.1f} s", flush=True)
            yield server.url


def cluster_document(
    options: argparse.Namespace, scratch: Path, port: int, is_pair: bool
) -> dict[str, Any]:
    """Makes the cluster.yaml of one aggregated worker, or of a prefill and a decode worker, with
    the options' model and engine."""
    num_gpus = 0 if options.engine_device == "cpu" or gpu_name() == "cpu" else 1
    model = {
        "path": str(servable_folder(Path(options.model), scratch).resolve()),
        "name": Path(options.model).name,
        **model_fields(options),
    }
    splits = is_pair and not options.replicas
    args: dict[str, Any] = {
        "mode": "disaggregated" if splits else "aggregated",
        "model": model,
        "engine": engine_fields(options),
        "router": {"split": options.split},
        "transfer": {"overlap": False if options.sequential else "auto"},
        "prefill": {"replicas": 1, "num_gpus": num_gpus},
        "decode": {"replicas": 2 if is_pair and options.replicas else 1, "num_gpus": num_gpus},
    }
    if options.slo is not None:
        ttft_ms, tpot_ms = options.slo
        args["slo"] = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "refuse_beyond": None}
    return cluster_yaml(args, port)
