"""POST /v1/responses as a dialect, and the paths of stored responses, of which there are none.

Used by `router.http.app`.
"""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from pdserve.router.errors import ApiError
from pdserve.router.http.answers import Responder
from pdserve.router.http.calls import Dialect, check_model, options_of, words_of
from pdserve.router.http.responses.names import Names
from pdserve.router.http.responses.requests import ResponsesRequest
from pdserve.router.http.responses.responder import ResponsesResponder
from pdserve.router.request.generation import Generation
from pdserve.router.request.prompts import INLINE_MESSAGES
from pdserve.router.turns import admit_turn
from pdserve.turns.turn import Turn


class ResponsesDialect(Dialect[ResponsesRequest]):
    kind = ResponsesRequest

    async def admit(self, request: Request, call: ResponsesRequest, received: float) -> Generation:
        service = self._service
        check_model(service, call.model)
        call.check()
        turn, names = await self._turn(call)
        try:
            form = call.structured()
            words = await words_of(service, call)
            return await admit_turn(
                service,
                turn,
                call.sampling(service.sampling_defaults, words),
                form,
                open_ended=call.is_open_ended,
                **options_of(request, service, "resp_", received, call.priority, call.cache_salt),
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

    async def _turn(self, call: ResponsesRequest) -> tuple[Turn, Names]:
        """Of many items in a thread, as thousands take many milliseconds."""
        turns = self._service.turns
        can_reason = turns.reasoning is not None
        if _has_many(call):
            return await asyncio.to_thread(call.turn, turns.reads, can_reason)
        return call.turn(turns.reads, can_reason)


async def stored_response(request: Request) -> Response:
    """What is asked of a response by its id."""
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
    """Items, or parts of an item."""
    if isinstance(call.input, str):
        return False
    lists = [value for item in call.input for value in item.values() if isinstance(value, list)]
    return len(call.input) + sum(map(len, lists)) > INLINE_MESSAGES
