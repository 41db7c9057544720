"""The HTTP server, compatible with OpenAI's and Anthropic's clients: Starlette routes over
`router.request.service`.

Says which paths there are. `calls` reads bodies and answers them, each by its dialect; `endpoints`
checks keys and turns errors into the dialect's form. Speaks to no worker. Built by `cluster/`
(Serve ingress) and by tests.
"""

from functools import cached_property
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pdserve.configs.router import RouterConfig
from pdserve.router.admin import Admin
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.http.admin_api import admin_routes
from pdserve.router.http.auth import ApiKeys
from pdserve.router.http.calls import Calls, check_model
from pdserve.router.http.endpoints import Endpoints, json_response
from pdserve.router.http.messages.routes import message_routes
from pdserve.router.http.openai.dialects import ChatDialect, CompletionDialect
from pdserve.router.http.openapi import openapi_document
from pdserve.router.http.responses.dialect import (
    InputCounter,
    ResponsesDialect,
    stored_response,
)
from pdserve.router.metrics_page import exposition
from pdserve.router.probes import readiness
from pdserve.router.request.service import Service
from pdserve.text.tokenizer import Tokenizer


def build_app(
    fleet: Fleet,
    tokenizer: Tokenizer,
    config: RouterConfig,
    model_name: str,
    service: Service | None = None,
    admin: Admin | None = None,
    names_requests: bool = True,
) -> Starlette:
    """model_name: what clients send as `model`. service: to share one with a Python handle; made
    here by default. admin: with it there are the operator's routes; only where no proxy hides who
    asks. names_requests: answers have the header x-request-id; False where the server around this
    app adds it, as Serve's does. Raises ValueError when the API keys that the configuration speaks
    of cannot be read."""
    service = service or Service(fleet, tokenizer, config, model_name)
    keys = ApiKeys(config)
    calls = Calls(service)
    pages = _Pages(service, keys)
    endpoints = Endpoints(service, keys, names_requests)
    endpoint = endpoints.endpoint
    routes = [
        Route(
            "/v1/completions", endpoint(calls.handler(CompletionDialect(service))), methods=["POST"]
        ),
        Route(
            "/v1/chat/completions", endpoint(calls.handler(ChatDialect(service))), methods=["POST"]
        ),
        Route(
            "/v1/responses", endpoint(calls.handler(ResponsesDialect(service))), methods=["POST"]
        ),
        Route(
            "/v1/responses/input_tokens",
            endpoint(InputCounter(service, calls).count),
            methods=["POST"],
        ),
        Route("/v1/responses/{name}", endpoint(stored_response), methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/input_items", endpoint(stored_response), methods=["GET"]),
        Route("/v1/responses/{name}/cancel", endpoint(stored_response), methods=["POST"]),
        *message_routes(endpoints, calls),
        Route("/v1/models", endpoint(pages.models), methods=["GET"]),
        Route("/v1/models/{name:path}", endpoint(pages.model), methods=["GET"]),
        # open: load balancers have no keys, and learn a yes or no
        Route("/health", endpoint(pages.health, is_open=True), methods=["GET"]),
        Route("/live", endpoint(pages.live, is_open=True), methods=["GET"]),
        Route("/ready", endpoint(pages.ready, is_open=True), methods=["GET"]),
        # open by default, as with vLLM: scrapers have no keys, and the page has counts, but nothing
        # of any request
        Route(
            "/metrics",
            endpoint(pages.metrics, is_open=not config.metrics_need_key),
            methods=["GET"],
        ),
        Route("/openapi.json", endpoint(pages.openapi, is_open=True), methods=["GET"]),
    ]
    if admin is not None:
        routes += admin_routes(admin, endpoint, calls.body)
    app = Starlette(routes=routes, exception_handlers={HTTPException: endpoints.http_error})
    app.state.service = service
    return app


class _Pages:
    """What is read, not generated."""

    def __init__(self, service: Service, keys: ApiKeys) -> None:
        self.service = service
        self._keys = keys

    async def models(self, request: Request) -> Response:
        cards = [self._model_card(name) for name in self.service.model_names]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """A name may hold slashes, as on the Hub."""
        name = request.path_params["name"]
        check_model(self.service, name)
        return json_response(self._model_card(name))

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.service.fleet.decode_workers else 503)

    async def live(self, request: Request) -> Response:
        return Response()

    async def ready(self, request: Request) -> Response:
        found = readiness(self.service.fleet.workers)
        return json_response(found.body(), 200 if found.is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        with self.service.pacer.pace() as pace:
            # A page takes a millisecond: of many who ask at once, one is served in a turn of the
            # loop.
            await pace.rest()
            page = exposition(self.service.metrics, self.service.fleet)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        return Response(self._openapi_json, media_type="application/json")

    @cached_property
    def _openapi_json(self) -> bytes:
        return msgspec.json.encode(
            openapi_document(self.service.config, self.service.model_names, self._keys.required)
        )

    def _model_card(self, name: str) -> dict[str, Any]:
        workers = self.service.fleet.decode_workers
        length = max((worker.token_limit for worker in workers), default=None)
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "pdserve",
            "max_model_len": length,
        }
