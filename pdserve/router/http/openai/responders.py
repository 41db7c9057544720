"""OpenAI's responses: chunks and whole choices of a Generation in, server-sent events and JSON-ready dicts out.

One object per HTTP request, since log-probabilities and echoed prompts need to know what was already sent. vLLM's
extensions (stop_reason, token_ids, prompt_logprobs) are included. Knows no HTTP. Called by `router.http.app`.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TypeVar

import msgspec

from pdserve.background.pace import Pace
from pdserve.protocol.events import TokenLogprob
from pdserve.router.http.openai.requests import ChatRequest, CompletionRequest
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.generation import ChoiceResult, Generation
from pdserve.text.tokenizer import Tokenizer

Json = dict[str, Any]
S = TypeVar("S", bound=Sequence[Any])

json_bytes = msgspec.json.Encoder().encode

# stand for a chunk's text and token ids while a frame is made; in JSON, nothing behind the text looks like them
_MARK = "\0"
_MARK_ID = -1

_NULL = msgspec.Raw(b"null")

INLINE_IDS = 4096  # made into text within a millisecond or two
SCORE_BYTES = 150  # of a token in _Scores, beside its alternatives
PACED_POSITIONS = 64  # log-probabilities of tokens, each with its alternatives, between two looks at the clock

# JSON has no -inf; vLLM writes the same number
LOWEST_LOGPROB = -9999.0


class Responder(Protocol):
    """How one endpoint writes its answers."""

    def stream(self, chunk: OutputChunk) -> bytes:
        """The server-sent events that one chunk makes; empty when it shows nothing yet."""
        ...

    async def prepare(self, chunk: OutputChunk) -> None:
        """Make what is long of the chunk's events, for `stream` to use. Needed only where `prepares`."""
        ...

    @property
    def prepares(self) -> bool: ...

    async def ending(self) -> bytes:
        """The event after the last chunk; empty when nobody asked for usage or timeline."""
        ...

    async def whole(self, results: Sequence[ChoiceResult]) -> "JsonPieces":
        """The JSON of the whole answer."""
        ...


SHARED_BYTES = 4096  # a longer piece may be the same object as others; shorter ones are joined
JOINED_JSON_BYTES = 1 << 17


class JsonPieces:
    """Long JSON, of which parts may repeat: what repeats is held once. Filled, then taken."""

    def __init__(self) -> None:
        self.num_held = 0  # bytes
        self._pieces: deque[bytes] = deque()
        self._uses: Counter[int] = Counter()  # by id, of those that may repeat
        self._tail = bytearray()

    def add(self, pieces: Iterable[bytes]) -> int:
        """How many more bytes it holds for them."""
        before = self.num_held
        for piece in pieces:
            if len(piece) < SHARED_BYTES:
                self._tail += piece
                self.num_held += len(piece)
                if len(self._tail) >= JOINED_JSON_BYTES:
                    self._join()
            else:
                self._join()
                self._pieces.append(piece)
                self._uses[id(piece)] += 1
                self.num_held += len(piece) if self._uses[id(piece)] == 1 else 0
        return self.num_held - before

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._pieces)) + len(self._tail)

    def take(self) -> Iterator[tuple[bytes, int]]:
        """Each piece, with the bytes that are held no more when the next is asked for."""
        self._join()
        while self._pieces:
            piece = self._pieces.popleft()
            self._uses[id(piece)] -= 1
            yield piece, 0 if self._uses[id(piece)] > 0 else len(piece)

    def _join(self) -> None:
        if self._tail:
            self._pieces.append(bytes(self._tail))
            self._tail.clear()


