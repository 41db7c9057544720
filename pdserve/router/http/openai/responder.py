"""The common part of both endpoints' answers: turns chunks and whole choices of a Generation into
JSON.

There is one object per HTTP request, since log-probabilities and echoed prompts depend on what was
sent before. vLLM's extensions (stop_reason, token_ids, prompt_logprobs) are included. Knows no
HTTP. The base of `completions` and `chat`; `router.http.answers` calls it as a Responder.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import msgspec

from pdserve.background.pace import Pace
from pdserve.protocol.events import TokenLogprob
from pdserve.router.errors import ApiError
from pdserve.router.http.json_pieces import (
    Json,
    JsonPieces,
    event_bytes,
    finite,
    json_array,
    json_bytes,
)
from pdserve.router.http.openai.logprobs import token_id_name
from pdserve.router.http.openai.requests import BaseRequest
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.generation import ChoiceResult, Generation
from pdserve.text.tokenizer import Tokenizer

# These stand for a chunk's text and token ids while a frame is made. In the JSON, nothing after the
# text looks like them.
_MARK = "\0"
_MARK_ID = -1

# members of whole answers that clients may look for, but that have no value here
_NOT_TOLD: Json = {"service_tier": None, "system_fingerprint": None}

DONE = b"data: [DONE]\n\n"  # the last event of a stream


class BaseResponder(ABC):
    """Implements `answers.Responder`, except for the form of a choice, which each endpoint adds."""

    def __init__(
        self,
        request: BaseRequest,
        generation: Generation,
        tokenizer: Tokenizer,
        kind: str,
        shows_timeline: bool,
        shows_prompts: bool,
    ) -> None:
        if not shows_prompts:
            generation.forget_prompts()
        self._generation = generation
        self._tokenizer = tokenizer
        self._include_usage = request.include_usage
        self._continuous_usage = request.continuous_usage
        self._names_ids = bool(request.return_tokens_as_token_ids)
        self._num_tokens: dict[int, int] = {}  # by choice, if each event has its usage
        self._shows_timeline = shows_timeline
        self._frames: dict[int, tuple[bytes, bytes | None, bytes]] = {}
        self._ids_of_prompts: dict[int, msgspec.Raw] = {}
        self._scores_of_prompts: dict[int, list[bytes]] = {}
        self._head = {
            "id": generation.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": request.model,
        }

    @abstractmethod
    def chunks(self, chunk: OutputChunk) -> Iterable[Json]:
        """Makes the stream events of one chunk; none if it shows nothing yet."""

    @property
    @abstractmethod
    def _varies_little(self) -> bool:
        """True if a choice's events, except its first and last, differ only in text and ids."""

    @property
    @abstractmethod
    def _returns_token_ids(self) -> bool: ...

    def stream(self, chunk: OutputChunk) -> bytes:
        """Makes the events of a chunk; see `answers.Responder`.

        A choice's events between its first and last use a frame around the text (and the token
        ids), which is made once. Nearly all events are like this, and encoding only the text takes
        a quarter of the time.
        """
        frame = self._frames.get(chunk.index)
        if frame is not None and chunk.finish_reason is None and not chunk.pieces:
            before, between, after = frame
            if between is not None:
                return (
                    before + json_bytes(chunk.text) + between + json_bytes(chunk.token_ids) + after
                )
            return before + json_bytes(chunk.text) + after if chunk.text else b""
        data = b"".join([event_bytes(event) for event in self.chunks(chunk)])
        if (
            self._varies_little
            and not self._continuous_usage
            and chunk.finish_reason is None
            and not chunk.pieces
        ):
            self._frames[chunk.index] = self._frame(chunk)
        return data

    def _frame(self, chunk: OutputChunk) -> tuple[bytes, bytes | None, bytes]:
        """Makes the bytes around the text, and around the token ids if they are shown.

        The events are the same bytes as without frames.
        """
        *_, event = self.chunks(
            OutputChunk(chunk.index, chunk.prompt, _MARK, (_MARK_ID,), (), None, None)
        )
        before, _, after = event_bytes(event).rpartition(json_bytes(_MARK))
        if not self._returns_token_ids:
            return before, None, after
        between, _, after = after.partition(json_bytes([_MARK_ID]))
        return before, between, after

    def usage(self) -> Json:
        prompt = self._generation.num_prompt_tokens
        generated = self._generation.num_generated_tokens
        usage: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self._generation.num_cached_tokens},
        }
        reading = self._generation.reading
        if reading is not None and reading.reasoning is not None:
            num_reasoning = self._generation.num_reasoning_tokens
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage

    @property
    def prepares(self) -> bool:
        return False

    async def prepare(self, chunk: OutputChunk) -> None:
        return None

    async def ending(self) -> bytes:
        usage: Json = {"usage": self.usage()} if self._include_usage else {}
        with self._generation.pacer.pace() as pace:
            extra = usage | await self._timeline(pace)
        return (event_bytes(self._head | {"choices": []} | extra) if extra else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        return event_bytes(error.body()) + DONE

    async def whole(self, results: Sequence[ChoiceResult]) -> JsonPieces:
        pieces = JsonPieces()
        hold = self._generation.hold
        hold(pieces.add([json_bytes(self._head | _NOT_TOLD)[:-1], b',"choices":[']))
        with self._generation.pacer.pace() as pace:
            for number, result in enumerate(results):
                if pace.is_due:
                    await pace.rest()
                hold(pieces.add([b","] if number else []))
                hold(pieces.add(await self._whole_choice(result, pace)))
            hold(pieces.add([b"],", *await self._behind_choices(pace)]))
        return pieces

    @abstractmethod
    async def _whole_choice(self, result: ChoiceResult, pace: Pace) -> list[bytes]:
        """Makes one choice of a whole answer, in pieces of JSON."""

    async def _behind_choices(self, pace: Pace) -> list[bytes]:
        """Makes the members after the choices, and the end."""
        return [json_bytes({"usage": self.usage()} | await self._timeline(pace))[1:]]

    async def _timeline(self, pace: Pace) -> Json:
        if not self._shows_timeline:
            return {}
        return {"timeline": msgspec.Raw(await json_array(self._generation.timelines(), pace))}

    def _prompt_ids(self, prompt: int) -> msgspec.Raw:
        """Returns a prompt's token ids as JSON, which is made once for all of its choices."""
        if prompt not in self._ids_of_prompts:
            data = json_bytes(self._generation.prompts[prompt])
            self._ids_of_prompts[prompt] = msgspec.Raw(data)
            self._generation.hold(len(data))
        return self._ids_of_prompts[prompt]

    def _event(self, choice: Json) -> Json:
        event = self._head | {"choices": [choice]}
        if self._continuous_usage:
            return event | {"usage": self._usage_of(choice["index"])}
        return event | {"usage": None} if self._include_usage else event

    def _count(self, chunk: OutputChunk) -> None:
        """Counts the chunk's tokens for the usage in the events that follow."""
        if self._continuous_usage:
            before = self._num_tokens.get(chunk.index, 0)
            self._num_tokens[chunk.index] = before + len(chunk.token_ids)

    def _usage_of(self, index: int) -> Json:
        """Returns the usage of one choice so far."""
        prompt = self._generation.prompt_lengths[index // self._generation.n]
        generated = self._num_tokens.get(index, 0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }

    def _token_name(self, token: int) -> str:
        """Returns a token's name in log-probabilities: its text, or its id if asked for."""
        return token_id_name(token) if self._names_ids else self._tokenizer.token_text(token)

    async def _prompt_logprobs(self, prompt: int, pace: Pace) -> list[bytes]:
        """Makes the prompt's log-probabilities in vLLM's form, as JSON.

        For each prompt token there is a dict of token id -> logprob, rank and text. All of a
        prompt's choices share the pieces.
        """
        if prompt not in self._scores_of_prompts:
            scored = self._generation.prompt_logprobs(prompt)
            if scored is None:
                return [b"null"]
            ranked = (None if position is None else self._ranked(position) for position in scored)
            self._scores_of_prompts[prompt] = [await json_array(ranked, pace)]
            self._generation.forget_prompt_logprobs(prompt)
        return self._scores_of_prompts[prompt]

    def _ranked(self, position: TokenLogprob) -> Json:
        ranks = {token: (logprob, rank + 1) for rank, (token, logprob) in enumerate(position.top)}
        ranks[position.token_id] = (position.logprob, position.rank)
        text = self._tokenizer.token_text
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": text(token)}
            for token, (logprob, rank) in ranks.items()
        }
