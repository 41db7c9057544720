"""Sets what browsers let pages of other origins do (CORS), by vLLM's options, and the path prefix
under which a proxy shows this server.

Knows no paths. Used by `router.http.app`.
"""

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.configs.router import RouterConfig

# headers of answers that a page may read
EXPOSED = ("x-request-id", "request-id", "retry-after", "x-pdserve-unenforced")


def middleware_of(config: RouterConfig) -> list[Middleware]:
    """Returns the middleware before all routes; none by default."""
    found = []
    if config.root_path:
        found.append(Middleware(RootPath, root_path=config.root_path))
    if config.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=EXPOSED,
        )
        found.append(cors)
    return found


class RootPath:
    """Removes a proxy's prefix from paths, where the proxy has not done so."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root_path}/"):
            scope = {**scope, "root_path": self._root_path}
        await self._app(scope, receive, send)
