"""Pages that are read and not generated: models, health, load, version, metrics and the OpenAPI
document.

Knows no bodies. Made once, by `router.http.app`.
"""

import time
from functools import cached_property
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import pdserve
from pdserve.router.http.access.auth import ApiKeys
from pdserve.router.http.calls import check_model
from pdserve.router.http.endpoints import Endpoints, json_response
from pdserve.router.http.openapi.document import openapi_document
from pdserve.router.metrics_page import exposition
from pdserve.router.probes import readiness
from pdserve.router.request.service import Service


class Pages:
    """The pages of one app. `root` is where the model comes from."""

    def __init__(self, service: Service, keys: ApiKeys, root: str) -> None:
        self.service = service
        self._keys = keys
        self._root = root
        self._created = int(time.time())

    def routes(self, endpoints: Endpoints) -> list[Route]:
        """Makes the routes and says which need a key.

        Load balancers have no keys, and learn only yes or no. Scrapers have none by default, as
        with vLLM; their page has counts, but nothing about any request.
        """
        endpoint = endpoints.endpoint
        closed_metrics = self.service.config.metrics_need_key
        return [
            Route("/v1/models", endpoint(self.models), methods=["GET"]),
            Route("/v1/models/{name:path}", endpoint(self.model), methods=["GET"]),
            Route("/health", endpoint(self.health, is_open=True), methods=["GET"]),
            Route("/live", endpoint(self.live, is_open=True), methods=["GET"]),
            Route("/ready", endpoint(self.ready, is_open=True), methods=["GET"]),
            Route("/ping", endpoint(self.health, is_open=True), methods=["GET", "POST"]),
            Route("/version", endpoint(self.version, is_open=True), methods=["GET"]),
            Route("/load", endpoint(self.load), methods=["GET"]),
            Route("/metrics", endpoint(self.metrics, is_open=not closed_metrics), methods=["GET"]),
            Route("/openapi.json", endpoint(self.openapi, is_open=True), methods=["GET"]),
        ]

    async def models(self, request: Request) -> Response:
        cards = [self._model_card(name) for name in self.service.model_names]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """Describes one model. Its name may hold slashes, as on the Hub."""
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

    async def version(self, request: Request) -> Response:
        return json_response({"version": pdserve.__version__})

    async def load(self, request: Request) -> Response:
        """Returns the number of prompts that this router is answering."""
        return json_response({"server_load": self.service.admission.num_prompts})

    async def metrics(self, request: Request) -> Response:
        with self.service.pacer.pace() as pace:
            # A page takes a millisecond. If many ask at once, each turn of the loop serves one.
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
        """Describes a model in vLLM's form."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdserve",
            "root": self._root,
            "parent": None,
            "max_model_len": self.service.most_tokens,
        }
