"""The HTTP server for clients of OpenAI, Anthropic and vLLM: Starlette routes over
`router.request.service`.

This module says which paths exist. `calls` reads bodies and answers them, each by its dialect.
`endpoints` checks keys and gives errors the dialect's form. `pages` holds what is only read. Speaks
to no worker. Built by `cluster` (Serve ingress) and by tests.
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from pdserve.configs.router import RouterConfig
from pdserve.router.admin import Admin
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.http.access.auth import ApiKeys
from pdserve.router.http.access.hosts import Hosts
from pdserve.router.http.access.origins import middleware_of
from pdserve.router.http.admin_api import admin_routes
from pdserve.router.http.calls import Calls
from pdserve.router.http.embeddings.dialect import EmbeddingDialect
from pdserve.router.http.endpoints import Endpoints
from pdserve.router.http.messages.routes import message_routes
from pdserve.router.http.openai.dialects import ChatDialect, CompletionDialect
from pdserve.router.http.page.routes import has_page, page_routes
from pdserve.router.http.pages import Pages
from pdserve.router.http.responses.dialect import (
    InputCounter,
    ResponsesDialect,
    stored_response,
)
from pdserve.router.http.tokenizing.endpoints import TokenizerEndpoints
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
    on_loopback: bool = False,
    model_root: str | None = None,
) -> Starlette:
    """Builds the server. Raises ValueError if the configured API keys cannot be read.

    - `model_name` is what clients send as `model`.
    - `service` may be shared with a Python handle; by default a new one is made.
    - `admin`: with it there are operator's routes. Pass it only where no proxy hides who asks.
    - `names_requests`: answers have the header x-request-id. False if the server around this app
      adds it, as Serve's does.
    - `on_loopback`: the server around this app listens only on loopback.
    - `model_root` is where the model comes from; None hides it.
    """
    service = service or Service(fleet, tokenizer, config, model_name)
    keys = ApiKeys(config)
    hosts = Hosts(on_loopback, config.allowed_hosts)
    calls = Calls(service)
    pages = Pages(service, keys, model_root or model_name)
    endpoints = Endpoints(service, keys, hosts, names_requests)
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
        Route(
            "/v1/embeddings", endpoint(calls.handler(EmbeddingDialect(service))), methods=["POST"]
        ),
        *message_routes(endpoints, calls),
        *TokenizerEndpoints(service, calls).routes(endpoints),
        *pages.routes(endpoints),
    ]
    if admin is not None:
        routes += admin_routes(admin, endpoint, calls.body)
    if has_page(config, on_loopback):
        routes += page_routes(endpoints)
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: endpoints.http_error},
        middleware=middleware_of(config),
    )
    app.state.service = service
    return app
