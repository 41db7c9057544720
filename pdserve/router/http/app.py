"""The OpenAI-compatible HTTP server: Starlette routes over `router.request.service`.

Answers in JSON or server-sent events, turns every error into OpenAI's form, and stops a
generation as soon as its client is gone. Knows no workers. Built by `cluster/` (Serve ingress) and by tests.
"""

import asyncio
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pdserve.configs.schema import RouterConfig
from pdserve.protocol.request_key import check_request_id
from pdserve.router.admin import Admin
from pdserve.router.errors import ApiError
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.held_bytes import Account
from pdserve.router.http.admin_api import admin_routes
from pdserve.router.http.auth import ApiKeys
from pdserve.router.http.bodies import Bodies
from pdserve.router.http.openai.openapi import openapi_document
from pdserve.router.http.openai.requests import LONG_BODY, ChatRequest, CompletionRequest, parse, parse_long
from pdserve.router.http.openai.responders import ChatResponder, CompletionResponder, JsonPieces, Responder, event_bytes
from pdserve.router.metrics_page import exposition
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.generation import Generation
from pdserve.router.request.request_checks import check_num_choices
from pdserve.router.request.request_log import log_of
from pdserve.router.request.service import Service
from pdserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", CompletionRequest, ChatRequest)
Endpoint = Callable[[Request], Awaitable[Response]]
Admit = Callable[[Request, R, float], Awaitable[Generation]]  # the float: perf_counter() when the call came

# bodies that are decoded and made into prompts at once: larger ones one at a time, other long ones a few
ALONE_BYTES = 1 << 20
LONG_AT_ONCE = 4
CHUNKS_AT_ONCE = 4  # encoded between two looks at how much they are; each may repeat a long prompt
COUNTED_BYTES = 1 << 12  # of a stream's events that count while they are being sent; fewer fit into any buffer
SEND_BYTES = 1 << 17  # a server is given so much before it may say that the client does not read

REQUEST_ID = "x-request-id"

# nginx's status for a client that went away; nobody reads it but the access log
CLIENT_CLOSED = 499


class _ClientGone(Exception):
    pass


def build_app(
    fleet: Fleet,
    tokenizer: Tokenizer,
    config: RouterConfig,
    model_name: str,
    service: Service | None = None,
    admin: Admin | None = None,
    names_requests: bool = True,
) -> Starlette:
    """model_name: what clients send as `model`. service: to share one with a Python handle; made here by default.
    admin: with it there are the operator's routes; only where no proxy hides who asks. names_requests: answers have the
    header x-request-id; False where the server around this app adds it, as Serve's does. Raises ValueError when the API
    keys that the configuration speaks of cannot be read."""
    api = _Api(service or Service(fleet, tokenizer, config, model_name), ApiKeys(config), names_requests)
    routes = [
        Route("/v1/completions", api.endpoint(api.completions), methods=["POST"]),
        Route("/v1/chat/completions", api.endpoint(api.chat), methods=["POST"]),
        Route("/v1/models", api.endpoint(api.models), methods=["GET"]),
        Route("/v1/models/{name:path}", api.endpoint(api.model), methods=["GET"]),
        # open: load balancers have no keys, and learn a yes or no
        Route("/health", api.endpoint(api.health, is_open=True), methods=["GET"]),
        # open by default, as with vLLM: scrapers have no keys, and the page has counts, but nothing of any request
        Route("/metrics", api.endpoint(api.metrics, is_open=not config.metrics_need_key), methods=["GET"]),
        Route("/openapi.json", api.endpoint(api.openapi, is_open=True), methods=["GET"]),
    ]
    if admin is not None:
        routes += admin_routes(admin, api.endpoint, api.body)
    app = Starlette(routes=routes, exception_handlers={HTTPException: api.http_error})
    app.state.service = api.service
    return app


