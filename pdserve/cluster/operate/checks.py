"""Everything that can be checked about a cluster before it starts, as one list of checks.

`pdserve doctor` prints all findings; `pdserve up` prints the hints and stops at errors. A check
looks at this machine and at the nodes that it is given; it starts nothing. Ray is imported inside
functions only (see `cluster.operate.ray_settings` for the reason).
"""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.cluster.access import has_keys, is_open, open_door
from pdserve.cluster.operate.cluster_file import ClusterFile
from pdserve.cluster.placement.placement import Node, described, resource_names, unplaceable
from pdserve.configs.schema import ClusterConfig, DeploymentConfig, WorkerKey
from pdserve.models.checkpoint import (
    resolve_folder,
    tensor_entries,
    tokenizer_folder,
    weight_files,
)
from pdserve.models.config import read_spec
from pdserve.parallel.dims import dims_of
from pdserve.router.http.access.auth import ApiKeys
from pdserve.router.request.traces.settings import check_traces
from pdserve.text.tokenizer import Tokenizer

Kind = Literal["ok", "hint", "error"]
Finding = tuple[Kind, str]
"""An error keeps the cluster from working; a hint is about something that may be a mistake."""

MAX_PORT = 65535
CONNECT_S = 5.0


@dataclass(frozen=True)
class Place:
    """The nodes that a cluster would run on. `is_here` means a Ray of its own, on this machine
    alone."""

    nodes: Sequence[Node]
    is_here: bool


def findings(file: ClusterFile, port: int | None, place: Place) -> Iterator[Finding]:
    """Yields everything that is found; what is all right is not reported.

    `port` replaces the file's port.
    """
    host = file.http_options["host"]
    own_port = file.http_options["port"]
    yield from unused_keys(file)
    yield from listener(file)
    yield from port_is_free(host, own_port if port is None else port)
    yield from keys(file.config, place)
    yield from traces(file.config, place)
    yield from model(file.config, place)
    for key in file.config.worker_keys:
        yield from device(file.config, key, place)
    yield from capacity(file.config, place)


def this_machine() -> Place:
    """Returns the resources that a Ray started here would find.

    Ray's own code computes them, and starts nothing.
    """
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    spec = ResourceAndLabelSpec().resolve(is_head=True, node_ip_address="127.0.0.1")
    resources = spec.to_resource_dict()
    return Place([Node("this machine", resources, resources, spec.labels or {})], is_here=True)


def ray_answers(address: str, name: str) -> None:
    """Raises ValueError if nothing answers at an address host:port; Ray itself would try for
    minutes.

    `name` is the variable or option that holds the address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return  # it is "auto", or has a scheme that Ray knows
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{name} is {address}, but nothing answers there ({why}): start Ray there (`ray start "
            f"--head`), or leave {name} out to use Ray on this machine"
        ) from error


def unused_keys(file: ClusterFile) -> Iterator[Finding]:
    if file.unused:
        names = ", ".join(file.unused)
        yield "hint", f"{names}: only `serve run` uses this, `pdserve up` ignores it"


def listener(file: ClusterFile) -> Iterator[Finding]:
    """Reports settings by which strangers can send requests."""
    host = file.http_options["host"]
    config = file.config
    if not file.names_host:
        yield (
            "hint",
            f"http_options.host is not set: `pdserve up` listens on {host}, `serve run` on every "
            "interface; set it so that both do the same",
        )
    if is_open(host) and not has_keys(config):
        yield "hint", open_door(host)


def port_is_free(host: str, port: object) -> Iterator[Finding]:
    """Reports a port that cannot be used. Serve's own complaint comes late, and in a log."""
    if not isinstance(port, int) or not 1 <= port <= MAX_PORT:
        yield "error", f"http_options.port must be from 1 to {MAX_PORT}, not {port!r}"
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            yield (
                "error",
                f"port {port} of {host} cannot be used ({error.strerror or error}): end the "
                "process that uses it, or choose another port by http_options.port or --port",
            )


def keys(config: ClusterConfig, place: Place) -> Iterator[Finding]:
    try:
        ApiKeys(config.router)  # each router reads the same keys on its own node
    except (ValueError, OSError) as error:
        if place.is_here:
            yield "error", f"{error}"
        else:
            yield "hint", f"wrong on this node, and each node with a router needs it: {error}"


def traces(config: ClusterConfig, place: Place) -> Iterator[Finding]:
    try:
        check_traces(config.traces)  # each router needs the same on its own node
    except ValueError as error:
        if place.is_here:
            yield "error", f"{error}"
        else:
            yield "hint", f"wrong on this node, and each node with a router needs it: {error}"


