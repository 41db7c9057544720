"""Reads and sets how many workers Serve runs, by the call of Serve's controller that its REST route
for external scalers uses.

Only the target changes: no other replica restarts, as a redeploy would make them do
(docs/design/elasticity.md). Implements `router.admin.ReplicaCounts`; made by
`cluster.deployments.router_replica`. Serve chooses which replica stops.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.exceptions import ExternalScalerDisabledError

from pdserve.cluster.names import DEPLOYMENTS
from pdserve.cluster.placement.capacity import nodes
from pdserve.cluster.placement.placement import unplaceable
from pdserve.configs.schema import ClusterConfig
from pdserve.router.admin import CannotScale, Count

ANSWER_S = 10.0


class ServeReplicaCounts:
    """The counts of the application that this process is a replica of. `config` is as it was
    deployed."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config

    async def get(self) -> dict[str, Count]:
        asked = [
            self._ask("get_deployment_details", self._app, DEPLOYMENTS[key]) for key in self._keys
        ]
        details = await asyncio.gather(*asked)
        return {
            key: Count(
                target=detail.target_num_replicas,
                running=sum(replica.state == "RUNNING" for replica in detail.replicas),
            )
            for key, detail in zip(self._keys, details, strict=True)
        }

    async def set(self, targets: Mapping[str, int]) -> list[str]:
        unknown = targets.keys() - set(self._keys)
        if unknown:
            raise CannotScale(f"mode {self._config.mode} has no {min(unknown)} workers")
        current = {key: count.target for key, count in (await self.get()).items()}
        for key, count in targets.items():
            deployment = DeploymentID(name=DEPLOYMENTS[key], app_name=self._app)
            await self._ask("update_deployment_replicas", deployment, count)
        return await asyncio.to_thread(self._complaints, {**current, **targets})

    @property
    def _keys(self) -> list[str]:
        return list(self._config.worker_keys)

    @property
    def _app(self) -> str:
        return serve.get_replica_context().app_name

    async def _ask(self, method: str, *args: Any) -> Any:
        """Calls the controller.

        Raises ConnectionError, and CannotScale when the application was not deployed for scaling.
        """
        try:
            controller: Any = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
            async with asyncio.timeout(ANSWER_S):
                return await getattr(controller, method).remote(*args)
        except RayTaskError as error:
            if isinstance(error.cause, ExternalScalerDisabledError):
                raise CannotScale(
                    f"the application {self._app!r} cannot be scaled: set "
                    "`external_scaler_enabled: true` beside its "
                    "`import_path:` and deploy it again (`pdserve up` always sets it)"
                ) from error
            raise ConnectionError(f"Serve's controller refused: {error.cause}") from error
        except (RayError, ValueError) as error:  # Ray raises ValueError if there is no such actor
            raise ConnectionError(
                f"Serve's controller cannot be reached: {error}".splitlines()[0]
            ) from error
        except TimeoutError:
            raise ConnectionError(
                f"Serve's controller did not answer within {ANSWER_S:g} s"
            ) from None

    def _complaints(self, targets: Mapping[str, int]) -> list[str]:
        """Returns complaints about workers that the nodes have no room for.

        `targets` are those of all deployments; the counts in the configuration may be outdated.
        """
        parts = {
            key: getattr(self._config, key).model_copy(update={"replicas": n})
            for key, n in targets.items()
        }
        return unplaceable(
            self._config.model_copy(update=parts), [node.emptied() for node in nodes()]
        )
