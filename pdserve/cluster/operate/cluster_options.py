"""Options of `pdserve up` that stand for a cluster's file, or change one: they make the document
that the file would be.

Knows the keys that options stand for; whether the document is right is for `cluster_file` to say.
"""

import argparse
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import yaml

from pdserve.bench.option_values import integer
from pdserve.cluster.access import is_open
from pdserve.cluster.operate.cluster_file import BUILDER, DEFAULT_HOST, DEFAULT_PORT

MAX_REPLICAS = 10_000


@dataclass(frozen=True)
class Setting:
    """`--set PATH=VALUE`: a key below `args:`, by its dotted path."""

    path: tuple[str, ...]
    value: Any


@dataclass(frozen=True)
class ClusterOptions:
    """None, and no settings: nothing was said. model: a folder or a Hub id. prefill, decode:
    numbers of workers. names: what clients may send as `model`."""

    model: str | None = None
    names: tuple[str, ...] = ()
    prefill: int | None = None
    decode: int | None = None
    settings: tuple[Setting, ...] = ()
    host: str | None = None

    @property
    def say_nothing(self) -> bool:
        """Nothing of what is served."""
        return replace(self, host=None) == ClusterOptions()


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or Hub id of the model, instead of the file's")
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        help="what clients send as `model` (default: the last part); may be repeated: all are "
        "served, metrics have the first",
    )
    parser.add_argument(
        "--served-model-name",
        dest="name",
        action="extend",
        nargs="+",
        metavar="NAME",
        help="the same, as vLLM has it: several names after one another",
    )
    parser.add_argument(
        "--host",
        help="address that HTTP is served at, instead of the file's; 0.0.0.0 is for everybody who "
        "reaches this machine (docs/use/security.md)",
    )
    parser.add_argument(
        "--prefill",
        type=integer(0, MAX_REPLICAS),
        metavar="N",
        help="workers that compute prompts; 0: decode workers do whole requests",
    )
    parser.add_argument(
        "--decode",
        type=integer(1, MAX_REPLICAS),
        metavar="N",
        help="workers that generate (default 1)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=setting,
        metavar="KEY=VALUE",
        help="a key below args:, as engine.max_model_len=8192; may be repeated",
    )


def options_of(parsed: argparse.Namespace) -> ClusterOptions:
    return ClusterOptions(
        parsed.model,
        tuple(parsed.name),
        parsed.prefill,
        parsed.decode,
        tuple(parsed.set),
        parsed.host,
    )


def setting(text: str) -> Setting:
    """Of `a.b=VALUE`, where VALUE is YAML. ArgumentTypeError says what is wrong."""
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KEY=VALUE: write a key below args:, as engine.max_model_len=8192"
        )
    try:
        return Setting(path, yaml.safe_load(value))
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"the value in {text!r} is not YAML: {error}") from error


def document_of(
    given: Mapping[str, Any] | None, options: ClusterOptions, has_gpus: bool
) -> dict[str, Any]:
    """What the file would be that says this. given: the document of a file; None: there is none,
    and every worker gets a GPU if there are any. ValueError where options do not go together."""
    if given is None:
        if options.model is None:
            raise ValueError(
                "say what to serve: a cluster's file, as `pdserve up cluster.yaml`, or a model, as "
                "`pdserve up --model demo/pdserve-demo`; without any option the demo is served"
            )
        document = _skeleton(options.host or DEFAULT_HOST)
    else:
        document = deepcopy(dict(given))
        if options.host is not None:
            document["http_options"] = {
                **(document.get("http_options") or {}),
                "host": options.host,
            }
    args = document["applications"][0]["args"]
    if options.model is not None:
        _put(args, ("model", "path"), options.model)
    if options.names:
        _put_names(args, options.names)
    if given is None or options.prefill is not None:
        args["mode"] = "disaggregated" if options.prefill else "aggregated"
    if options.prefill:
        _put(args, ("prefill", "replicas"), options.prefill)
    elif options.prefill == 0:
        args.pop("prefill", None)
    if options.decode is not None:
        _put(args, ("decode", "replicas"), options.decode)
    if given is None and has_gpus:
        for key in ("prefill", "decode") if options.prefill else ("decode",):
            _put(args, (key, "num_gpus"), 1)
    for each in options.settings:
        _put(args, each.path, each.value)
    return document


def _skeleton(host: str) -> dict[str, Any]:
    """Where others may ask, they may ask every node that has replicas."""
    return {
        "proxy_location": "EveryNode" if is_open(host) else "HeadOnly",
        "http_options": {"host": host, "port": DEFAULT_PORT},
        "applications": [
            {
                "name": "pdserve",
                "route_prefix": "/",
                "import_path": BUILDER,
                "external_scaler_enabled": True,
                "args": {"mode": "aggregated", "decode": {"replicas": 1}},
            }
        ],
    }


def _put_names(args: dict[str, Any], names: tuple[str, ...]) -> None:
    """Instead of those that the file has."""
    _put(args, ("model", "served_names"), list(names))
    args["model"].pop("name", None)
    if len(names) == 1:
        args["model"]["name"] = args["model"].pop("served_names")[0]


def _put(args: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    below = args
    for depth, key in enumerate(path[:-1]):
        inner = below.setdefault(key, {})
        if inner is None:
            inner = below[key] = {}
        if not isinstance(inner, dict):
            raise ValueError(
                f"--set {'.'.join(path)}: {'.'.join(path[: depth + 1])} is {inner!r}, which has no "
                "keys"
            )
        below = inner
    below[path[-1]] = value
