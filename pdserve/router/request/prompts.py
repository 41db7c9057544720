"""Makes prompts into token ids: renders conversations, tokenises texts, and checks all lengths.

Cheap work happens at once. The rest happens in threads, in order of arrival and little at a time,
because tokenising takes 200 to 400 bytes of memory per character. A text that cannot fit is refused
before all of it is tokenised. Knows no workers and no HTTP. Called by `router.request.service`.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

from pdserve.background.pace import Pacer
from pdserve.router.errors import CONTEXT_LIMIT, TOO_LONG, ApiError, prompt_length_error
from pdserve.text.long_texts import (
    CUT_TOKENS,
    LEAST_PROBE,
    PROBE_CHARS,
    first_token_ids,
    last_token_ids,
)
from pdserve.text.tokenizer import Tokenizer
from pdserve.turns.model_turns import ModelTurns
from pdserve.turns.turn import Turn

P = ParamSpec("P")
T = TypeVar("T")

# Tokenising this many characters takes about 2 ms, which the event loop can spare.
INLINE_CHARS = 4096
TEXT_CHARS = 128  # the fixed cost of one text, in characters
# Short texts are tokenised in batches of at most BATCH_CHARS characters, SHORT_THREADS batches at
# once. A longer text is tokenised alone, and one at a time.
BATCH_CHARS = 32_768
SHORT_THREADS = 4

# The prefix of a text that is tokenised first to know whether the text is too long.
LONGEST_PROBE = 65_536

# Limit for a text that is no prompt but is tokenised anyway: 1.7 GB for some seconds at most.
MAX_ENCODED_CHARS = 1 << 22

# A call with at most this number of token ids keeps the integers that came. That takes 32 bytes
# more for each, but the first token comes sooner.
FEW_IDS = 1024

NO_LIMIT = 1 << 40  # more tokens than any body holds

# A template takes 2 to 50 us per message.
MAX_MESSAGES = 4096
INLINE_MESSAGES = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the workers that are here."""

    max_tokens: int  # Prompt and answer together.
    vocab_size: int
    least_answer: int = 1  # Answer tokens that must fit after a prompt.


@dataclass(frozen=True, slots=True)
class SharedIds:
    """A prompt whose ids are shared already (`Lengths.shared_ids`), and checked against this size
    of the vocabulary."""

    ids: tuple[int, ...]
    vocab_size: int

    def __len__(self) -> int:
        return len(self.ids)


Prompt = str | Sequence[int] | SharedIds


@dataclass(frozen=True, slots=True)
class Lengths:
    """Limits of a prompt's length."""

    limits: Limits
    max_prompt_tokens: int | None  # From RouterConfig.
    longest_token: int  # Characters that one token may stand for.

    @property
    def unbounded(self) -> "Lengths":
        """The same for prompts that will be cut, which may have any length."""
        limits = Limits(NO_LIMIT, self.limits.vocab_size)
        return Lengths(limits, None, self.longest_token)

    @property
    def max_tokens(self) -> int:
        fits = self.limits.max_tokens - self.limits.least_answer
        return fits if self.max_prompt_tokens is None else min(self.max_prompt_tokens, fits)

    @property
    def max_chars(self) -> int:
        """A text with more characters has more tokens than a prompt may have."""
        return self.max_tokens * self.longest_token

    def check_chars(self, num_chars: int, named: str) -> None:
        """Raises ApiError (400) if no text with this number of characters is short enough. `named`
        is the parameter that it comes from."""
        self.check(math.ceil(num_chars / self.longest_token), named, "at least ")

    def check(self, num_tokens: int, named: str, about: str = "") -> None:
        """Raises ApiError (400) if a prompt of `num_tokens` is too long. `about` precedes the
        number in the message."""
        limits = self.limits
        if num_tokens + limits.least_answer > limits.max_tokens:
            raise prompt_length_error(
                limits.max_tokens, num_tokens, named, about, limits.least_answer
            )
        most = self.max_prompt_tokens
        if most is not None and num_tokens > most:
            raise ApiError(
                f"{CONTEXT_LIMIT} {most} tokens in {named}, by router.max_prompt_tokens. However, "
                f"you requested {about}{num_tokens} tokens there: shorten {named}",
                param=named,
                code=TOO_LONG,
            )

    def shared_ids(self, ids: Sequence[int] | SharedIds, named: str) -> tuple[int, ...]:
        """Returns the ids as integers that all prompts share: 8 bytes per token instead of 40.
        Raises ApiError (400) if one is outside the vocabulary."""
        vocab_size = self.limits.vocab_size
        if isinstance(ids, SharedIds):
            if ids.vocab_size <= vocab_size:
                return ids.ids
            ids = ids.ids
        self._check_ids(ids, named)
        return tuple(map(_integers(vocab_size).__getitem__, ids))

    def own_ids(self, ids: Sequence[int], named: str) -> tuple[int, ...]:
        """Returns the ids as the integers that came, for few ids, as looking up a shared one takes
        0.1 us. Raises ApiError like `shared_ids`."""
        self._check_ids(ids, named)
        return tuple(ids)

    def _check_ids(self, ids: Sequence[int], named: str) -> None:
        end = self.limits.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= end):
            raise ApiError(
                f"{named} holds token ids outside the vocabulary 0..{end - 1}", param=named
            )


