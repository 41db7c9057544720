"""`pdserve workers | role | scale | expert-load`: looks at a running cluster and changes it,
through the Python client.

So the commands work wherever the cluster runs (`pdserve up`, `serve run`, behind HAProxy, many
nodes), for anyone who has Ray's token; no port listens for them. Ray is imported inside functions
only (see `cluster.operate.ray_settings` for the reason). `cluster.cli` calls this.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pdserve.bench.option_values import integer
from pdserve.cluster.operate.checks import ray_answers
from pdserve.configs.schema import Role
from pdserve.kernels.experts.load_file import write_load
from pdserve.router.admin import ClusterReport
from pdserve.router.expert_load import ExpertLoadReport

if TYPE_CHECKING:
    from pdserve.cluster.client import Client

COMMANDS = ("workers", "role", "scale", "expert-load")
ROLES = get_args(Role)
LOOK_S = 0.5


def add_operator_arguments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    force = argparse.ArgumentParser(add_help=False)
    force.add_argument(
        "--force", action="store_true", help="do it even if no worker might be left that can decode"
    )
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--app", default="pdserve", help="name of the application (default pdserve)")
    where.add_argument(
        "--address",
        help="address of the Ray cluster (default: RAY_ADDRESS, or Ray on this machine)",
    )
    commands.add_parser(
        "workers", parents=[where], help="show which workers there are, and what they do"
    )
    role = commands.add_parser(
        "role", parents=[where, force], help="change the role of a worker while it serves"
    )
    role.add_argument("worker", help="id of the worker, or the part of it after #")
    role.add_argument("role", choices=ROLES)
    scale = commands.add_parser(
        "scale", parents=[where, force], help="change how many workers there are"
    )
    scale.add_argument("counts", nargs="+", metavar="prefill=N|decode=N", type=_count)
    text = "seconds within which the workers must run (default 300); 0: do not wait"
    scale.add_argument("--wait", type=integer(0), default=300, help=text)
    load = commands.add_parser(
        "expert-load",
        parents=[where],
        help="write how many rows went to each expert, for engine.expert_load_file",
    )
    load.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="file for the counts, in JSON"
    )
    load.add_argument(
        "--role",
        choices=ROLES,
        default="",
        help="count only the workers that have this role now (default: all workers)",
    )


def run_operator(options: argparse.Namespace) -> int:
    """Runs a command and returns the exit status. Raises ValueError if it cannot be done."""
    from pdserve.cluster.client import ClusterError, connect

    if options.address is not None:
        ray_answers(options.address, "--address")
    elif "RAY_ADDRESS" in os.environ:
        ray_answers(os.environ["RAY_ADDRESS"], "RAY_ADDRESS")
    try:
        with connect(options.address, options.app) as client:
            if options.command == "role":
                report = client.set_role(options.worker, options.role, options.force)
                print(
                    f"{report.worker} is {report.role}, with {report.num_running} sequences running"
                )
                return 0
            if options.command == "scale":
                return _scale(client, dict(options.counts), options.force, options.wait, print)
            if options.command == "expert-load":
                load = client.expert_load(options.role)
                write_load(options.out, load.layers)
                print(f"{options.out}: {summary(load)}")
                return 0
            print("\n".join(table(client.workers())))
            return 0
    except ClusterError as error:
        raise ValueError(str(error)) from error


def _scale(
    client: "Client", counts: dict[str, int], force: bool, wait_s: int, say: Callable[[str], None]
) -> int:
    report = client.scale(counts.get("prefill"), counts.get("decode"), force)
    for warning in report.warnings:
        say(f"pdserve: {warning}")
    deadline = time.monotonic() + wait_s
    shown = ""
    while True:
        line = ", ".join(
            f"{key}: {count.running} of {count.target}" for key, count in report.counts.items()
        )
        if line != shown:
            say(f"pdserve: {line}")
            shown = line
        if wait_s == 0 or is_reached(report, counts):
            return 0
        if time.monotonic() > deadline:
            raise ValueError(
                f"not reached after {wait_s} s ({line}); Serve keeps trying, and `serve status` "
                "says more"
            )
        time.sleep(LOOK_S)
        report = client.workers()


def is_reached(report: ClusterReport, counts: dict[str, int]) -> bool:
    """True if as many workers run as were asked for."""
    return all(
        key in report.counts and report.counts[key].running == count
        for key, count in counts.items()
    )


def table(report: ClusterReport) -> Iterator[str]:
    """Yields lines about workers and counts, and one that says whether splitting pays."""
    rows: list[Sequence[object]] = [
        ("worker", "role", "state", "running", "waiting", "queued tokens", "peers", "blocks free")
    ]
    for worker in report.workers:
        blocks = f"{worker.free_blocks}/{worker.total_blocks}"
        if len(worker.homes) > 1:
            running = "+".join(str(home.num_running) for home in worker.homes)
            free = "+".join(str(home.free_blocks) for home in worker.homes)
            blocks += f" (homes: {running} running, {free} free)"
        numbers = (worker.num_running, worker.num_waiting, worker.queue_tokens, worker.num_peers)
        rows.append((worker.worker, worker.role, worker.state, *numbers, blocks))
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(
            str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
    for key, count in report.counts.items():
        yield f"{key}: {count.running} of {count.target} running"
    if report.splitting:
        yield report.splitting


def summary(load: ExpertLoadReport) -> str:
    """Says what was counted, and how uneven it is: the busiest expert against its layer's mean."""
    layers = load.layers.values()
    num_rows = sum(map(sum, layers))
    num_experts = len(next(iter(layers)))
    peak = max(max(rows) * num_experts / sum(rows) for rows in layers if any(rows))
    return (
        f"{num_rows:,} rows to {num_experts} experts in each of {len(layers)} layers, counted by "
        f"{', '.join(load.workers)}; the busiest expert got {peak:.1f} times its layer's mean"
    )


def _count(text: str) -> tuple[str, int]:
    key, _, number = text.partition("=")
    if key not in ("prefill", "decode") or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: write prefill=N or decode=N")
    return key, int(number)
