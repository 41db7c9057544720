"""The OpenAI-compatible HTTP server: Starlette routes over `router.request.service`.

Reads bodies, has their calls admitted, and stops what is being made as soon as the client is gone;
`endpoints` turns errors into OpenAI's form, `answers` sends what was made. Speaks to no worker.
Built by `cluster/` (Serve ingress) and by tests.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pdserve.configs.router import RouterConfig
from pdserve.protocol.request_key import check_request_id
from pdserve.router.admin import Admin
from pdserve.router.errors import ApiError
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.http.admin_api import admin_routes
from pdserve.router.http.answers import EventStream, Responder, WholeAnswer, closing_on_error
from pdserve.router.http.auth import ApiKeys
from pdserve.router.http.bodies import Bodies
from pdserve.router.http.client_watch import ClientWatch
from pdserve.router.http.endpoints import REQUEST_ID, Endpoints, json_response
from pdserve.router.http.json_pieces import JsonPieces
from pdserve.router.http.openai.body_parsing import LONG_BODY, parse, parse_long
from pdserve.router.http.openai.chat import ChatResponder
from pdserve.router.http.openai.completions import CompletionResponder
from pdserve.router.http.openai.openapi import openapi_document
from pdserve.router.http.openai.requests import BaseRequest, ChatRequest, CompletionRequest
from pdserve.router.metrics_page import exposition
from pdserve.router.request.generation import Generation
from pdserve.router.request.request_checks import check_num_choices
from pdserve.router.request.service import Service
from pdserve.router.turns import admit_turn
from pdserve.text.tokenizer import Tokenizer

R = TypeVar("R", CompletionRequest, ChatRequest)
# the float: perf_counter() when the call came
Admit = Callable[[Request, R, float], Awaitable[Generation]]

UNENFORCED = "x-pdserve-unenforced"  # keywords of a request's JSON schema

# bodies that are decoded and made into prompts at once: larger ones one at a time, other long ones
# a few
ALONE_BYTES = 1 << 20
LONG_AT_ONCE = 4


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
    api = _Api(service, keys)
    endpoints = Endpoints(service, keys, names_requests)
    endpoint = endpoints.endpoint
    routes = [
        Route("/v1/completions", endpoint(api.completions), methods=["POST"]),
        Route("/v1/chat/completions", endpoint(api.chat), methods=["POST"]),
        Route("/v1/models", endpoint(api.models), methods=["GET"]),
        Route("/v1/models/{name:path}", endpoint(api.model), methods=["GET"]),
        # open: load balancers have no keys, and learn a yes or no
        Route("/health", endpoint(api.health, is_open=True), methods=["GET"]),
        # open by default, as with vLLM: scrapers have no keys, and the page has counts, but nothing
        # of any request
        Route(
            "/metrics", endpoint(api.metrics, is_open=not config.metrics_need_key), methods=["GET"]
        ),
        Route("/openapi.json", endpoint(api.openapi, is_open=True), methods=["GET"]),
    ]
    if admin is not None:
        routes += admin_routes(admin, endpoint, api.body)
    app = Starlette(routes=routes, exception_handlers={HTTPException: endpoints.http_error})
    app.state.service = service
    return app


class _Api:
    def __init__(self, service: Service, keys: ApiKeys) -> None:
        config = service.config
        self.service = service
        self._bodies = Bodies(
            config.max_body_bytes, config.max_total_body_bytes, config.client_timeout_s
        )
        service.metrics.body_bytes.set_function(lambda: self._bodies.num_bytes)
        self._alone = asyncio.Semaphore(1)
        self._few = asyncio.Semaphore(LONG_AT_ONCE)
        self._keys = keys

    async def completions(self, request: Request) -> Response:
        shows_timeline = _shows_timeline(request)
        call, generation, watch = await self._admitted(
            request, CompletionRequest, self._admit_completion
        )
        with closing_on_error(generation, watch):
            responder = CompletionResponder(
                call, generation, self.service.tokenizer, shows_timeline
            )
            call.prompt = ""  # which may be long, while the answer may take its time
            answer = await self._answer(watch, generation, responder, bool(call.stream))
            return _noted(request, answer)

    async def chat(self, request: Request) -> Response:
        shows_timeline = _shows_timeline(request)
        call, generation, watch = await self._admitted(request, ChatRequest, self._admit_chat)
        with closing_on_error(generation, watch):
            responder = ChatResponder(call, generation, self.service.tokenizer, shows_timeline)
            call.messages = []
            answer = await self._answer(watch, generation, responder, bool(call.stream))
            return _noted(request, answer)

    async def _admitted(
        self, request: Request, kind: type[R], admit: Admit[R]
    ) -> tuple[R, Generation, ClientWatch]:
        """The request as it was sent, its generation, and who knows when its client goes away."""
        received = time.perf_counter()
        with await self._bodies.read(request) as body:
            watch = ClientWatch(request.receive)
            try:
                if len(body) > LONG_BODY:
                    admitting = self._admit_long(request, body, kind, admit, received)
                    call, generation = await watch.unless_gone(
                        admitting, lambda admitted: admitted[1].close()
                    )
                    return call, generation, watch
                await self.service.pacer.turn()
                call = parse(body, kind)
                return call, await admit(request, call, received), watch
            except BaseException:
                watch.close()
                raise

    async def _admit_long(
        self, request: Request, body: bytearray, kind: type[R], admit: Admit[R], received: float
    ) -> tuple[R, Generation]:
        """A few at a time, since a body's values, texts and token ids may take several times its
        size."""
        async with self._alone if len(body) > ALONE_BYTES else self._few:
            with self.service.pacer.pace() as pace:
                call = await parse_long(body, kind, self.service.lengths(), pace)
            return call, await admit(request, call, received)

    async def _admit_completion(
        self, request: Request, call: CompletionRequest, received: float
    ) -> Generation:
        self._check_model(call.model)
        check_num_choices(self.service.config, call.n or 1)
        rules = await self._rules(request, call)
        return await self.service.admit(
            call.prompts(),
            call.sampling(self.service.sampling_defaults, rules),
            request_id=_request_id(request, "cmpl"),
            priority=self._priority(call.priority),
            cache_salt=call.cache_salt or "",
            session_id=request.headers.get("x-session-id", ""),
            add_special_tokens=call.add_special_tokens is not False,
            received=received,
            tenant=self._tenant(request),
        )

    async def _admit_chat(self, request: Request, call: ChatRequest, received: float) -> Generation:
        self._check_model(call.model)
        check_num_choices(self.service.config, call.n or 1)
        turn = call.turn()
        rules = await self._rules(request, call)
        sampling = call.sampling(self.service.sampling_defaults, rules)
        return await admit_turn(
            self.service,
            turn,
            sampling,
            request_id=_request_id(request, "chatcmpl"),
            priority=self._priority(call.priority),
            cache_salt=call.cache_salt or "",
            session_id=request.headers.get("x-session-id", ""),
            received=received,
            tenant=self._tenant(request),
            open_ended=call.is_open_ended,
        )

    async def _rules(self, request: Request, call: BaseRequest) -> dict[str, Any]:
        """Logit rules of what the call asks of its answer's form and words."""
        rules = await self.service.rules(
            call.structured(), call.bad_words or (), call.allowed_token_ids or ()
        )
        request.state.unenforced = rules.unenforced
        return rules.settings

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """A name may hold slashes, as on the Hub."""
        self._check_model(request.path_params["name"])
        return json_response(self._model_card())

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.service.fleet.decode_workers else 503)

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
            openapi_document(self.service.config, self.service.model_name, self._keys.required)
        )

    def _priority(self, given: int | None) -> int:
        priority = given or 0
        lowest = self.service.config.min_priority
        if lowest is not None and priority < lowest:
            message = (
                f"priority must be at least {lowest} (the lowest runs first), not {priority}: send "
                "more, or lower router.min_priority"
            )
            raise ApiError(message, param="priority")
        return priority

    def _tenant(self, request: Request) -> str:
        return str(request.state.tenant) if self.service.config.salt_by_key else ""

    async def body(self, request: Request) -> bytearray:
        with await self._bodies.read(request) as body:
            return body

    async def _answer(
        self, watch: ClientWatch, generation: Generation, responder: Responder, streams: bool
    ) -> Response:
        if not streams:
            pieces = await watch.unless_gone(_whole(generation, responder))
            generation.served()
            account = self.service.held.account()
            generation.close()  # what it held is in the pieces now
            return WholeAnswer(
                generation.request_id, pieces, account, watch, self.service.config.client_timeout_s
            )
        batches = generation.stream()
        # the first tokens decide between an error status and a stream
        first = await watch.unless_gone(anext(batches))
        return EventStream(
            generation, batches, first, responder, watch, self.service.config.client_timeout_s
        )

    def _model_card(self) -> dict[str, Any]:
        workers = self.service.fleet.decode_workers
        length = max((worker.token_limit for worker in workers), default=None)
        name = self.service.model_name
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "pdserve",
            "max_model_len": length,
        }

    def _check_model(self, name: str) -> None:
        if name != self.service.model_name:
            message = (
                f"the model {name!r} does not exist: this server has {self.service.model_name!r}"
            )
            raise ApiError(
                message, status=404, kind="not_found_error", param="model", code="model_not_found"
            )


def _noted(request: Request, answer: Response) -> Response:
    """The answer, which says which keywords of the request's JSON schema are not enforced."""
    if request.state.unenforced:
        answer.headers[UNENFORCED] = ", ".join(request.state.unenforced)
    return answer


def _request_id(request: Request, prefix: str) -> str:
    """The request's name after the prefix. Raises ApiError when the client gave one that cannot
    be."""
    given = request.headers.get(REQUEST_ID)
    try:
        return f"{prefix}-{request.state.name if given is None else check_request_id(given)}"
    except ValueError as error:
        raise ApiError(f"{REQUEST_ID}: {error}", param=REQUEST_ID) from error


def _shows_timeline(request: Request) -> bool:
    """Whether the answer is to say where its time and bytes went."""
    given = request.headers.get("x-pdserve-timeline", "0")
    if given not in ("0", "1"):
        raise ApiError(
            f"x-pdserve-timeline must be 0 or 1, not {given!r}", param="x-pdserve-timeline"
        )
    return given == "1"


async def _whole(generation: Generation, responder: Responder) -> JsonPieces:
    return await responder.whole(await generation.collect())