class _Base(ABC):
    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        model: str,
        kind: str,
        include_usage: bool,
        shows_timeline: bool,
        shows_prompts: bool,
    ) -> None:
        if not shows_prompts:
            generation.forget_prompts()
        self._generation = generation
        self._tokenizer = tokenizer
        self._include_usage = include_usage
        self._shows_timeline = shows_timeline
        self._frames: dict[int, tuple[bytes, bytes | None, bytes]] = {}
        self._ids_of_prompts: dict[int, msgspec.Raw] = {}
        self._scores_of_prompts: dict[int, list[bytes]] = {}
        self._head = {"id": generation.request_id, "object": kind, "created": int(time.time()), "model": model}

    @abstractmethod
    def chunks(self, chunk: OutputChunk) -> Iterable[Json]:
        """The stream events that one chunk makes; none when it shows nothing yet."""

    @property
    @abstractmethod
    def _varies_little(self) -> bool:
        """Whether the events of a choice, but for its first and last, differ in text and token ids alone."""

    @property
    @abstractmethod
    def _returns_token_ids(self) -> bool: ...

    def stream(self, chunk: OutputChunk) -> bytes:
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

    def _frame(self, chunk: OutputChunk) -> tuple[bytes, bytes | None, bytes]:
        """What surrounds the text, and the token ids where they are shown: the same bytes as without frames."""
        *_, event = self.chunks(OutputChunk(chunk.index, chunk.prompt, _MARK, (_MARK_ID,), (), None, None))
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

    @property
    def prepares(self) -> bool:
        return False

    async def prepare(self, chunk: OutputChunk) -> None:
        return None

    async def ending(self) -> bytes:
        usage: Json = {"usage": self.usage()} if self._include_usage else {}
        with self._generation.pacer.pace() as pace:
            extra = usage | await self._timeline(pace)
        return event_bytes(self._head | {"choices": []} | extra) if extra else b""

    async def whole(self, results: Sequence[ChoiceResult]) -> JsonPieces:
        pieces, hold = JsonPieces(), self._generation.hold
        hold(pieces.add([json_bytes(self._head)[:-1], b',"choices":[']))
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
        """One choice of a whole answer, in pieces of JSON."""

    async def _behind_choices(self, pace: Pace) -> list[bytes]:
        """The members after the choices, and the end."""
        return [json_bytes({"usage": self.usage()} | await self._timeline(pace))[1:]]

    async def _timeline(self, pace: Pace) -> Json:
        if not self._shows_timeline:
            return {}
        return {"timeline": msgspec.Raw(await _encoded(self._generation.timelines(), pace))}

    def _prompt_ids(self, prompt: int) -> msgspec.Raw:
        """Its token ids as JSON, which is made once for all of its choices."""
        if prompt not in self._ids_of_prompts:
            data = json_bytes(self._generation.prompts[prompt])
            self._ids_of_prompts[prompt] = msgspec.Raw(data)
            self._generation.hold(len(data))
        return self._ids_of_prompts[prompt]

    def _event(self, choice: Json) -> Json:
        event = self._head | {"choices": [choice]}
        return event | {"usage": None} if self._include_usage else event

    async def _prompt_logprobs(self, prompt: int, pace: Pace) -> list[bytes]:
        """vLLM's form as JSON: per prompt token a dict of token id -> logprob, rank and text. The same
        pieces for all of a prompt's choices."""
        if prompt not in self._scores_of_prompts:
            scored = self._generation.prompt_logprobs(prompt)
            if scored is None:
                return [b"null"]
            ranked = (None if position is None else self._ranked(position) for position in scored)
            self._scores_of_prompts[prompt] = [await _encoded(ranked, pace)]
            self._generation.forget_prompt_logprobs(prompt)
        return self._scores_of_prompts[prompt]

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
        shows_prompts = bool(request.echo or request.return_token_ids)
        super().__init__(generation, tokenizer, request.model, kind, include_usage, shows_timeline, shows_prompts)
        self._request = request
        given = request.prompts() if request.echo else []
        self._texts = [prompt for prompt in given if isinstance(prompt, str)]
        # by prompt: its text as JSON without the last quote, its tokens' log-probabilities
        self._echoes: dict[int, tuple[bytes, _Scores]] = {}
        self._ends: dict[int, int] = {}  # by choice that has begun: characters of its tokens up to now

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

    def chunks(self, chunk: OutputChunk) -> Iterable[Json]:
        first = chunk.index not in self._ends
        text: str | msgspec.Raw = self._shown(chunk.text)
        scores = _Scores(end=self._ends.get(chunk.index, 0))
        if first and chunk.prompt in self._echoes:
            echo, echoed = self._echoes[chunk.prompt]
            text, scores = msgspec.Raw(echo + json_bytes(text)[1:]), echoed.copy()
        if self._request.logprobs is not None:
            self._add(scores, chunk.prompt, self._shown(chunk.logprobs))
        self._ends[chunk.index] = scores.end
        choice = self._choice(chunk.index, text, self._shown(chunk.token_ids), scores, first)
        shows = choice["text"] or chunk.finish_reason or self._request.return_token_ids
        if shows or self._request.logprobs is not None:
            yield self._event(choice | {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason})

    @property
    def prepares(self) -> bool:
        return bool(self._request.echo)

    async def prepare(self, chunk: OutputChunk) -> None:
        """What an echo repeats for each choice is made once for a prompt."""
        if chunk.prompt in self._echoes:
            return
        await self._generation.pacer.turn()  # a call may have thousands of prompts
        text = self._texts[chunk.prompt] if self._texts else None
        if text is None:
            ids = self._generation.prompts[chunk.prompt]
            text = await asyncio.to_thread(self._tokenizer.decode, ids) if len(ids) > INLINE_IDS else None
            text = self._tokenizer.decode(ids) if text is None else text
        scores = _Scores()
        if self._request.logprobs is not None:
            with self._generation.pacer.pace() as pace:
                scored = self._generation.prompt_logprobs(chunk.prompt) or ()
                await self._add_paced(scores, chunk.prompt, scored, pace)
            if self._request.prompt_logprobs is None:  # else they are shown in that form too
                self._generation.forget_prompt_logprobs(chunk.prompt)
        echo = json_bytes(text)[:-1]
        self._echoes[chunk.prompt] = echo, scores
        self._generation.hold(len(echo) + scores.num_bytes)

    async def whole(self, results: Sequence[ChoiceResult]) -> JsonPieces:
        if self._request.echo:
            for result in results:
                await self.prepare(_chunk_of(result, self._generation.n))
        return await super().whole(results)

    async def _whole_choice(self, result: ChoiceResult, pace: Pace) -> list[bytes]:
        prompt = result.index // self._generation.n
        echo, scores = self._echoes.get(prompt, (b'"', _Scores()))
        if self._request.logprobs is not None:
            scores = scores.copy()
            await self._add_paced(scores, prompt, self._shown(result.logprobs), pace)
        choice = self._choice(result.index, self._shown(result.text), self._shown(result.token_ids), scores, True)
        choice |= {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}
        begins = json_bytes({"index": choice.pop("index")})[:-1] + b',"text":'
        ends = json_bytes(choice.pop("text"))[1:] + b"," + json_bytes(choice)[1:-1]
        scored: list[bytes] = [b"null"]
        if self._request.prompt_logprobs is not None:
            scored = await self._prompt_logprobs(prompt, pace)
        return [begins, echo, ends + b',"prompt_logprobs":', *scored, b"}"]

    def _shown(self, generated: S) -> S:
        """Nothing where the prompt alone was to be scored."""
        return generated[:0] if self._request.scores_prompt_only else generated  # type: ignore[return-value]

    def _choice(
        self, index: int, text: str | msgspec.Raw, token_ids: Sequence[int], scores: "_Scores", first: bool
    ) -> Json:
        """first: nothing of this choice was sent before."""
        choice: Json = {"index": index, "text": text, "logprobs": None}
        if self._request.logprobs is not None:
            choice["logprobs"] = scores.shown()
        if self._request.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = self._prompt_ids(index // self._generation.n) if first else None
        return choice

    async def _add_paced(
        self, scores: "_Scores", prompt: int, positions: Iterable[TokenLogprob | None], pace: Pace
    ) -> None:
        left = iter(positions)
        while part := list(islice(left, PACED_POSITIONS)):
            self._add(scores, prompt, part)
            if pace.is_due:
                await pace.rest()

    def _add(self, scores: "_Scores", prompt: int, positions: Iterable[TokenLogprob | None]) -> None:
        """Completions' form. None stands for the prompt's first token."""
        for position in positions:
            token = self._generation.prompts[prompt][0] if position is None else position.token_id
            text = self._tokenizer.token_text(token)
            scores.tokens.append(text)
            scores.offsets.append(scores.end)
            scores.values.append(None if position is None else _finite(position.logprob))
            scores.tops.append(_NULL if position is None else msgspec.Raw(json_bytes(self._top(position))))
            scores.end += len(text)

    def _top(self, position: TokenLogprob) -> dict[str, float]:
        top = {self._tokenizer.token_text(token): _finite(logprob) for token, logprob in position.top}
        top.setdefault(self._tokenizer.token_text(position.token_id), _finite(position.logprob))
        return top


class ChatResponder(_Base):
    def __init__(
        self, request: ChatRequest, generation: Generation, tokenizer: Tokenizer, shows_timeline: bool = False
    ) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        usage, shows_prompts = request.include_usage, bool(request.return_token_ids)
        super().__init__(generation, tokenizer, request.model, kind, usage, shows_timeline, shows_prompts)
        self._request = request
        self._begun: set[int] = set()

    @property
    def _varies_little(self) -> bool:
        return not self._request.logprobs

    @property
    def _returns_token_ids(self) -> bool:
        return bool(self._request.return_token_ids)

    def chunks(self, chunk: OutputChunk) -> Iterable[Json]:
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            yield self._first(chunk.index)
        extra = self._extras(chunk.token_ids, chunk.logprobs)
        if chunk.text or chunk.finish_reason or self._request.logprobs or self._request.return_token_ids:
            delta = {"content": chunk.text} if chunk.text or not chunk.finish_reason else {}
            ended = {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
            yield self._event({"index": chunk.index, "delta": delta} | extra | ended)

    async def _whole_choice(self, result: ChoiceResult, pace: Pace) -> list[bytes]:
        extras: Json = {"logprobs": None}
        if self._request.logprobs:
            positions = map(self._position, result.logprobs)
            extras["logprobs"] = {"content": msgspec.Raw(await _encoded(positions, pace))}
        choice = {"index": result.index, "message": {"role": "assistant", "content": result.text}}
        choice |= extras | ({"token_ids": result.token_ids} if self._request.return_token_ids else {})
        ended = {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}
        return [json_bytes(choice | ended)]

    async def _behind_choices(self, pace: Pace) -> list[bytes]:
        pieces = [json_bytes({"usage": self.usage()})[1:-1]]
        if self._request.prompt_logprobs is not None:
            pieces += [b',"prompt_logprobs":', *await self._prompt_logprobs(0, pace)]
        extra = {"prompt_token_ids": self._prompt_ids(0)} if self._request.return_token_ids else {}
        ending = json_bytes(extra | await self._timeline(pace))
        return [*pieces, b"," if len(ending) > 2 else b"", ending[1:]]

    def _first(self, index: int) -> Json:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        event = self._event(choice)
        if self._request.return_token_ids:
            event["prompt_token_ids"] = self._prompt_ids(0)
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


@dataclass(slots=True)
class _Scores:
    """Completions' log-probabilities of some tokens in a row, of one choice. end: characters up to there."""

    tokens: list[str] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    tops: list[msgspec.Raw] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    end: int = 0

    @property
    def num_bytes(self) -> int:
        """Estimated memory."""
        return SCORE_BYTES * len(self.tokens) + sum(map(len, self.tops))

    def copy(self) -> "_Scores":
        return _Scores(self.tokens[:], self.values[:], self.tops[:], self.offsets[:], self.end)

    def shown(self) -> Json:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.values,
            "top_logprobs": self.tops,
            "text_offset": self.offsets,
        }


def _chunk_of(result: ChoiceResult, n: int) -> OutputChunk:
    return OutputChunk(result.index, result.index // n, "", (), (), None, None)


async def _encoded(items: Iterable[Any], pace: Pace) -> bytes:
    """A JSON array of them."""
    encoded = bytearray(b"[")
    for item in items:
        encoded += json_bytes(item)
        encoded += b","
        if pace.is_due:
            await pace.rest()
    if len(encoded) > 1:
        del encoded[-1:]
    return bytes(encoded + b"]")


def event_bytes(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(data) + b"\n\n"


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
