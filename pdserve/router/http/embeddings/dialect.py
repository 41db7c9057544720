"""The dialect of /v1/embeddings: turns a request into a Generation that generates nothing.

Used by `router.http.app`.
"""

from typing import ClassVar

from starlette.requests import Request

from pdserve.protocol.request_key import RequestKind
from pdserve.router.http.calls import Dialect, check_model, options_of
from pdserve.router.http.embeddings.requests import NAMES, EmbeddingRequest
from pdserve.router.http.embeddings.responder import EmbeddingResponder
from pdserve.router.request.generation import Generation


class EmbeddingDialect(Dialect[EmbeddingRequest]):
    kind = EmbeddingRequest
    operation = "embeddings"
    wanted: ClassVar[RequestKind] = "embed"

    async def admit(self, request: Request, call: EmbeddingRequest, received: float) -> Generation:
        check_model(self._service, call.model)
        return await self._service.admit_embedding(
            call.prompts(),
            dimensions=call.dimensions,
            names=NAMES,
            truncate_prompt_tokens=call.truncate_prompt_tokens,
            add_special_tokens=call.add_special_tokens is not False,
            **options_of(request, self._service, "embd-", received, call.priority, call.cache_salt),
        )

    def responder(
        self, call: EmbeddingRequest, generation: Generation, shows_timeline: bool
    ) -> EmbeddingResponder:
        assert self._service.embedding is not None, "only a model that embeds admits the call"
        return EmbeddingResponder(call, generation, self._service.embedding, shows_timeline)
