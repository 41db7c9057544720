"""The dialect of POST /v1/responses, the count of its input's tokens, and the paths of stored
responses, which do not exist.

Used by `router.http.app`.
"""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from pdserve.router.errors import ApiError
from pdserve.router.http.answers import Responder
from pdserve.router.http.calls import Calls, Dialect, check_model, options_of, words_of
from pdserve.router.http.endpoints import json_response
from pdserve.router.http.responses.names import Names
from pdserve.router.http.responses.requests import ResponsesRequest
from pdserve.router.http.responses.responder import ResponsesResponder
from pdserve.router.request.generation import Generation
from pdserve.router.request.prompts import INLINE_MESSAGES
from pdserve.router.request.service import Service
from pdserve.router.turns import admit_turn, check_turn
from pdserve.turns.turn import Turn

ID_PREFIX = "resp_"


class ResponsesDialect(Dialect[ResponsesRequest]):
    kind = ResponsesRequest

    async def admit(self, request: Request, call: ResponsesRequest, received: float) -> Generation:
        service = self._service
        check_model(service, call.model)
        call.check()
        turn, names = await turn_of(service, call)
        try:
            form = call.structured()
            words = await words_of(service, call)
            return await admit_turn(
                service,
                turn,
                call.sampling(service.sampling_defaults, words),
                form,
                open_ended=call.is_open_ended,
                **options_of(request, service, ID_PREFIX, received, call.priority, call.cache_salt),
            )
        except ApiError as error:
            raise names.renamed(error) from error.__cause__

    def responder(
        self, call: ResponsesRequest, generation: Generation, shows_timeline: bool
    ) -> Responder:
        service = self._service
        return ResponsesResponder(
            call, generation, service.tokenizer, service.default_sampling, shows_timeline
        )


class InputCounter:
    """Answers POST /v1/responses/input_tokens, which takes the same bodies as POST /v1/responses.

    It refuses what that refuses, except for what depends on the prompt's length and on the grammar
    of tools. A request holds a place in admission only while its prompt is made and counted.
    """

    def __init__(self, service: Service, calls: Calls) -> None:
        self._service = service
        self._calls = calls

    async def count(self, request: Request) -> Response:
        """Answers one request."""

        async def use(call: ResponsesRequest) -> int:
            service = self._service
            check_model(service, call.model)
            call.check()
            turn, names = await turn_of(service, call)
            options = options_of(request, service, ID_PREFIX, 0.0, call.priority, call.cache_salt)
            try:
                form = call.structured()
                words = await words_of(service, call)
                sampling = call.sampling(service.sampling_defaults, words)
                check_turn(service, turn, form, sampling)
                await service.rules(form)
                await service.check(
                    sampling,
                    num_prompts=1,
                    priority=options["priority"],
                    cache_salt=options["cache_salt"],
                    session_id=options["session_id"],
                )
                call.forget_input()
                return await service.count_tokens(turn)
            except ApiError as error:
                raise names.renamed(error) from error.__cause__

        _, num_tokens, watch = await self._calls.parsed(request, ResponsesRequest, use)
        watch.close()
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


async def turn_of(service: Service, call: ResponsesRequest) -> tuple[Turn, Names]:
    """Makes the turn; in a thread if there are many items, as thousands take many milliseconds."""
    turns = service.turns
    can_reason = turns.reasoning is not None
    if _has_many(call):
        return await asyncio.to_thread(call.turn, turns.reads, can_reason)
    return call.turn(turns.reads, can_reason)


async def stored_response(request: Request) -> Response:
    """Answers a request about a response by its id: there is none."""
    name = request.path_params["name"]
    raise ApiError(
        f"there is no response {name!r:.80}: this server stores none: keep the answer, and send "
        "its output items as input of the next request",
        status=404,
        kind="not_found_error",
        param="response_id",
        code="response_not_found",
    )


def _has_many(call: ResponsesRequest) -> bool:
    """True if the input has many items, or many parts of items."""
    if isinstance(call.input, str):
        return False
    lists = [value for item in call.input for value in item.values() if isinstance(value, list)]
    return len(call.input) + sum(map(len, lists)) > INLINE_MESSAGES