def model(config: ClusterConfig, place: Place) -> Iterator[Finding]:
    """Checks the model's folder, or what the Hub has of it without the weights.

    Elsewhere every node reads its own copy, so a fault in the copy here is only a hint.
    """
    try:
        folder = resolve_folder(config.model.resolved_path, "dummy", config.model.revision)
        spec = read_spec(
            str(folder),
            "dummy",
            quantization=config.model.quantization,
            activation_dtype=config.model.activation_dtype,
        )
        Tokenizer.load(tokenizer_folder(config.model), config.model.template())
        if config.model.load_format == "auto" and str(folder) == config.model.resolved_path:
            for file in weight_files(folder):
                list(tensor_entries(file))  # reads only headers: complete, and safetensors
    except (ValueError, OSError) as error:
        if place.is_here:
            yield "error", f"model: {error}"
        else:
            yield "hint", f"model, in this node's copy (each node reads its own): {error}"
        return
    for key in config.worker_keys:
        try:
            engine = config.worker(key).engine
            spec.max_len(engine.max_model_len)
            spec.check_parallel(dims_of(engine), engine.redundant_experts)
        except ValueError as error:
            yield "error", f"{key}: {error}"


def device(config: ClusterConfig, key: WorkerKey, place: Place) -> Iterator[Finding]:
    chosen = config.worker(key).engine.device
    num_gpus = config.deployment(key).num_gpus
    gpus_here = any(node.total.get("GPU") for node in place.nodes)
    if chosen == "cuda" and not num_gpus:
        yield (
            "error",
            f"{key}.num_gpus is 0, but its engine.device is cuda: Ray would start workers on any "
            "node, and all of them would use the first GPU there. Set "
            f"{key}.num_gpus: 1 (less than 1 shares a GPU: pdserve/configs/one-gpu.yaml), or "
            "engine.device: cpu",
        )
    if chosen == "auto" and not num_gpus and gpus_here:
        yield (
            "hint",
            f"{key}.num_gpus is 0 and its engine.device is auto: all engines on a node with GPUs "
            "would use the first one, and Ray would not know. "
            f"Set {key}.num_gpus: 1, or engine.device: cpu",
        )
    if chosen == "cpu" and num_gpus:
        yield (
            "hint",
            f"{key}.num_gpus is {num_gpus:g}, but its engine.device is cpu: Ray reserves GPUs that "
            "are never used",
        )
    num_ranks = config.worker(key).engine.num_ranks
    if 0 < num_gpus < 1 and num_ranks > 1:
        yield (
            "hint",
            f"{key}.num_gpus is {num_gpus:g}, and its engines have {num_ranks} ranks: rank 0 of "
            "each worker takes the first GPU of its node, rank 1 the second and so on, even if "
            "other workers use them too; set engine.kv_memory_fraction to leave room for these",
        )
    if num_gpus > 1:
        yield (
            "hint",
            f"{key}.num_gpus is {num_gpus:g}, but a rank uses one GPU: set it to 1, and choose "
            "engine.tensor_parallel, engine.data_parallel and engine.pipeline_parallel so that "
            "their product is the number of GPUs",
        )


def capacity(config: ClusterConfig, place: Place) -> Iterator[Finding]:
    empty = [node.emptied() for node in place.nodes]
    have = "The nodes have\n" + described(empty, sorted(resource_names(config)))
    if complaints := unplaceable(config, empty):
        fixed = place.is_here or config.placement_deadline_s is not None
        text = "there is no room for this cluster, even if nothing else used the nodes"
        text += " (set RAY_ADDRESS to use the nodes of a running Ray)" if place.is_here else ""
        yield "error" if fixed else "hint", "\n".join([f"{text}:", *complaints, have])
    elif complaints := unplaceable(_at_most(config), empty):
        text = (
            "there is no room for as many workers as autoscaling.max allows: some of them will "
            "not start, unless Ray's autoscaler adds nodes"
        )
        yield "hint", "\n".join([f"{text}:", *complaints, have])


def _at_most(config: ClusterConfig) -> ClusterConfig:
    """Returns the same configuration with all the workers that autoscaling may ask for."""
    largest: dict[str, DeploymentConfig] = {}
    for key in config.worker_keys:
        deployment = config.deployment(key)
        if deployment.autoscaling is not None:
            bound = {"replicas": deployment.autoscaling.max}
            largest[key] = deployment.model_copy(update=bound)
    return config.model_copy(update=largest)
