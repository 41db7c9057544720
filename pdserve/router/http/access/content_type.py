"""Checks the content type of bodies.

A page in a browser cannot send JSON to another origin without asking that origin first. It may send
other content types, or none, so these are refused, as by vLLM. Used by `router.http.calls`.
"""

from starlette.requests import Request

from pdserve.router.errors import ApiError


def check_json(request: Request) -> None:
    """Raises ApiError (415) for a body that does not say that it is JSON."""
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    what = f"has the content type {given!r:.80}" if given else "has no content type"
    raise ApiError(
        f"the body {what}: send JSON, with the header 'content-type: application/json'",
        status=415,
        code="not_json",
    )
