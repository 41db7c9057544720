"""The dialects of /v1/completions and /v1/chat/completions: turn a request into a Generation.

Used by `router.http.app`.
"""

from starlette.requests import Request

from pdserve.router.http.answers import Responder
from pdserve.router.http.calls import Dialect, check_model, options_of, words_of
from pdserve.router.http.openai.chat import ChatResponder
from pdserve.router.http.openai.completions import CompletionResponder
from pdserve.router.http.openai.requests import ChatRequest, CompletionRequest
from pdserve.router.request.generation import Generation
from pdserve.router.request.request_checks import check_num_choices
from pdserve.router.turns import admit_turn


class CompletionDialect(Dialect[CompletionRequest]):
    kind = CompletionRequest
    operation = "text_completion"

    async def admit(self, request: Request, call: CompletionRequest, received: float) -> Generation:
        service = self._service
        check_model(service, call.model)
        check_num_choices(service.config, call.n or 1)
        rules = await service.rules(
            call.structured(), call.bad_words or (), call.allowed_token_ids or ()
        )
        return await service.admit(
            call.prompts(),
            call.sampling(service.sampling_defaults, rules.settings),
            unenforced=rules.unenforced,
            names=call.names,
            truncate_prompt_tokens=call.truncate_prompt_tokens,
            add_special_tokens=call.add_special_tokens is not False,
            **options_of(request, service, "cmpl-", received, call.priority, call.cache_salt),
        )

    def responder(
        self, call: CompletionRequest, generation: Generation, shows_timeline: bool
    ) -> Responder:
        return CompletionResponder(call, generation, self._service.tokenizer, shows_timeline)


class ChatDialect(Dialect[ChatRequest]):
    kind = ChatRequest

    async def admit(self, request: Request, call: ChatRequest, received: float) -> Generation:
        service = self._service
        check_model(service, call.model)
        check_num_choices(service.config, call.n or 1)
        turn, form = call.turn(), call.structured()
        words = await words_of(service, call)
        return await admit_turn(
            service,
            turn,
            call.sampling(service.sampling_defaults, words),
            form,
            call.names,
            open_ended=call.is_open_ended,
            truncate_prompt_tokens=call.truncate_prompt_tokens,
            **options_of(request, service, "chatcmpl-", received, call.priority, call.cache_salt),
        )

    def responder(
        self, call: ChatRequest, generation: Generation, shows_timeline: bool
    ) -> Responder:
        return ChatResponder(call, generation, self._service.tokenizer, shows_timeline)
