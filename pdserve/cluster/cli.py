"""The command line `pdserve`.

`pdserve up CLUSTER.yaml` or `pdserve up --model MODEL` serves a cluster on this machine.
`pdserve doctor` reports what is missing.
`pdserve bench` measures.
`pdserve workers | role | scale | expert-load` look at a running cluster and change it
(`operate.commands`).
`pdserve chat` talks to its model.
`pdserve dashboard` prints a dashboard for Grafana.

This module knows the options, and which module does what. It never imports Ray (see
`cluster.operate.ray_settings` for the reason). The entry point is `main`, see pyproject.toml.
"""

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

from pdserve.bench.cli import add_bench_arguments, run_bench
from pdserve.bench.option_values import POSITIVE, integer
from pdserve.calibration.cli import add_calibrate_arguments, run_calibrate
from pdserve.chat.cli import add_chat_arguments, run_chat
from pdserve.cluster.operate.checks import MAX_PORT
from pdserve.cluster.operate.cluster_options import add_cluster_options, options_of
from pdserve.cluster.operate.commands import COMMANDS, add_operator_arguments, run_operator
from pdserve.cluster.operate.dashboard import dashboard
from pdserve.cluster.operate.doctor import doctor
from pdserve.cluster.operate.ray_settings import SETTINGS
from pdserve.cluster.operate.sentences import told
from pdserve.cluster.operate.up import up
from pdserve.plan.cli import COMMANDS as PLAN_COMMANDS
from pdserve.plan.cli import add_plan_arguments, run_plan_command


def main(argv: list[str] | None = None) -> int:
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # who read the output has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="pdserve", description="Disaggregated LLM serving on Ray")
    parser.add_argument("--version", action="version", version=f"pdserve {version('pdserve')}")
    commands = parser.add_subparsers(dest="command", required=True)
    up_parser = commands.add_parser("up", help="serve a cluster on this machine until Ctrl-C")
    up_parser.add_argument(
        "cluster",
        type=Path,
        nargs="?",
        help="cluster file, such as cluster.yaml; without it and --model the demo is served",
    )
    add_cluster_options(up_parser)
    up_parser.add_argument(
        "--port", type=integer(1, MAX_PORT), help="HTTP port; overrides the one in the file"
    )
    up_parser.add_argument(
        "--print-yaml",
        action="store_true",
        help="print these options as a cluster file, which `serve run` takes, and serve nothing",
    )
    up_parser.add_argument(
        "--hub-token-file",
        type=Path,
        metavar="FILE",
        help="file that holds the Hub's token for all nodes; overrides HF_TOKEN",
    )
    up_parser.add_argument("--haproxy", action="store_true", help="put HAProxy before the routers")
    up_parser.add_argument(
        "--timeout",
        type=POSITIVE,
        default=600.0,
        help="seconds within which the cluster must be ready (default 600)",
    )
    doctor_parser = commands.add_parser(
        "doctor", help="report what this machine lacks and what is wrong in a cluster file"
    )
    doctor_parser.add_argument(
        "cluster",
        type=Path,
        nargs="?",
        help="cluster file (default: cluster.yaml in this folder, if there is one)",
    )
    add_chat_arguments(commands.add_parser("chat", help="talk to the model of a running server"))
    dashboard_parser = commands.add_parser(
        "dashboard", help="print a Grafana dashboard of the cluster"
    )
    dashboard_parser.add_argument(
        "--source",
        choices=("ray", "routers"),
        default="ray",
        help="what Prometheus scrapes: Ray's exporters (default) or the routers' own /metrics",
    )
    add_bench_arguments(commands.add_parser("bench", help="measure an engine or a running server"))
    add_plan_arguments(commands)
    add_calibrate_arguments(
        commands.add_parser("calibrate-kv", help="find scales for a KV cache in fp8")
    )
    add_operator_arguments(commands)
    options = parser.parse_args(argv)
    try:
        if options.command == "bench":
            return run_bench(options)
        if options.command == "chat":
            return run_chat(options)
        if options.command == "calibrate-kv":
            return run_calibrate(options)
        if options.command in PLAN_COMMANDS:
            return run_plan_command(options)
        if options.command in COMMANDS:
            os.environ.setdefault("RAY_AUTH_MODE", SETTINGS["RAY_AUTH_MODE"][0])  # as `up` does
            return run_operator(options)
        if options.command == "dashboard":
            print(json.dumps(dashboard(options.source), indent=1))
            return 0
        if options.command == "doctor":
            return doctor(options.cluster)
        return up(
            options.cluster,
            options_of(options),
            options.port,
            options.haproxy,
            options.timeout,
            options.print_yaml,
            options.hub_token_file,
        )
    except (ValueError, OSError) as error:
        sys.stdout.flush()  # raises BrokenPipeError if that was the error
        print(f"pdserve: {told(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