class _Api:
    def __init__(self, service: Service, keys: ApiKeys, names_requests: bool) -> None:
        config = service.config
        self.service = service
        self._bodies = Bodies(config.max_body_bytes, config.max_total_body_bytes, config.client_timeout_s)
        service.metrics.body_bytes.set_function(lambda: self._bodies.num_bytes)
        self._alone, self._few = asyncio.Semaphore(1), asyncio.Semaphore(LONG_AT_ONCE)
        self._keys = keys
        self._names_requests = names_requests

    def endpoint(self, handler: Endpoint, is_open: bool = False) -> Endpoint:
        """The handler, for those who have a key, with its errors in OpenAI's form. is_open: for everybody."""

        async def call(request: Request) -> Response:
            request.state.name = _name_of(request)
            return self._named(await answer(request), request.state.name)

        async def answer(request: Request) -> Response:
            try:
                if not is_open:
                    request.state.tenant = self._keys.check(request.headers.get("authorization"))
                return await handler(request)
            except ApiError as error:
                self.service.metrics.rejections.labels(str(error.status), error.reason).inc()
                if not error.logged:
                    self.service.request_log.refused(request.state.name, error)
                return _error(error)
            except (_ClientGone, ClientDisconnect):
                return Response(status_code=CLIENT_CLOSED)
            except Exception:
                path, name = request.url.path, request.state.name
                log_of(logger, logging.ERROR, name, "%s failed, x-request-id %s", path, name, exc_info=True)
                return _error(_internal())

        return call

    def _named(self, response: Response, name: str) -> Response:
        if self._names_requests:
            response.headers[REQUEST_ID] = name
        return response

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Unknown paths and methods."""
        assert isinstance(error, HTTPException)
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        message = f"{request.method} {request.url.path}: {error.detail}"
        return self._named(_error(ApiError(message, status=error.status_code, kind=kind)), _name_of(request))

    async def completions(self, request: Request) -> Response:
        shows_timeline = _shows_timeline(request)
        call, generation, watch = await self._admitted(request, CompletionRequest, self._admit_completion)
        with _closing_on_error(generation, watch):
            responder = CompletionResponder(call, generation, self.service.tokenizer, shows_timeline)
            call.prompt = ""  # which may be long, while the answer may take its time
            return await self._answer(watch, generation, responder, bool(call.stream))

    async def chat(self, request: Request) -> Response:
        shows_timeline = _shows_timeline(request)
        call, generation, watch = await self._admitted(request, ChatRequest, self._admit_chat)
        with _closing_on_error(generation, watch):
            responder = ChatResponder(call, generation, self.service.tokenizer, shows_timeline)
            call.messages = []
            return await self._answer(watch, generation, responder, bool(call.stream))

    async def _admitted(self, request: Request, kind: type[R], admit: Admit[R]) -> tuple[R, Generation, "_ClientWatch"]:
        """The request as it was sent, its generation, and who knows when its client goes away."""
        received = time.perf_counter()
        with await self._bodies.read(request) as body:
            watch = _ClientWatch(request.receive)
            try:
                if len(body) > LONG_BODY:
                    admitting = self._admit_long(request, body, kind, admit, received)
                    call, generation = await watch.unless_gone(admitting, lambda admitted: admitted[1].close())
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
        """A few at a time, since a body's values, texts and token ids may take several times its size."""
        async with self._alone if len(body) > ALONE_BYTES else self._few:
            with self.service.pacer.pace() as pace:
                call = await parse_long(body, kind, self.service.lengths(), pace)
            return call, await admit(request, call, received)

    async def _admit_completion(self, request: Request, call: CompletionRequest, received: float) -> Generation:
        self._check_model(call.model)
        check_num_choices(self.service.config, call.n or 1)
        return await self.service.admit(
            call.prompts(),
            call.sampling(self.service.sampling_defaults),
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
        sampling = call.sampling(self.service.sampling_defaults)
        prompt = await self.service.chat_prompt(
            call.messages, call.add_generation_prompt is not False, call.tools, call.chat_template_kwargs
        )
        return await self.service.admit(
            [prompt],
            sampling,
            request_id=_request_id(request, "chatcmpl"),
            priority=self._priority(call.priority),
            cache_salt=call.cache_salt or "",
            session_id=request.headers.get("x-session-id", ""),
            add_special_tokens=False,
            received=received,
            named="messages",
            tenant=self._tenant(request),
            open_ended=call.is_open_ended,
        )

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """A name may hold slashes, as on the Hub."""
        self._check_model(request.path_params["name"])
        return _json(self._model_card())

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.service.fleet.decode_workers else 503)

    async def metrics(self, request: Request) -> Response:
        with self.service.pacer.pace() as pace:
            # A page takes a millisecond: of many who ask at once, one is served in a turn of the loop.
            await pace.rest()
            page = exposition(self.service.metrics, self.service.fleet)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        return Response(self._openapi_json, media_type="application/json")

    @cached_property
    def _openapi_json(self) -> bytes:
        return msgspec.json.encode(openapi_document(self.service.config, self.service.model_name, self._keys.required))

    def _priority(self, given: int | None) -> int:
        priority, lowest = given or 0, self.service.config.min_priority
        if lowest is not None and priority < lowest:
            message = (
                f"priority must be at least {lowest} (the lowest runs first), not {priority}: send more, or lower "
                "router.min_priority"
            )
            raise ApiError(message, param="priority")
        return priority

    def _tenant(self, request: Request) -> str:
        return str(request.state.tenant) if self.service.config.salt_by_key else ""

    async def body(self, request: Request) -> bytearray:
        with await self._bodies.read(request) as body:
            return body

    async def _answer(
        self, watch: "_ClientWatch", generation: Generation, responder: Responder, streams: bool
    ) -> Response:
        if not streams:
            pieces = await watch.unless_gone(_whole(generation, responder))
            generation.served()
            account = self.service.held.account()
            generation.close()  # what it held is in the pieces now
            return _WholeAnswer(generation.request_id, pieces, account, watch, self.service.config.client_timeout_s)
        batches = generation.stream()
        # the first tokens decide between an error status and a stream
        first = await watch.unless_gone(anext(batches))
        return _EventStream(generation, batches, first, responder, watch, self.service.config.client_timeout_s)

    def _model_card(self) -> dict[str, Any]:
        workers = self.service.fleet.decode_workers
        length = max((worker.token_limit for worker in workers), default=None)
        name = self.service.model_name
        return {"id": name, "object": "model", "created": 0, "owned_by": "pdserve", "max_model_len": length}

    def _check_model(self, name: str) -> None:
        if name != self.service.model_name:
            message = f"the model {name!r} does not exist: this server has {self.service.model_name!r}"
            raise ApiError(message, status=404, kind="not_found_error", param="model", code="model_not_found")


