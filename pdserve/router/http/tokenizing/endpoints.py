"""POST /tokenize and /detokenize, GET /tokenizer_info: for clients that count and cut prompts as
this server does. lm-eval's remote tokenizer works with them.

A request holds a place in admission while its tokens are made. A text may be longer than the
model's context. Used by `router.http.app`.
"""

import asyncio
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.router.errors import ApiError
from pdserve.router.http.calls import Calls, check_model, options_of
from pdserve.router.http.endpoints import Endpoints, json_response
from pdserve.router.http.tokenizing.requests import DetokenizeRequest, TokenizeRequest
from pdserve.router.request.service import Service
from pdserve.router.turns import check_turn

ID_PREFIX = "tok-"
INLINE_IDS = 4096  # this number of ids is made into text within a millisecond or two


class TokenizerEndpoints:
    def __init__(self, service: Service, calls: Calls) -> None:
        self._service = service
        self._calls = calls

    def routes(self, endpoints: Endpoints) -> list[Route]:
        endpoint = endpoints.endpoint
        return [
            Route("/tokenize", endpoint(self.tokenize), methods=["POST"]),
            Route("/detokenize", endpoint(self.detokenize), methods=["POST"]),
            Route("/tokenizer_info", endpoint(self.info), methods=["GET"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        options_of(request, self._service, ID_PREFIX, 0.0)  # refuses a name that is not allowed
        call, ids, watch = await self._calls.parsed(request, TokenizeRequest, self._ids)
        watch.close()
        texts = self._service.tokenizer.vocabulary_texts
        shown = await asyncio.to_thread(texts, ids) if call.return_token_strs else None
        return json_response(
            {
                "count": len(ids),
                "max_model_len": self._service.most_tokens,
                "tokens": ids,
                "token_strs": shown,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        options_of(request, self._service, ID_PREFIX, 0.0)
        _, text, watch = await self._calls.parsed(request, DetokenizeRequest, self._text)
        watch.close()
        return json_response({"prompt": text})

    async def info(self, request: Request) -> Response:
        return json_response(self._info | {"model_max_length": self._service.most_tokens})

    async def _ids(self, call: TokenizeRequest) -> list[int]:
        service = self._service
        _check_model(service, call.model)
        call.check()
        with service.admission.preparing():
            if call.prompt is not None:
                adds = call.add_special_tokens is not False
                return await service.prompts.encode(call.prompt, adds, "prompt")
            turn = call.turn()
            check_turn(service, turn)
            text = await service.prompts.render_any(turn, service.turns)
            return await service.prompts.encode(text, bool(call.add_special_tokens), "messages")

    async def _text(self, call: DetokenizeRequest) -> str:
        service = self._service
        tokenizer = service.tokenizer
        _check_model(service, call.model)
        ids = call.tokens
        if ids and (min(ids) < 0 or max(ids) >= tokenizer.vocab_size):
            raise ApiError(
                f"tokens holds token ids outside the vocabulary 0..{tokenizer.vocab_size - 1}",
                param="tokens",
            )
        with service.admission.preparing():
            if len(ids) <= INLINE_IDS:
                return tokenizer.decode(ids, skip_special_tokens=False)
            return await asyncio.to_thread(tokenizer.decode, ids, False)

    @cached_property
    def _info(self) -> dict[str, Any]:
        return self._service.tokenizer.description()


def _check_model(service: Service, name: str | None) -> None:
    if name is not None:
        check_model(service, name)
