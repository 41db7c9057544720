"""GET / and /page/FILE: the files of the page, with headers that let a browser run nothing else.

By default the page exists only where the server listens on loopback. The files hold no secret, so
no key is needed to get them; the endpoints that the page calls need a key as always. Used by
`router.http.app`.
"""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.configs.router import RouterConfig
from pdserve.router.http.endpoints import Endpoint, Endpoints

START = "index.html"
KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts, styles and answers come only from this server, and no text ever becomes a script:
# browsers that support Trusted Types refuse to make elements from text.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # links in answers are looked up only when somebody follows them
    "x-dns-prefetch-control": "off",
    # a newer version of the server may have another page
    "cache-control": "no-cache",
}


def has_page(config: RouterConfig, on_loopback: bool) -> bool:
    """True if the page is served; by default only if the server listens just on loopback."""
    return on_loopback if config.page is None else config.page


def page_routes(endpoints: Endpoints) -> list[Route]:
    """Makes the page's routes. The files are read once, here."""
    folder = files(__package__) / "files"
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    shown = {name: found[name] for name in sorted(found) if _kind(name) in KINDS}
    routes = [_route("/", START, shown[START], endpoints)]
    return routes + [_route(f"/page/{name}", name, shown[name], endpoints) for name in shown]


def _route(path: str, name: str, content: bytes, endpoints: Endpoints) -> Route:
    return Route(path, endpoints.endpoint(_file(name, content), is_open=True), methods=["GET"])


def _file(name: str, content: bytes) -> Endpoint:
    async def send(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=KINDS[_kind(name)])

    return send


def _kind(name: str) -> str:
    return f".{name.rpartition('.')[2]}"