def _request_id(request: Request, prefix: str) -> str:
    """The request's name after the prefix. Raises ApiError when the client gave one that cannot be."""
    given = request.headers.get(REQUEST_ID)
    try:
        return f"{prefix}-{request.state.name if given is None else check_request_id(given)}"
    except ValueError as error:
        raise ApiError(f"{REQUEST_ID}: {error}", param=REQUEST_ID) from error


def _name_of(request: Request) -> str:
    """The client's x-request-id, or a new one, also where the client's cannot be."""
    if given := request.headers.get(REQUEST_ID):
        with suppress(ValueError):
            return check_request_id(given)
    return secrets.token_hex(16)


def _shows_timeline(request: Request) -> bool:
    """Whether the answer is to say where its time and bytes went."""
    given = request.headers.get("x-pdserve-timeline", "0")
    if given not in ("0", "1"):
        raise ApiError(f"x-pdserve-timeline must be 0 or 1, not {given!r}", param="x-pdserve-timeline")
    return given == "1"


@contextmanager
def _closing_on_error(generation: Generation, watch: "_ClientWatch") -> Iterator[None]:
    """Nothing of it stays at workers, nor its places in admission, when no response comes to own it."""
    try:
        yield
    except BaseException:
        watch.close()
        generation.close()
        raise


class _ClientWatch:
    """Knows when the client goes away. Listens from the moment the body is read; there must be only one listener."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.create_task(_wait_disconnect(receive))

    async def unless_gone(
        self, work: Coroutine[Any, Any, T] | Awaitable[T], undo: Callable[[T], None] = lambda result: None
    ) -> T:
        """The result of work, which is cancelled, with _ClientGone raised, when the client leaves before. undo: gets
        the result when there is one, but the caller was cancelled before it could get it."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _ClientGone
            return task.result()
        except BaseException:
            task.add_done_callback(lambda ended: undo(ended.result()) if _has_result(ended) else None)
            await _stop(task)
            raise
        finally:
            del task  # its error refers to this frame, and by that to all that was being made

    def close(self) -> None:
        """Listen no more; work that is under way is stopped as if the client had left."""
        self._gone.cancel()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _has_result(task: asyncio.Future[Any]) -> bool:
    return not task.cancelled() and task.exception() is None


