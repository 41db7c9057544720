"""The common way of all endpoints that generate or embed: read and parse a body, admit its call,
send the answer.

    read --parsed--> admitted --whole or stream--> answered     (the client leaves: nothing goes on)

A `Dialect` (`router.http.openai`, `responses`, `messages`) decides what a body may hold, how it
becomes a Generation, and how the answer is written. Speaks to no worker. Made once, by
`router.http.app`.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from pdserve.protocol.request_key import RequestKind, check_request_id
from pdserve.router.errors import ApiError
from pdserve.router.http.access.content_type import check_json
from pdserve.router.http.answers import (
    EventStream,
    Responder,
    WholeAnswer,
    WholeResponder,
    closing_on_error,
)
from pdserve.router.http.bodies import Bodies
from pdserve.router.http.body_parsing import LONG_BODY, parse, parse_long
from pdserve.router.http.client_watch import ClientWatch
from pdserve.router.http.endpoints import REQUEST_ID
from pdserve.router.http.json_pieces import JsonPieces
from pdserve.router.http.request_form import AnsweredForm, RequestForm
from pdserve.router.http.sampling_fields import SamplingFields
from pdserve.router.permits import Permit
from pdserve.router.request.generation import Generation
from pdserve.router.request.service import Service
from pdserve.router.request.traces.call_trace import CallTrace, ending

F = TypeVar("F", bound=RequestForm)
R = TypeVar("R", bound=AnsweredForm)
T = TypeVar("T")

UNENFORCED = "x-pdserve-unenforced"  # names keywords of a request's JSON schema

# Long bodies are decoded and made into prompts a few at once; bodies above ALONE_BYTES one at a
# time.
ALONE_BYTES = 1 << 20
LONG_AT_ONCE = 4


class Dialect(ABC, Generic[R]):
    """One endpoint's form of requests and answers."""

    # The type of its requests.
    kind: type[R]
    # gen_ai.operation.name of its traces.
    operation = "chat"
    # Work that its prompts ask for.
    wanted: ClassVar[RequestKind] = "generate"

    def __init__(self, service: Service) -> None:
        self._service = service

    @abstractmethod
    async def admit(self, request: Request, call: R, received: float) -> Generation:
        """Checks and admits the call, which came at `received` (perf_counter()).

        Raises ApiError.
        """

    @abstractmethod
    def responder(self, call: R, generation: Generation, shows_timeline: bool) -> WholeResponder:
        """Returns what writes the answer; a Responder, if requests may ask for a stream."""


class Calls:
    """The endpoints of one app that generate or embed."""

    def __init__(self, service: Service) -> None:
        config = service.config
        self.service = service
        self._bodies = Bodies(
            config.max_body_bytes, config.max_total_body_bytes, config.client_timeout_s
        )
        service.metrics.body_bytes.set_function(lambda: self._bodies.num_bytes)
        self._alone = asyncio.Semaphore(1)
        self._few = asyncio.Semaphore(LONG_AT_ONCE)

    def handler(self, dialect: Dialect[R]) -> Callable[[Request], Awaitable[Response]]:
        """Returns the endpoint that answers in this dialect."""

        async def handle(request: Request) -> Response:
            return await self._generate(request, dialect)

        return handle

    async def body(self, request: Request) -> bytearray:
        """Reads the whole body, under limits."""
        check_json(request)
        with await self._bodies.read(request) as body:
            return body

    async def parsed(
        self,
        request: Request,
        kind: type[F],
        use: Callable[[F], Awaitable[T]],
        undo: Callable[[T], None] = lambda result: None,
    ) -> tuple[F, T, ClientWatch]:
        """Returns the request as sent, the result of `use`, and a watch of the client.

        The caller must close the watch. Only a few long bodies are worked on at once, since a
        body's values, texts and token ids may take several times its size. `undo` gets the result
        of a request whose client left meanwhile.
        """
        check_json(request)
        with await self._bodies.read(request) as body:
            watch = ClientWatch(request.receive)
            try:
                if len(body) > LONG_BODY:
                    using = self._parsed_long(body, kind, use)
                    call, result = await watch.unless_gone(using, lambda made: undo(made[1]))
                    return call, result, watch
                await self.service.pacer.turn()
                call = parse(body, kind)
                return call, await use(call), watch
            except BaseException:
                watch.close()
                raise

    async def _parsed_long(
        self, body: bytearray, kind: type[F], use: Callable[[F], Awaitable[T]]
    ) -> tuple[F, T]:
        async with Permit(self._alone if len(body) > ALONE_BYTES else self._few):
            with self.service.pacer.pace() as pace:
                call = await parse_long(body, kind, self.service.lengths(), pace)
            return call, await use(call)

    async def _generate(self, request: Request, dialect: Dialect[R]) -> Response:
        received = time.perf_counter()
        request.state.trace = self._trace(request, dialect.operation, received)
        with ending(request.state.trace):
            return await self._traced(request, dialect, received)

    def _trace(self, request: Request, operation: str, received: float) -> CallTrace | None:
        tracer = self.service.tracer
        if tracer is None:
            return None
        parent, state = (request.headers.get(name) for name in ("traceparent", "tracestate"))
        return tracer.begin(operation, request.state.name, received, parent, state)

    async def _traced(self, request: Request, dialect: Dialect[R], received: float) -> Response:
        shows_timeline = _shows_timeline(request)

        async def admit(call: R) -> Generation:
            self.service.check_kind(dialect.wanted)
            return await dialect.admit(request, call, received)

        call, generation, watch = await self.parsed(request, dialect.kind, admit, Generation.close)
        with closing_on_error(generation, watch):
            responder = dialect.responder(call, generation, shows_timeline)
            call.forget_input()
            answer = await self._answer(watch, generation, responder, call.streams)
        if generation.unenforced:
            answer.headers[UNENFORCED] = ", ".join(generation.unenforced)
        return answer

    async def _answer(
        self, watch: ClientWatch, generation: Generation, responder: WholeResponder, streams: bool
    ) -> Response:
        if not streams:
            pieces = await watch.unless_gone(_whole(generation, responder))
            generation.served()
            account = self.service.held.account()
            generation.close()  # all that it held is in the pieces now
            return WholeAnswer(
                generation.request_id, pieces, account, watch, self.service.config.client_timeout_s
            )
        assert isinstance(responder, Responder), "this endpoint does not stream"
        batches = generation.stream()
        # the first tokens decide between an error status and a stream
        first = await watch.unless_gone(anext(batches))
        return EventStream(
            generation, batches, first, responder, watch, self.service.config.client_timeout_s
        )


