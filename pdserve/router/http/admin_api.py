"""The operator's HTTP routes over `router.admin`: GET /admin/workers,
POST /admin/workers/{worker}/role, and POST /admin/scale.

They exist if `router.admin_http` is set, and only for programs on the router's own machine, because
a client's key must not be enough to stop workers. Where API keys are configured, they need one too
(docs/use/security.md). They are not for routers behind a proxy, where everybody seems to come
from that machine. Used by `router.http.app`.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.router.admin import Admin
from pdserve.router.errors import ApiError
from pdserve.router.http.access.hosts import is_loopback
from pdserve.router.http.endpoints import Endpoint

T = TypeVar("T", bound=msgspec.Struct)


class RoleChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    force: bool = False


class Scaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New targets; None leaves a count as it is."""

    prefill: int | None = None
    decode: int | None = None
    force: bool = False

    @property
    def targets(self) -> dict[str, int]:
        given = {"prefill": self.prefill, "decode": self.decode}
        return {name: count for name, count in given.items() if count is not None}


def admin_routes(
    admin: Admin,
    endpoint: Callable[[Endpoint], Endpoint],
    read: Callable[[Request], Awaitable[bytearray]],
) -> list[Route]:
    """Makes the routes.

    `endpoint` checks the key and puts errors into their form. `read` reads a body under limits.
    """

    async def workers(request: Request) -> Response:
        _check_local(request)
        return _json(await admin.report())

    async def role(request: Request) -> Response:
        _check_local(request)
        change = _parsed(await read(request), RoleChange)
        return _json(await admin.set_role(request.path_params["worker"], change.role, change.force))

    async def scale(request: Request) -> Response:
        _check_local(request)
        scaling = _parsed(await read(request), Scaling)
        return _json(await admin.scale(scaling.targets, scaling.force))

    return [
        Route("/admin/workers", endpoint(workers), methods=["GET"]),
        Route("/admin/workers/{worker}/role", endpoint(role), methods=["POST"]),
        Route("/admin/scale", endpoint(scale), methods=["POST"]),
    ]


def _check_local(request: Request) -> None:
    """Raises ApiError (403) unless the request comes from this machine.

    A page in a local browser may have been given our address under another name; then Host holds
    that name.
    """
    client = request.client.host if request.client is not None else ""
    if not is_loopback(client) or not is_loopback(request.url.hostname or ""):
        message = (
            "admin routes are for programs on the router's machine, by its loopback address; "
            "elsewhere use the pdserve command or the Python handle on a node of the cluster"
        )
        raise ApiError(message, status=403, kind="permission_error", code="not_local")


def _parsed(body: bytearray, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ApiError(f"the body does not have the expected form: {error}") from error


def _json(report: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(report), media_type="application/json")
