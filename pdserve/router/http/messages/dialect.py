"""The dialect of Anthropic's Messages API: turns a request into a Generation, or counts its tokens.

Used by `router.http.messages.routes`.
"""

from starlette.requests import Request
from starlette.responses import Response

from pdserve.router.errors import ApiError
from pdserve.router.http.answers import Responder
from pdserve.router.http.calls import Calls, Dialect, check_model, options_of
from pdserve.router.http.endpoints import json_response
from pdserve.router.http.messages.errors import renamed
from pdserve.router.http.messages.requests import CountRequest, MessagesRequest
from pdserve.router.http.messages.responder import ID_PREFIX, MessagesResponder
from pdserve.router.request.generation import Generation
from pdserve.router.request.service import Service
from pdserve.router.turns import admit_turn, check_turn


class MessagesDialect(Dialect[MessagesRequest]):
    """Admits and answers POST /v1/messages."""

    kind = MessagesRequest

    async def admit(self, request: Request, call: MessagesRequest, received: float) -> Generation:
        service = self._service
        check_model(service, call.model)
        try:
            turn = call.turn(service.turns.reads)
            form = call.structured()
            rules = await service.rules(None, call.bad_words or (), call.allowed_token_ids or ())
            return await admit_turn(
                service,
                turn,
                call.sampling(service.sampling_defaults, rules.settings),
                form,
                open_ended=True,  # max_tokens is an upper limit; less may fit
                **options_of(request, service, ID_PREFIX, received, call.priority, call.cache_salt),
            )
        except ApiError as error:
            raise renamed(error) from error.__cause__

    def responder(
        self, call: MessagesRequest, generation: Generation, shows_timeline: bool
    ) -> Responder:
        return MessagesResponder(call, generation, shows_timeline)


class TokenCounter:
    """Answers POST /v1/messages/count_tokens.

    A request holds a place in admission only while its prompt is made and counted.
    """

    def __init__(self, service: Service, calls: Calls) -> None:
        self._service = service
        self._calls = calls

    async def count(self, request: Request) -> Response:
        """Answers one request."""

        async def use(call: CountRequest) -> int:
            service = self._service
            check_model(service, call.model)
            options_of(request, service, ID_PREFIX, 0.0)  # refuses a name that is not allowed
            try:
                turn = call.turn(service.turns.reads)
                form = call.structured()
                check_turn(service, turn)
                await service.rules(form)
                call.forget_input()
                return await service.count_tokens(turn)
            except ApiError as error:
                raise renamed(error) from error.__cause__

        _, num_tokens, watch = await self._calls.parsed(request, CountRequest, use)
        watch.close()
        return json_response({"input_tokens": num_tokens})
