"""Builds the Serve application from a `ClusterConfig`: deployments `Router`, `Prefill` and
`Decode`.

`serve run cluster.yaml` calls `build` by its import path, with `args:` of the YAML. Serve may make
that call in another process and folder than the user's. This module decides placement, counts and
deadlines; the work is done in `router_replica` and `worker_replica`.
"""

import logging
from typing import Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from pdserve.cluster.access import has_keys, is_open, open_door
from pdserve.cluster.deployments.engine_actor import ENGINE_HOST
from pdserve.cluster.deployments.http_server import Address
from pdserve.cluster.deployments.logs import serve_logging
from pdserve.cluster.deployments.router_replica import RouterReplica
from pdserve.cluster.deployments.worker_replica import WorkerReplica
from pdserve.cluster.names import DEPLOYMENTS, ROUTER
from pdserve.cluster.placement.capacity import await_capacity
from pdserve.cluster.placement.placement import CRUMB, strategy, worker_bundles
from pdserve.configs.schema import ClusterConfig, WorkerKey
from pdserve.router.request.traces.settings import check_traces

logger = logging.getLogger("ray.serve")

# Routers decide admission, by tokens. Serve's own limit (5 by default) must never refuse a request.
NO_LIMIT = 1 << 20

COMMON: dict[str, Any] = {
    "max_ongoing_requests": NO_LIMIT,
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 15.0,
    "graceful_shutdown_wait_loop_s": 0.2,
}
PINNED: dict[str, Any] = {"request_router_class": "pdserve.cluster.links.addressing:PinRouter"}
# These times begin after router.drain_s. By then a stopping router has ended its unfinished
# answers. Routers have also moved the unfinished requests of a stopping worker, and closed their
# streams to it.
ROUTER_SHUTDOWN_S = 15.0
WORKER_SHUTDOWN_S = 30.0


class Refused(RayServeException, ValueError):
    """`args:` asks for something that cannot be served.

    It is one of Serve's exceptions for the same reason as NoCapacity.
    """


def build(args: ClusterConfig) -> Application:
    """Builds the application of one cluster for `serve run`; Serve carries HTTP.

    `serve run` requires exactly one parameter. Raises Refused when no model is named: Serve gives a
    file without `args:` an empty one. Raises NoCapacity when replicas do not fit on the nodes.
    """
    try:
        args.check_model_is_named()
    except ValueError as error:
        raise Refused(str(error)) from None
    host = serve_host()
    if host is not None and is_open(host) and not has_keys(args):
        logger.warning(open_door(host))
    return build_at(args, None)


def serve_host() -> str | None:
    """The address where the HTTP proxies of the connected Serve listen; None if there are none.

    It is every interface when the file of `serve run` does not name a host.
    """
    serve_client = _get_global_client(raise_if_no_controller_running=False)
    return None if serve_client is None else serve_client.http_config.host


def build_at(args: ClusterConfig, address: Address | None) -> Application:
    """Builds the application; routers serve HTTP themselves at `address`, or Serve does if it is
    None.

    Raises Refused when traces are configured but cannot be made, and NoCapacity.
    """
    try:
        check_traces(args.traces)
    except ValueError as error:
        raise Refused(str(error)) from None
    await_capacity(args)
    return assemble(args, ENGINE_HOST, address)


def assemble(
    config: ClusterConfig, engine_host: str, address: Address | None = None
) -> Application:
    """Binds the deployments to each other.

    `engine_host` is the import path of the class that an engine process runs
    (`cluster.deployments.engine_actor.Host`).
    """
    config = resolve_model(config)
    handles = [worker_deployment(config, key, engine_host) for key in config.worker_keys]
    return router_deployment(config).bind(config, address, *handles)


def resolve_model(config: ClusterConfig) -> ClusterConfig:
    """Returns the same configuration with an absolute model folder, if the model is a folder here.

    Replicas may start in another folder.
    """
    return config.model_copy(
        update={"model": config.model.model_copy(update={"path": config.model.resolved_path})}
    )


def worker_deployment(config: ClusterConfig, key: WorkerKey, engine_host: str) -> Application:
    deployment = config.deployment(key)
    engine = config.worker(key).engine
    bundles = worker_bundles(deployment, engine)
    decorate = serve.deployment(
        name=DEPLOYMENTS[key],
        num_replicas=deployment.replicas,
        ray_actor_options={"num_cpus": CRUMB},
        placement_group_bundles=bundles,
        placement_group_bundle_label_selector=[deployment.labels] * len(bundles),
        placement_group_strategy=strategy(deployment, engine),
        request_router_config=RequestRouterConfig(**PINNED),
        graceful_shutdown_timeout_s=config.router.drain_s + WORKER_SHUTDOWN_S,
        logging_config=serve_logging(config.logging),
        **COMMON,
    )
    return decorate(WorkerReplica).bind(config.worker(key), deployment.num_gpus, engine_host)


def router_deployment(config: ClusterConfig) -> Deployment:
    decorate = serve.deployment(
        name=ROUTER,
        num_replicas=config.router.replicas,
        ray_actor_options={
            "num_cpus": config.router.num_cpus,
            "resources": config.router.resources,
            "label_selector": config.router.labels,
        },
        graceful_shutdown_timeout_s=config.router.drain_s + ROUTER_SHUTDOWN_S,
        logging_config=serve_logging(config.logging),
        **COMMON,
    )
    return decorate(serve.ingress()(RouterReplica))
