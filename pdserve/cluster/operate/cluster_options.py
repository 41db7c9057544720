"""Options of `pdserve up` that replace a cluster's file or change one: they make the document that
the file would hold.

This module knows the keys that options stand for; `cluster_file` checks whether the document is
right.
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
from pdserve.configs.schema import MAX_REPLICAS


@dataclass(frozen=True)
class Setting:
    """`--set PATH=VALUE`: sets a key below `args:`, given by its dotted path."""

    path: tuple[str, ...]
    value: Any


@dataclass(frozen=True)
class ClusterOptions:
    """The options as given; None, or no settings, means that an option was not given.

    `model` is a folder or a Hub id. `prefill` and `decode` are numbers of workers. `names` are what
    clients may send as `model`.
    """

    model: str | None = None
    names: tuple[str, ...] = ()
    prefill: int | None = None
    decode: int | None = None
    settings: tuple[Setting, ...] = ()
    host: str | None = None

    @property
    def say_nothing(self) -> bool:
        """True if no option says what to serve."""
        return replace(self, host=None) == ClusterOptions()


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or Hub id of the model; overrides the file's")
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        help="name that clients send as `model` (default: the last part of the model's path); may "
        "be repeated, and metrics show the first",
    )
    parser.add_argument(
        "--served-model-name",
        dest="name",
        action="extend",
        nargs="+",
        metavar="NAME",
        help="the same as --name, in vLLM's form: takes several names",
    )
    parser.add_argument(
        "--host",
        help="address to serve HTTP at; overrides the file's; 0.0.0.0 serves everybody who can "
        "reach this machine (docs/use/security.md)",
    )
    parser.add_argument(
        "--prefill",
        type=integer(0, MAX_REPLICAS),
        metavar="N",
        help="number of workers that compute prompts; 0: decode workers do whole requests",
    )
    parser.add_argument(
        "--decode",
        type=integer(1, MAX_REPLICAS),
        metavar="N",
        help="number of workers that generate (default 1)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=setting,
        metavar="KEY=VALUE",
        help="set a key below args:, for example engine.max_model_len=8192; may be repeated",
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
    """Parses `a.b=VALUE`, where VALUE is YAML. Raises an ArgumentTypeError that says what is
    wrong."""
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KEY=VALUE: write a key below args:, such as engine.max_model_len=8192"
        )
    try:
        return Setting(path, yaml.safe_load(value))
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"the value in {text!r} is not YAML: {error}") from error


def document_of(
    given: Mapping[str, Any] | None, options: ClusterOptions, has_gpus: bool
) -> dict[str, Any]:
    """Returns the document of a file that says the same as the given document and the options.

    If `given` is None there is no file, and every worker gets a GPU if there are any. Raises
    ValueError if options contradict each other.
    """
    if given is None:
        if options.model is None:
            raise ValueError(
                "name what to serve: a cluster file (`pdserve up cluster.yaml`) or a model "
                "(`pdserve up --model demo/pdserve-demo`); without any option the demo is served"
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
    """Returns the document without a model.

    If other machines may send requests, they may send them to every node that has replicas.
    """
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
    """Replaces the names that the file has."""
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