@lru_cache(maxsize=2)
def _integers(end: int) -> tuple[int, ...]:
    return tuple(range(end))


class Prompts:
    """Makes the prompts of a router. Use it from one event loop."""

    def __init__(self, tokenizer: Tokenizer, max_prompt_tokens: int | None, pacer: Pacer) -> None:
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._pacer = pacer
        self._short = ThreadPoolExecutor(SHORT_THREADS, "short-prompts")
        self._long = ThreadPoolExecutor(1, "long-prompts")

    def lengths(self, limits: Limits) -> Lengths:
        return Lengths(limits, self._max_prompt_tokens, self._tokenizer.longest_token)

    async def render(
        self, turn: Turn, turns: ModelTurns, limits: Limits, may_be_long: bool = False
    ) -> str:
        """Returns the text of a conversation by the model's chat template. `may_be_long` means that
        it is cut later. Raises ApiError (400) if the messages are wrong or too long to fit."""
        if may_be_long:
            return await self.render_any(turn, turns)
        _check_count(turn)
        num_chars = sum(map(_num_chars, turn.messages))
        self.lengths(limits).check_chars(num_chars, "messages")
        return await self.render_any(turn, turns)

    async def render_any(self, turn: Turn, turns: ModelTurns) -> str:
        """Does the same as `render` for a conversation of any length."""
        _check_count(turn)
        messages = turn.messages
        is_short = len(messages) <= INLINE_MESSAGES and not turn.tools and _is_short(messages)
        try:
            if is_short and all(map(_is_small, turn.variables.values())):
                return turns.render(turn)
            return await _run(self._long, turns.render, turn)
        except ValueError as error:
            raise ApiError(str(error), param="messages") from error

    async def encode(self, text: str, add_special_tokens: bool, named: str) -> list[int]:
        """Returns the token ids of a text, which may be empty, or longer than a prompt. `named` is
        the parameter that it comes from. Raises ApiError (400)."""
        if len(text) > MAX_ENCODED_CHARS:
            message = (
                f"{named} has {len(text)} characters, more than {MAX_ENCODED_CHARS}: send it in "
                "parts"
            )
            raise ApiError(message, param=named, code="too_long")
        encode = self._tokenizer.encode
        try:
            if _cost(text) <= INLINE_CHARS:
                return encode(text, add_special_tokens)
            threads = self._short if _cost(text) <= BATCH_CHARS else self._long
            return await _run(threads, encode, text, add_special_tokens)
        except ValueError as error:
            raise ApiError(str(error), param=named) from error

    async def cut_token_ids(
        self,
        prompts: Sequence[Prompt],
        add_special_tokens: bool,
        limits: Limits,
        named: str,
        most: int,
        keeps_first: bool = False,
    ) -> list[tuple[int, ...]]:
        """Does the same as `token_ids`, but cuts prompts to their last (or first) `most` tokens."""
        lengths = self.lengths(limits)
        kept = slice(most) if keeps_first else slice(-most, None)
        encode = first_token_ids if keeps_first else last_token_ids
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        is_short = sum(map(_cost, texts)) <= INLINE_CHARS
        cut: list[Prompt] = []
        for prompt in prompts:
            if not isinstance(prompt, str):
                cut.append(lengths.shared_ids(prompt, named)[kept])
                continue
            asked = (self._tokenizer, prompt, add_special_tokens, most)
            try:
                cut.append(encode(*asked) if is_short else await _run(self._long, encode, *asked))
            except ValueError as error:
                raise ApiError(str(error), param=named) from error
        return await self.token_ids(cut, add_special_tokens, limits, named)

    async def token_ids(
        self, prompts: Sequence[Prompt], add_special_tokens: bool, limits: Limits, named: str
    ) -> list[tuple[int, ...]]:
        """Returns the token ids of each prompt; `named` is the parameter that they come from.
        Raises ApiError (400) if one is empty, too long, or outside the vocabulary."""
        lengths = self.lengths(limits)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for prompt in prompts:
            check = lengths.check_chars if isinstance(prompt, str) else lengths.check
            check(len(prompt), named)
        try:
            encoded = iter(await self._encode_all(texts, add_special_tokens, lengths, named))
        except ValueError as error:
            raise ApiError(str(error), param=named) from error
        is_few = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str)) <= FEW_IDS
        ids = []
        with self._pacer.pace() as pace:
            for prompt in prompts:
                if pace.is_due:
                    await pace.rest()
                if isinstance(prompt, str):
                    checked = next(encoded)
                elif is_few and not isinstance(prompt, SharedIds):
                    checked = lengths.own_ids(prompt, named)
                else:
                    checked = lengths.shared_ids(prompt, named)
                if not checked:
                    raise ApiError(f"{named} is empty: it needs at least one token", param=named)
                lengths.check(len(checked), named)
                ids.append(checked)
        return ids

    async def _encode_all(
        self, texts: Sequence[str], add_special_tokens: bool, lengths: Lengths, named: str
    ) -> list[tuple[int, ...]]:
        if not texts:
            return []
        if sum(map(_cost, texts)) <= INLINE_CHARS:
            return [
                lengths.own_ids(ids, named)
                for ids in self._tokenizer.encode_batch(texts, add_special_tokens)
            ]
        encoded: list[tuple[int, ...]] = []
        for batch in _batches(texts):
            if sum(map(_cost, batch)) <= BATCH_CHARS:
                encoded += await _run(
                    self._short, self._encode, batch, add_special_tokens, lengths, named
                )
            else:
                encoded += await _run(
                    self._long, self._encode_long, batch[0], add_special_tokens, lengths, named
                )
        return encoded

    def _encode(
        self, texts: Sequence[str], add_special_tokens: bool, lengths: Lengths, named: str
    ) -> list[tuple[int, ...]]:
        return [
            lengths.shared_ids(ids, named)
            for ids in self._tokenizer.encode_batch(texts, add_special_tokens)
        ]

    def _encode_long(
        self, text: str, add_special_tokens: bool, lengths: Lengths, named: str
    ) -> list[tuple[int, ...]]:
        ids = _encode_within(self._tokenizer, text, add_special_tokens, lengths.max_tokens)
        if isinstance(ids, int):
            lengths.check(ids, named, "at least ")
            return []
        return [lengths.shared_ids(ids, named)]


