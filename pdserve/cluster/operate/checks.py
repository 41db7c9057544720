"""What can be known of a cluster before anything of it starts: one list of checks.

`pdserve doctor` prints all findings; `pdserve up` prints the hints and stops at errors. A check
asks this machine and the nodes that it is given; it starts nothing. Imports Ray inside functions
only (for `cluster.operate.ray_settings`' reason).
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
"""An error keeps the cluster from working; a hint is what somebody may not have meant."""

MAX_PORT = 65535
CONNECT_S = 5.0


@dataclass(frozen=True)
class Place:
    """Where a cluster would run. is_here: on a Ray of its own, on this machine alone."""

    nodes: Sequence[Node]
    is_here: bool


def findings(file: ClusterFile, port: int | None, place: Place) -> Iterator[Finding]:
    """All that is found, but for what is all right. port: instead of the file's."""
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
    """What a Ray that starts here would find: asked of Ray's own code, which starts nothing."""
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    spec = ResourceAndLabelSpec().resolve(is_head=True, node_ip_address="127.0.0.1")
    resources = spec.to_resource_dict()
    return Place([Node("this machine", resources, resources, spec.labels or {})], is_here=True)


def ray_answers(address: str, name: str) -> None:
    """ValueError when nobody listens at the address, if that is host:port: Ray tries for minutes.
    name: of the variable or option that has it."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return  # "auto", or a scheme that Ray knows
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{name} is {address}, but nobody answers there ({why}): start Ray there (`ray "
            "start --head`), or leave it out for a Ray of this machine"
        ) from error


def unused_keys(file: ClusterFile) -> Iterator[Finding]:
    if file.unused:
        names = ", ".join(file.unused)
        yield "hint", f"{names}: `serve run` heeds this, `pdserve up` does not"


def listener(file: ClusterFile) -> Iterator[Finding]:
    """What lets strangers ask."""
    host = file.http_options["host"]
    config = file.config
    if not file.names_host:
        yield (
            "hint",
            f"http_options.host is not set: `pdserve up` listens on {host}, `serve run` on every "
            "interface; write it",
        )
    if is_open(host) and not has_keys(config):
        yield "hint", open_door(host)


def port_is_free(host: str, port: object) -> Iterator[Finding]:
    """Serve's own complaint comes late and in a log."""
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
                f"port {port} of {host} cannot be used ({error.strerror or error}): end who uses "
                "it, or choose another by http_options.port or --port",
            )


def keys(config: ClusterConfig, place: Place) -> Iterator[Finding]:
    try:
        ApiKeys(config.router)  # each router reads the same on its own node
    except (ValueError, OSError) as error:
        if place.is_here:
            yield "error", f"{error}"
        else:
            yield "hint", f"not on this node, and routers need it on theirs: {error}"


def traces(config: ClusterConfig, place: Place) -> Iterator[Finding]:
    try:
        check_traces(config.traces)  # each router needs the same on its own node
    except ValueError as error:
        if place.is_here:
            yield "error", f"{error}"
        else:
            yield "hint", f"not on this node, and routers need it on theirs: {error}"


def model(config: ClusterConfig, place: Place) -> Iterator[Finding]:
    """The folder, or what the Hub has of it without the weights. Elsewhere every node reads its own
    copy, so that what is wrong with the one here is a hint."""
    try:
        folder = resolve_folder(config.model.resolved_path, "dummy", config.model.revision)
        spec = read_spec(str(folder), "dummy", quantization=config.model.quantization)
        Tokenizer.load(tokenizer_folder(config.model), config.model.template())
        if config.model.load_format == "auto" and str(folder) == config.model.resolved_path:
            for file in weight_files(folder):
                list(tensor_entries(file))  # headers alone: complete, and of safetensors
    except (ValueError, OSError) as error:
        if place.is_here:
            yield "error", f"model: {error}"
        else:
            yield "hint", f"model, as this node has it (each node reads its own): {error}"
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
            f"{key}.num_gpus is 0, but its engine.device is cuda: Ray would start it on any node, "
            f"and all of them on the first GPU. Set {key}.num_gpus: 1 (less than 1 shares a GPU: "
            "pdserve/configs/one-gpu.yaml), or engine.device: cpu",
        )
    if chosen == "auto" and not num_gpus and gpus_here:
        yield (
            "hint",
            f"{key}.num_gpus is 0 and its engine.device auto: engines on a node with GPUs all use "
            f"the first one, and Ray does not know. Set {key}.num_gpus: 1, or engine.device: cpu",
        )
    if chosen == "cpu" and num_gpus:
        yield (
            "hint",
            f"{key}.num_gpus is {num_gpus:g}, but its engine.device is cpu: Ray keeps GPUs for it "
            "that it never uses",
        )
    num_ranks = config.worker(key).engine.num_ranks
    if 0 < num_gpus < 1 and num_ranks > 1:
        yield (
            "hint",
            f"{key}.num_gpus is {num_gpus:g}, and its engines have {num_ranks} ranks: rank 0 of "
            "each worker takes the first GPU of its node, rank 1 the second and so on, whoever "
            "else is there; let engine.kv_memory_fraction leave room for the others",
        )
    if num_gpus > 1:
        yield (
            "hint",
            f"{key}.num_gpus is {num_gpus:g}, but a rank uses one GPU: set it to 1, and "
            "engine.tensor_parallel times engine.data_parallel times engine.pipeline_parallel to "
            "the number of GPUs",
        )


def capacity(config: ClusterConfig, place: Place) -> Iterator[Finding]:
    empty = [node.emptied() for node in place.nodes]
    have = "The nodes have\n" + described(empty, sorted(resource_names(config)))
    if complaints := unplaceable(config, empty):
        fixed = place.is_here or config.placement_deadline_s is not None
        text = "there is no room for this cluster even if nothing else used the nodes"
        text += " (set RAY_ADDRESS for those of a running Ray)" if place.is_here else ""
        yield "error" if fixed else "hint", "\n".join([f"{text}:", *complaints, have])
    elif complaints := unplaceable(_at_most(config), empty):
        text = (
            "there is no room for as many workers as autoscaling.max allows: they are asked for "
            "and do not come, unless Ray's autoscaler adds nodes"
        )
        yield "hint", "\n".join([f"{text}:", *complaints, have])


def _at_most(config: ClusterConfig) -> ClusterConfig:
    """The same with all the workers that autoscaling may ask for."""
    largest: dict[str, DeploymentConfig] = {}
    for key in config.worker_keys:
        deployment = config.deployment(key)
        if deployment.autoscaling is not None:
            bound = {"replicas": deployment.autoscaling.max}
            largest[key] = deployment.model_copy(update=bound)
    return config.model_copy(update=largest)
