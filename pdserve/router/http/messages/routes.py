"""Makes the paths of Anthropic's Messages API, with errors in its form, and with its header for a
request's name.

Knows no bodies. Used by `router.http.app`.
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.router.errors import ApiError
from pdserve.router.http.calls import Calls
from pdserve.router.http.endpoints import Endpoint, Endpoints
from pdserve.router.http.messages.dialect import MessagesDialect, TokenCounter
from pdserve.router.http.messages.errors import error_body

REQUEST_ID = "request-id"  # Anthropic's clients show it in their errors
PATHS = ("/v1/messages", "/v1/messages/count_tokens")
OTHER_METHODS = ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"]


def message_routes(endpoints: Endpoints, calls: Calls) -> list[Route]:
    """Returns all routes under /v1/messages.

    Unknown paths and methods have routes too, so that their errors have this API's form.
    """

    def endpoint(handler: Endpoint) -> Endpoint:
        return _with_request_id(endpoints.endpoint(handler, error_form=error_body))

    generate = calls.handler(MessagesDialect(calls.service))
    count = TokenCounter(calls.service, calls).count
    handlers = dict(zip(PATHS, (generate, count), strict=True))
    return [
        *(Route(path, endpoint(use), methods=["POST"]) for path, use in handlers.items()),
        *(Route(path, endpoint(_wrong_method), methods=OTHER_METHODS) for path in PATHS),
        Route("/v1/messages/{rest:path}", endpoint(_unknown), methods=["POST", *OTHER_METHODS]),
    ]


def _with_request_id(handler: Endpoint) -> Endpoint:
    async def call(request: Request) -> Response:
        response = await handler(request)
        response.headers[REQUEST_ID] = request.state.name
        return response

    return call


async def _wrong_method(request: Request) -> Response:
    raise ApiError(f"{request.method} {request.url.path}: send POST", status=405, allow="POST")


async def _unknown(request: Request) -> Response:
    raise ApiError(
        f"{request.method} {request.url.path} does not exist: this server has "
        f"{' and '.join(PATHS)}; send the requests of a batch one by one",
        status=404,
        kind="not_found_error",
    )