async def _stop(task: asyncio.Future[Any]) -> None:
    """Cancel and let its `finally` blocks run."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


class _Answer(Response, ABC):
    """An answer on its way. It ends when the client leaves, or takes nothing for timeout_s, or when too much is held
    for clients and most for this one. account: what is held for it."""

    def __init__(
        self, request_id: str, account: Account, watch: _ClientWatch, timeout_s: float, headers: dict[str, str]
    ) -> None:
        super().__init__(headers=headers)
        self._request_id = request_id
        self._account = account
        self._watch = watch
        self._timeout_s = timeout_s
        self._num_sends = 0
        self._sending = False
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._look, 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._watch.unless_gone(self._send_all(send))
            self._sent()
        except (_ClientGone, OSError):
            log_of(logger, logging.DEBUG, self._request_id, "client left %s", self._request_id)
        finally:
            self._timer.cancel()
            self._account.close()
            self._watch.close()
            await self._end()

    @abstractmethod
    async def _send_all(self, send: Send) -> None:
        """Give the server the whole answer."""

    def _sent(self) -> None:
        """The last byte is out."""

    async def _end(self) -> None:
        """Whether all was sent or not."""

    def _look(self, num_sends: int) -> None:
        """Whether the send of the last look still waits."""
        if self._sending and self._num_sends == num_sends:
            name, limit = self._request_id, self._timeout_s
            log_of(logger, logging.WARNING, name, "the client of %s read nothing for %g s", name, limit)
            self._watch.close()
            return
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._look, self._num_sends)

    def _cut(self) -> None:
        """Too much is held for slow readers, and most for this one."""
        name = self._request_id
        log_of(logger, logging.WARNING, name, "the client of %s reads too slowly: cut off (max_held_bytes)", name)
        self._watch.close()

    async def _begin(self, send: Send) -> None:
        self._sending = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sending = False

    async def _send(self, send: Send, body: bytes, more: bool) -> None:
        self._num_sends += 1
        self._sending = True
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending = False


class _EventStream(_Answer):
    """Server-sent events of one generation. Ends it, whatever ends the stream.

    While the client does not read, `send` waits, once the connection's buffers are full. What the generation makes
    meanwhile is kept, counts against max_held_bytes, and is sent in few large events.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        batches: AsyncGenerator[list[OutputChunk], None],
        first: list[OutputChunk],
        responder: Responder,
        watch: _ClientWatch,
        timeout_s: float,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(generation.request_id, generation.account, watch, timeout_s, headers)
        del self.headers["content-length"]
        self._generation = generation
        self._batches = batches
        self._left = first  # chunks of a batch that are not sent yet
        self._responder = responder
        generation.on_cut = self._cut

    def _sent(self) -> None:
        self._generation.served()

    async def _end(self) -> None:
        self._generation.close()
        await self._batches.aclose()

    async def _send_all(self, send: Send) -> None:
        await self._begin(send)
        more = True
        while more:
            body, more = await self._next()
            if len(body) > COUNTED_BYTES:
                await self._send_long(send, body, more)
            elif body:
                await self._send(send, body, more)

    async def _send_long(self, send: Send, body: bytes, more: bool) -> None:
        self._account.add(len(body))
        for part, more_parts in _of_size([body]):
            await self._send(send, part, more or more_parts)
            self._account.add(-len(part))

    async def _next(self) -> tuple[bytes, bool]:
        """What to write next, and whether more follows. Never raises: the answer has begun."""
        try:
            if self._left:
                await self._generation.pacer.turn()
            else:
                self._left = await anext(self._batches)
            return await self._encode(), True
        except StopAsyncIteration:
            ending = await self._responder.ending()
        except ApiError as error:
            ending = event_bytes(error.body())
        except Exception:
            name = self._request_id
            log_of(logger, logging.ERROR, name, "stream %s failed", name, exc_info=True)
            ending = event_bytes(_internal().body())
        return ending + b"data: [DONE]\n\n", False

    async def _encode(self) -> bytes:
        """The events of a batch; of long ones a part, the rest being left for the next time."""
        batch, self._left = self._left, []
        if len(batch) == 1 and not self._responder.prepares:  # nearly all are such
            return self._responder.stream(batch[0])
        events, start = b"", 0
        while start < len(batch) and len(events) < SEND_BYTES:
            chunks = batch[start : start + CHUNKS_AT_ONCE]
            if self._responder.prepares:
                for chunk in chunks:
                    await self._responder.prepare(chunk)
            events += b"".join([self._responder.stream(chunk) for chunk in chunks])
            start += CHUNKS_AT_ONCE
        self._left = batch[start:]
        return events


class _WholeAnswer(_Answer):
    """JSON in pieces: joined, they might take a multiple of their memory."""

    media_type = "application/json"

    def __init__(
        self, request_id: str, pieces: JsonPieces, account: Account, watch: _ClientWatch, timeout_s: float
    ) -> None:
        super().__init__(request_id, account, watch, timeout_s, {"content-length": str(pieces.num_bytes)})
        self._pieces = pieces
        account.on_cut = self._cut
        account.add(pieces.num_held)

    async def _send_all(self, send: Send) -> None:
        await self._begin(send)
        for body, more in _of_size(self._taken()):
            await self._send(send, body, more)

    def _taken(self) -> Iterator[bytes]:
        for piece, num_bytes in self._pieces.take():
            yield piece
            self._account.add(-num_bytes)


async def _whole(generation: Generation, responder: Responder) -> JsonPieces:
    return await responder.whole(await generation.collect())


def _of_size(pieces: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """The same bytes, about SEND_BYTES at a time, and whether more follow."""
    waiting = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), SEND_BYTES):
            if len(waiting) >= SEND_BYTES:
                yield bytes(waiting), True
                waiting.clear()
            waiting += piece[start : start + SEND_BYTES]
    yield bytes(waiting), False


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(data), status_code=status, headers=headers, media_type="application/json")


def _error(error: ApiError) -> Response:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _json(error.body(), error.status, headers)


def _internal() -> ApiError:
    return ApiError("the server failed; its log says why", status=500, kind="internal_error")