def check_model(service: Service, name: str) -> None:
    """Raises ApiError (404) for a model that is not served."""
    if name not in service.model_names:
        served = ", ".join(map(repr, service.model_names))
        message = f"the model {name!r} does not exist: this server has {served}"
        raise ApiError(
            message, status=404, kind="not_found_error", param="model", code="model_not_found"
        )


def options_of(
    request: Request,
    service: Service,
    prefix: str,
    received: float,
    priority: int | None = None,
    cache_salt: str | None = None,
) -> dict[str, Any]:
    """Returns the options of `Service.admit` that every call has, besides prompt and sampling.

    `prefix` begins the answer's id, for example "cmpl-". `priority` and `cache_salt` are the
    body's. Raises ApiError naming the parameter.
    """
    return {
        "request_id": _request_id(request, prefix),
        "priority": _checked_priority(priority or 0, service.config.min_priority),
        "cache_salt": cache_salt or "",
        "session_id": request.headers.get("x-session-id", ""),
        "received": received,
        "trace": getattr(request.state, "trace", None),
        "tenant": str(request.state.tenant) if service.config.salt_by_key else "",
    }


async def words_of(service: Service, call: SamplingFields) -> dict[str, Any]:
    """Returns logit rules of the words and tokens that the call names.

    `admit_turn` takes the form of the content apart from these rules. Raises ApiError naming the
    parameter.
    """
    rules = await service.rules(None, call.bad_words or (), call.allowed_token_ids or ())
    return rules.settings


def _checked_priority(priority: int, lowest: int | None) -> int:
    if lowest is not None and priority < lowest:
        message = (
            f"priority must be at least {lowest} (the lowest runs first), not {priority}: send "
            "a larger number, or lower router.min_priority"
        )
        raise ApiError(message, param="priority")
    return priority


def _request_id(request: Request, prefix: str) -> str:
    """Returns the prefix and the request's name. Raises ApiError if the client's name is not
    allowed."""
    given = request.headers.get(REQUEST_ID)
    try:
        return f"{prefix}{request.state.name if given is None else check_request_id(given)}"
    except ValueError as error:
        raise ApiError(f"{REQUEST_ID}: {error}", param=REQUEST_ID) from error


def _shows_timeline(request: Request) -> bool:
    """True if the answer should say where its time and bytes went."""
    given = request.headers.get("x-pdserve-timeline", "0")
    if given not in ("0", "1"):
        raise ApiError(
            f"x-pdserve-timeline must be 0 or 1, not {given!r}", param="x-pdserve-timeline"
        )
    return given == "1"


async def _whole(generation: Generation, responder: WholeResponder) -> JsonPieces:
    return await responder.whole(await generation.collect())