def _encode_within(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, most: int
) -> list[int] | int:
    """Returns the token ids, or, for a text that has more than `most`, a lower bound above `most`.

    The tokens of a prefix tell how long the next prefix must be to decide.
    """
    end = min(max(LEAST_PROBE, PROBE_CHARS * most), LONGEST_PROBE)
    while max(most, end) < len(text):
        least = tokenizer.count(text[:end], add_special_tokens) - CUT_TOKENS
        if least > most:
            return least
        end = max(2 * end, int(1.1 * end * (most + CUT_TOKENS) / (least + CUT_TOKENS + 1)))
    return tokenizer.encode(text, add_special_tokens)


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yields the texts in order; a text that is too long for a batch is a batch of its own."""
    batch: list[str] = []
    room = BATCH_CHARS
    for text in texts:
        if batch and _cost(text) > room:
            yield batch
            batch = []
            room = BATCH_CHARS
        batch.append(text)
        room -= _cost(text)
    yield batch


def _cost(text: str) -> int:
    return len(text) + TEXT_CHARS


def _check_count(turn: Turn) -> None:
    if len(turn.messages) > MAX_MESSAGES:
        message = (
            f"messages must hold at most {MAX_MESSAGES} messages, not {len(turn.messages)}: join "
            "or leave out some"
        )
        raise ApiError(message, param="messages", code="too_many_messages")


def _num_chars(message: Any) -> int:
    """Counts the characters of a message's content; malformed content has none."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return sum(len(text) for text in texts if isinstance(text, str))


def _is_short(messages: Sequence[Any]) -> bool:
    """True if all texts and items, keys included, are few enough for a template to render at
    once."""
    left = INLINE_CHARS
    values = list(messages)
    while values and left >= 0:
        value = values.pop()
        if not isinstance(value, str | Mapping | Sequence):
            continue
        left -= len(value)
        if left < 0 or isinstance(value, str):
            continue
        values += value
        if isinstance(value, Mapping):
            values += value.values()
    return left >= 0


def _is_small(value: Any) -> bool:
    return isinstance(value, bool | int | float | None) or (
        isinstance(value, str) and len(value) <= INLINE_CHARS
    )


async def _run(
    threads: ThreadPoolExecutor, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Runs the work in one of the threads, which take work in order.

    A cancelled caller leaves the queue; work that has begun keeps its thread until it is done.
    """
    return await asyncio.wrap_future(threads.submit(work, *args, **kwargs))
