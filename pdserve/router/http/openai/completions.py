"""Writes answers of /v1/completions: text, echoed prompts and log-probabilities.

What an echo repeats for each choice of a prompt is made once. Knows no HTTP. Made by
`router.http.openai.dialects`, one CompletionResponder per call.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import msgspec

from pdserve.background.pace import Pace
from pdserve.protocol.events import TokenLogprob
from pdserve.router.http.json_pieces import Json, JsonPieces, finite, json_bytes
from pdserve.router.http.openai.requests import CompletionRequest
from pdserve.router.http.openai.responder import BaseResponder
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.generation import ChoiceResult, Generation
from pdserve.text.tokenizer import Tokenizer

S = TypeVar("S", bound=Sequence[Any])

_NULL = msgspec.Raw(b"null")

INLINE_IDS = 4096  # this number of ids is made into text within a millisecond or two
SCORE_BYTES = 150  # memory of a token in _Scores, without its alternatives
# tokens whose log-probabilities are encoded between two looks at the clock
PACED_POSITIONS = 64


class CompletionResponder(BaseResponder):
    def __init__(
        self,
        request: CompletionRequest,
        generation: Generation,
        tokenizer: Tokenizer,
        shows_timeline: bool = False,
    ) -> None:
        kind = "text_completion"
        shows_prompts = bool(request.echo or request.return_token_ids)
        super().__init__(request, generation, tokenizer, kind, shows_timeline, shows_prompts)
        self._request = request
        # a prompt that may have been cut is shown by the text of its tokens
        is_whole = bool(request.echo) and request.truncate_prompt_tokens is None
        given = request.prompts() if is_whole else []
        self._texts = [prompt for prompt in given if isinstance(prompt, str)]
        # by prompt: its text as JSON without the last quote, and its tokens' log-probabilities
        self._echoes: dict[int, tuple[bytes, _Scores]] = {}
        # by choice that has begun: number of characters of its tokens so far
        self._ends: dict[int, int] = {}

    @property
    def _varies_little(self) -> bool:
        return self._request.logprobs is None and not self._request.scores_prompt_only

    @property
    def _returns_token_ids(self) -> bool:
        return bool(self._request.return_token_ids)

    def usage(self) -> Json:
        usage = super().usage()
        if self._request.scores_prompt_only:
            usage["completion_tokens"] = 0
            usage["total_tokens"] = usage["prompt_tokens"]
        return usage

    def chunks(self, chunk: OutputChunk) -> Iterable[Json]:
        if not self._request.scores_prompt_only:
            self._count(chunk)
        first = chunk.index not in self._ends
        text: str | msgspec.Raw = self._shown(chunk.text)
        scores = _Scores(end=self._ends.get(chunk.index, 0))
        if first and chunk.prompt in self._echoes:
            echo, echoed = self._echoes[chunk.prompt]
            text = msgspec.Raw(echo + json_bytes(text)[1:])
            scores = echoed.copy()
        if self._request.logprobs is not None:
            self._add(scores, chunk.prompt, self._shown(chunk.logprobs))
        self._ends[chunk.index] = scores.end
        choice = self._choice(chunk.index, text, self._shown(chunk.token_ids), scores, first)
        shows = choice["text"] or chunk.finish_reason or self._request.return_token_ids
        if shows or self._request.logprobs is not None:
            yield self._event(
                choice | {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
            )

    @property
    def prepares(self) -> bool:
        return bool(self._request.echo)

    async def prepare(self, chunk: OutputChunk) -> None:
        """Makes what an echo repeats for each choice, once per prompt."""
        if chunk.prompt in self._echoes:
            return
        await self._generation.pacer.turn()  # a call may have thousands of prompts
        text = self._texts[chunk.prompt] if self._texts else None
        if text is None:
            ids = self._generation.prompts[chunk.prompt]
            text = (
                await asyncio.to_thread(self._tokenizer.decode, ids)
                if len(ids) > INLINE_IDS
                else None
            )
            text = self._tokenizer.decode(ids) if text is None else text
        scores = _Scores()
        if self._request.logprobs is not None:
            with self._generation.pacer.pace() as pace:
                scored = self._generation.prompt_logprobs(chunk.prompt) or ()
                await self._add_paced(scores, chunk.prompt, scored, pace)
            if self._request.prompt_logprobs is None:  # otherwise that form needs them too
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
        choice = self._choice(
            result.index, self._shown(result.text), self._shown(result.token_ids), scores, True
        )
        choice |= {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}
        for name in ("token_ids", "prompt_token_ids"):
            choice.setdefault(name, None)
        begins = json_bytes({"index": choice.pop("index")})[:-1] + b',"text":'
        ends = json_bytes(choice.pop("text"))[1:] + b"," + json_bytes(choice)[1:-1]
        scored: list[bytes] = [b"null"]
        if self._request.prompt_logprobs is not None:
            scored = await self._prompt_logprobs(prompt, pace)
        return [begins, echo, ends + b',"prompt_logprobs":', *scored, b"}"]

    def _shown(self, generated: S) -> S:
        """Returns what was generated, or nothing if only the prompt should be scored."""
        return generated[:0] if self._request.scores_prompt_only else generated  # type: ignore[return-value]

    def _choice(
        self,
        index: int,
        text: str | msgspec.Raw,
        token_ids: Sequence[int],
        scores: "_Scores",
        first: bool,
    ) -> Json:
        """Makes a choice's members. `first` is True if nothing of the choice was sent before."""
        choice: Json = {"index": index, "text": text, "logprobs": None}
        if self._request.logprobs is not None:
            choice["logprobs"] = scores.shown()
        if self._request.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = (
                self._prompt_ids(index // self._generation.n) if first else None
            )
        return choice

    async def _add_paced(
        self, scores: "_Scores", prompt: int, positions: Iterable[TokenLogprob | None], pace: Pace
    ) -> None:
        left = iter(positions)
        while part := list(islice(left, PACED_POSITIONS)):
            self._add(scores, prompt, part)
            if pace.is_due:
                await pace.rest()

    def _add(
        self, scores: "_Scores", prompt: int, positions: Iterable[TokenLogprob | None]
    ) -> None:
        """Adds positions in completions' form; None stands for the prompt's first token."""
        for position in positions:
            token = self._generation.prompts[prompt][0] if position is None else position.token_id
            text = self._tokenizer.token_text(token)
            scores.tokens.append(self._token_name(token))
            scores.offsets.append(scores.end)
            scores.values.append(None if position is None else finite(position.logprob))
            scores.tops.append(
                _NULL if position is None else msgspec.Raw(json_bytes(self._top(position)))
            )
            scores.end += len(text)

    def _top(self, position: TokenLogprob) -> dict[str, float]:
        top = {self._token_name(token): finite(logprob) for token, logprob in position.top}
        top.setdefault(self._token_name(position.token_id), finite(position.logprob))
        return top


@dataclass(slots=True)
class _Scores:
    """Log-probabilities of consecutive tokens of one choice, in completions' form.

    `end` is the number of characters up to there.
    """

    tokens: list[str] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    tops: list[msgspec.Raw] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    end: int = 0

    @property
    def num_bytes(self) -> int:
        """Estimates the memory of the lists."""
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
