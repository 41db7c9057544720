"""Writes answers of /v1/embeddings: makes hidden rows into embeddings, in OpenAI's form.

Knows no HTTP. Made by `router.http.embeddings.dialect`, one per call.
"""

import time
from base64 import b64encode
from collections.abc import Sequence

from pdserve.configs.embedding import EmbeddingModel
from pdserve.protocol.embedding import embedding_of
from pdserve.router.http.embeddings.requests import EmbeddingRequest
from pdserve.router.http.json_pieces import Json, JsonPieces, json_array, json_bytes
from pdserve.router.request.generation import ChoiceResult, Generation


class EmbeddingResponder:
    """Writes the answer of one call; implements `answers.WholeResponder`."""

    def __init__(
        self,
        request: EmbeddingRequest,
        generation: Generation,
        model: EmbeddingModel,
        shows_timeline: bool,
    ) -> None:
        generation.forget_prompts()
        self._generation = generation
        self._model = model
        self._dimensions = request.dimensions
        self._normalize = request.normalize
        self._is_base64 = request.encoding_format == "base64"
        self._shows_timeline = shows_timeline
        self._head: Json = {
            "id": generation.request_id,
            "object": "list",
            "created": int(time.time()),
            "model": request.model,
        }

    async def whole(self, results: Sequence[ChoiceResult]) -> JsonPieces:
        """Makes the answer. `results` has one entry per prompt, without text."""
        pieces = JsonPieces()
        hold = self._generation.hold
        hold(pieces.add([json_bytes(self._head)[:-1], b',"data":[']))
        with self._generation.pacer.pace() as pace:
            for number in range(len(results)):
                if pace.is_due:
                    await pace.rest()
                hold(pieces.add([b"," if number else b"", self._item(number)]))
            hold(pieces.add([b'],"usage":', json_bytes(self._usage())]))
            if self._shows_timeline:
                timelines = await json_array(self._generation.timelines(), pace)
                hold(pieces.add([b',"timeline":', timelines]))
            pieces.add([b"}"])
        return pieces

    def _item(self, number: int) -> bytes:
        row = self._generation.embedded_row(number)
        vector = embedding_of(row, self._model, self._dimensions, self._normalize)
        shown = b64encode(vector.astype("<f4").tobytes()) if self._is_base64 else None
        values = vector.tolist() if shown is None else shown.decode()
        return json_bytes({"object": "embedding", "index": number, "embedding": values})

    def _usage(self) -> Json:
        generation = self._generation
        return {
            "prompt_tokens": generation.num_prompt_tokens,
            "total_tokens": generation.num_prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        }
