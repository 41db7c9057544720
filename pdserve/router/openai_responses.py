"""OpenAI's responses: chunks and whole choices of a Generation in, server-sent events and JSON-ready dicts out.

One object per HTTP request, since log-probabilities and echoed prompts need to know what was already sent. vLLM's
extensions (stop_reason, token_ids, prompt_logprobs) are included. Knows no HTTP. Called by `router.app`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from pdserve.engine.protocol import TokenLogprob
from pdserve.router.dispatch import Chunk
from pdserve.router.openai_api import ChatRequest, CompletionRequest
from pdserve.router.service import ChoiceResult, Generation
from pdserve.text.tokenizer import Tokenizer

Json = dict[str, Any]

json_bytes = msgspec.json.Encoder().encode

# stand for a chunk's text and token ids while a frame is made; in JSON, nothing behind the text looks like them
_MARK = "\0"
_MARK_ID = -1

# JSON has no -inf; vLLM writes the same number
LOWEST_LOGPROB = -9999.0


class Responder(Protocol):
    """How one endpoint writes its answers."""

    def stream(self, chunk: Chunk) -> bytes:
        """The server-sent events that one chunk makes; empty when it shows nothing yet."""
        ...

    def ending(self) -> bytes:
        """The event behind the last chunk; empty when nobody asked for usage or timeline."""
        ...

    def whole(self, results: Sequence[ChoiceResult]) -> Json: ...


class _Base(ABC):
    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        model: str,
        kind: str,
        include_usage: bool,
        shows_timeline: bool,
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._include_usage = include_usage
        self._shows_timeline = shows_timeline
        self._frames: dict[int, tuple[bytes, bytes | None, bytes]] = {}
        self._head = {"id": generation.request_id, "object": kind, "created": int(time.time()), "model": model}

    @abstractmethod
    def chunks(self, chunk: Chunk) -> Iterable[Json]:
        """The stream events that one chunk makes; none when it shows nothing yet."""

    @property
    @abstractmethod
    def _varies_little(self) -> bool:
        """Whether the events of a choice, but for its first and last, differ in text and token ids alone."""

    @property
    @abstractmethod
    def _returns_token_ids(self) -> bool: ...

    def stream(self, chunk: Chunk) -> bytes:
        """As Responder says. A choice's events between its first and last are a frame, made once, around the text (and
        the token ids): nearly all events are such, and encoding the text alone takes a quarter of the time."""
        frame = self._frames.get(chunk.index)
        if frame is not None and chunk.finish_reason is None:
            before, between, after = frame
            if between is not None:
                return before + json_bytes(chunk.text) + between + json_bytes(chunk.token_ids) + after
            return before + json_bytes(chunk.text) + after if chunk.text else b""
        data = b"".join([event_bytes(event) for event in self.chunks(chunk)])
        if self._varies_little and chunk.finish_reason is None:
            self._frames[chunk.index] = self._frame(chunk)
        return data

    def _frame(self, chunk: Chunk) -> tuple[bytes, bytes | None, bytes]:
        """What surrounds the text, and the token ids where they are shown: the same bytes as without frames."""
        *_, event = self.chunks(Chunk(chunk.index, chunk.prompt, _MARK, (_MARK_ID,), (), None, None))
        before, _, after = event_bytes(event).rpartition(json_bytes(_MARK))
        if not self._returns_token_ids:
            return before, None, after
        between, _, after = after.partition(json_bytes([_MARK_ID]))
        return before, between, after

    def usage(self) -> Json:
        prompt, generated = self._generation.num_prompt_tokens, self._generation.num_generated_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self._generation.num_cached_tokens},
        }

    def ending(self) -> bytes:
        usage: Json = {"usage": self.usage()} if self._include_usage else {}
        extra = usage | self._timeline()
        return event_bytes(self._head | {"choices": []} | extra) if extra else b""

    def _timeline(self) -> Json:
        return {"timeline": self._generation.timelines()} if self._shows_timeline else {}

    def _event(self, choice: Json) -> Json:
        event = self._head | {"choices": [choice]}
        return event | {"usage": None} if self._include_usage else event

    def _prompt_logprobs(self, prompt: int) -> list[Json | None] | None:
        """vLLM's form: per prompt token a dict of token id -> logprob, rank and text."""
        scored = self._generation.prompt_logprobs(prompt)
        return None if scored is None else [None if p is None else self._ranked(p) for p in scored]

    def _ranked(self, position: TokenLogprob) -> Json:
        ranks = {token: (logprob, rank + 1) for rank, (token, logprob) in enumerate(position.top)}
        ranks[position.token_id] = (position.logprob, position.rank)
        text = self._tokenizer.token_text
        return {
            str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": text(token)}
            for token, (logprob, rank) in ranks.items()
        }


