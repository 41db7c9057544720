"""The common parts of all endpoints: who may call them, the name of each request, and the form of
errors.

    called --has a key, or needs none--> handler --returns, or raises--> a response, which is named

Knows no paths and no bodies. Used by `router.http.app`, once per app.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pdserve.protocol.request_key import check_request_id
from pdserve.router.errors import ApiError, internal_error
from pdserve.router.http.access.auth import ApiKeys
from pdserve.router.http.access.hosts import Hosts
from pdserve.router.http.client_watch import ClientGone
from pdserve.router.request.request_log import log_of
from pdserve.router.request.service import Service

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
# makes the body of an answer from an error and the request's name
ErrorForm = Callable[[ApiError, str], dict[str, Any]]

REQUEST_ID = "x-request-id"

# nginx's status for a client that left; only the access log shows it
CLIENT_CLOSED = 499


def openai_form(error: ApiError, name: str) -> dict[str, Any]:
    """Returns OpenAI's form of an error, which does not repeat the request's name."""
    return error.body()


class Endpoints:
    def __init__(self, service: Service, keys: ApiKeys, hosts: Hosts, names_requests: bool) -> None:
        """If `names_requests` is True, answers have the header x-request-id."""
        self._service = service
        self._keys = keys
        self._hosts = hosts
        self._names_requests = names_requests

    def endpoint(
        self, handler: Endpoint, is_open: bool = False, error_form: ErrorForm = openai_form
    ) -> Endpoint:
        """Returns an endpoint that calls the handler for requests with a valid key.

        With `is_open` no key is needed. Errors get the form `error_form`.
        """

        async def call(request: Request) -> Response:
            request.state.name = _name_of(request)
            return self._named(await answer(request), request.state.name)

        async def answer(request: Request) -> Response:
            try:
                self._hosts.check(request.headers.get("host"))
                if not is_open:
                    request.state.tenant = self._keys.check(_key_of(request))
                return await handler(request)
            except ApiError as error:
                self._service.metrics.rejections.labels(str(error.status), error.reason).inc()
                if not error.logged:
                    self._service.request_log.refused(request.state.name, error)
                return _error(error, error_form(error, request.state.name))
            except (ClientGone, ClientDisconnect):
                return Response(status_code=CLIENT_CLOSED)
            except Exception:
                path = request.url.path
                name = request.state.name
                log_of(
                    logger,
                    logging.ERROR,
                    name,
                    "%s failed, x-request-id %s",
                    path,
                    name,
                    exc_info=True,
                )
                hidden = internal_error()
                return _error(hidden, error_form(hidden, name))

        return call

    def _named(self, response: Response, name: str) -> Response:
        if self._names_requests:
            response.headers[REQUEST_ID] = name
        return response

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Answers requests for unknown paths and methods."""
        assert isinstance(error, HTTPException)
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        message = f"{request.method} {request.url.path}: {error.detail}"
        name = _name_of(request)
        allow = (error.headers or {}).get("Allow")
        failure = ApiError(message, status=error.status_code, kind=kind, allow=allow)
        self._service.metrics.rejections.labels(str(failure.status), failure.reason).inc()
        return self._named(_error(failure, openai_form(failure, name)), name)


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(data),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def _error(error: ApiError, body: dict[str, Any]) -> Response:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.allow is not None:
        headers["allow"] = error.allow
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(body, error.status, headers)


def _key_of(request: Request) -> str | None:
    """Returns the header with the key; clients of Anthropic's API send it in x-api-key, bare."""
    key = request.headers.get("x-api-key")
    given = request.headers.get("authorization")
    return f"Bearer {key}" if given is None and key is not None else given


def _name_of(request: Request) -> str:
    """Returns the client's x-request-id, or a new one if it is missing or not allowed."""
    if given := request.headers.get(REQUEST_ID):
        with suppress(ValueError):
            return check_request_id(given)
    return secrets.token_hex(16)