class CompletionResponder(_Base):
    def __init__(
        self, request: CompletionRequest, generation: Generation, tokenizer: Tokenizer, shows_timeline: bool = False
    ) -> None:
        kind, include_usage = "text_completion", request.include_usage
        super().__init__(generation, tokenizer, request.model, kind, include_usage, shows_timeline)
        self._request = request
        self._prompt_texts = self._texts_of_prompts() if request.echo else []
        self._offsets: dict[int, int] = {}

    @property
    def _varies_little(self) -> bool:
        return self._request.logprobs is None and not self._request.scores_prompt_only

    @property
    def _returns_token_ids(self) -> bool:
        return bool(self._request.return_token_ids)

    def usage(self) -> Json:
        usage = super().usage()
        if self._request.scores_prompt_only:
            usage["completion_tokens"], usage["total_tokens"] = 0, usage["prompt_tokens"]
        return usage

    def chunks(self, chunk: Chunk) -> Iterable[Json]:
        first = chunk.index not in self._offsets
        choice = self._choice(chunk.index, chunk.text, chunk.token_ids, chunk.logprobs, first)
        shows = choice["text"] or chunk.finish_reason or self._request.return_token_ids
        if shows or self._request.logprobs is not None:
            yield self._event(choice | {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason})

    def whole(self, results: Sequence[ChoiceResult]) -> Json:
        choices = [
            self._choice(r.index, r.text, r.token_ids, r.logprobs, True)
            | {"finish_reason": r.finish_reason, "stop_reason": r.stop_reason}
            | {"prompt_logprobs": self._asked_prompt_logprobs(r.index)}
            for r in results
        ]
        return self._head | {"choices": choices, "usage": self.usage()} | self._timeline()

    def _asked_prompt_logprobs(self, index: int) -> list[Json | None] | None:
        asked = self._request.prompt_logprobs is not None
        return self._prompt_logprobs(index // self._generation.n) if asked else None

    def _choice(
        self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], first: bool
    ) -> Json:
        """first: nothing of this choice was sent before, so an echoed prompt comes along."""
        prompt = index // self._generation.n
        offset = self._offsets.setdefault(index, 0)
        if self._request.scores_prompt_only:
            text, token_ids, logprobs = "", (), ()
        scored: list[TokenLogprob | None] = list(logprobs)
        if first and self._request.echo:
            text = self._prompt_texts[prompt] + text
            scored = [*(self._scored_prompt(prompt) if self._request.logprobs is not None else ()), *logprobs]
        choice: Json = {"index": index, "text": text, "logprobs": None}
        if self._request.logprobs is not None:
            choice["logprobs"], self._offsets[index] = self._legacy_logprobs(prompt, scored, offset)
        if self._request.return_token_ids:
            choice["token_ids"] = list(token_ids)
            choice["prompt_token_ids"] = list(self._generation.prompts[prompt]) if first else None
        return choice

    def _scored_prompt(self, prompt: int) -> Sequence[TokenLogprob | None]:
        return self._generation.prompt_logprobs(prompt) or ()

    def _legacy_logprobs(self, prompt: int, positions: Sequence[TokenLogprob | None], offset: int) -> tuple[Json, int]:
        """Completions' form, and the offset of the next token. None stands for the prompt's first token."""
        tokens, values, tops, offsets = [], [], [], []
        for position in positions:
            token = self._generation.prompts[prompt][0] if position is None else position.token_id
            text = self._tokenizer.token_text(token)
            tokens.append(text)
            offsets.append(offset)
            values.append(None if position is None else _finite(position.logprob))
            tops.append(None if position is None else self._top(position))
            offset += len(text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset

    def _top(self, position: TokenLogprob) -> dict[str, float]:
        top = {self._tokenizer.token_text(token): _finite(logprob) for token, logprob in position.top}
        top.setdefault(self._tokenizer.token_text(position.token_id), _finite(position.logprob))
        return top

    def _texts_of_prompts(self) -> list[str]:
        ids = self._generation.prompts
        return [
            prompt if isinstance(prompt, str) else self._tokenizer.decode(ids[i])
            for i, prompt in enumerate(self._request.prompts())
        ]


class ChatResponder(_Base):
    def __init__(
        self, request: ChatRequest, generation: Generation, tokenizer: Tokenizer, shows_timeline: bool = False
    ) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(generation, tokenizer, request.model, kind, request.include_usage, shows_timeline)
        self._request = request
        self._begun: set[int] = set()

    @property
    def _varies_little(self) -> bool:
        return not self._request.logprobs

    @property
    def _returns_token_ids(self) -> bool:
        return bool(self._request.return_token_ids)

    def chunks(self, chunk: Chunk) -> Iterable[Json]:
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            yield self._first(chunk.index)
        extra = self._extras(chunk.token_ids, chunk.logprobs)
        if chunk.text or chunk.finish_reason or self._request.logprobs or self._request.return_token_ids:
            delta = {"content": chunk.text} if chunk.text or not chunk.finish_reason else {}
            ended = {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
            yield self._event({"index": chunk.index, "delta": delta} | extra | ended)

    def whole(self, results: Sequence[ChoiceResult]) -> Json:
        choices = [
            {"index": r.index, "message": {"role": "assistant", "content": r.text}}
            | self._extras(r.token_ids, r.logprobs)
            | {"finish_reason": r.finish_reason, "stop_reason": r.stop_reason}
            for r in results
        ]
        whole = self._head | {"choices": choices, "usage": self.usage()}
        if self._request.prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._prompt_logprobs(0)
        if self._request.return_token_ids:
            whole["prompt_token_ids"] = list(self._generation.prompts[0])
        return whole | self._timeline()

    def _first(self, index: int) -> Json:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        event = self._event(choice)
        if self._request.return_token_ids:
            event["prompt_token_ids"] = list(self._generation.prompts[0])
        return event

    def _extras(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Json:
        extra: Json = {"logprobs": None}
        if self._request.logprobs:
            extra["logprobs"] = {"content": [self._position(position) for position in logprobs]}
        if self._request.return_token_ids:
            extra["token_ids"] = list(token_ids)
        return extra

    def _position(self, position: TokenLogprob) -> Json:
        top = [self._entry(token, logprob) for token, logprob in position.top[: self._request.top_logprobs or 0]]
        return self._entry(position.token_id, position.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def event_bytes(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(data) + b"\n\n"


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
