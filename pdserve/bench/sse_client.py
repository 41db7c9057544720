"""Sends one streamed /v1/completions request over HTTP, and notes when it was sent and when each
piece of output arrived.

Works with any OpenAI-compatible server. Tokens are counted by the token ids in the events
(`return_token_ids`: vLLM and pdserve send them). Without these the usage at the end counts, and
without usage each event is one token. An error becomes a message in the result, never an exception:
a load test counts failures. Knows no load and no percentiles. Used by bench.load and
bench.replay.send.

aiohttp costs 9 us of CPU per event under uvloop (24 under asyncio's own loop). A bare protocol
class would cost 6 (18).
"""

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

ERROR_CHARS = 300


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_decode_event = msgspec.json.Decoder(_Event).decode


class ServerError(ValueError):
    """The server cannot be reached, or does not answer as OpenAI's would."""


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds of time.perf_counter()."""

    sent_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # Times of events that held tokens.
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None  # Why it failed, or None.
    ended_at: float = 0.0
    status: int = 0  # HTTP status; 0 without an answer.
    # From the usage at the end; None if it does not say them.
    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def ttft(self) -> float:
        """Seconds that passed until the first token."""
        return self.arrivals[0] - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there is only one."""
        return (
            (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)
            if self.num_tokens > 1
            else None
        )

    @property
    def itls(self) -> list[float]:
        """Seconds that passed between consecutive arrivals."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class CompletionClient:
    """Connections to one server, kept open between requests. Use it as an async context manager.

    `url` may end with /v1. `timeout_s` is for a whole request, including its connection. The
    environment variable OPENAI_API_KEY is sent as the API key, if it is set.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ValueError(f"--url must start with http:// or https://, not {url!r}")
        self._base = base
        self._timeout_s = timeout_s

    async def __aenter__(self) -> "CompletionClient":
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=300)
        key = os.environ.get("OPENAI_API_KEY")
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"authorization": f"Bearer {key}"} if key else None,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def only_model(self) -> str:
        """Returns the server's only model. Raises ServerError if it has several, or does not
        answer."""
        url = f"{self._base}/v1/models"
        try:
            async with asyncio.timeout(self._timeout_s), self._session.get(url) as answer:
                body = await answer.read()
                if answer.status != 200:
                    raise ServerError(f"{url} answered {_refusal(answer.status, body)}")
            names = [model.id for model in msgspec.json.decode(body, type=_Models).data]
        except TimeoutError as error:
            raise ServerError(f"{url} did not answer within {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise ServerError(f"no server at {self._base}: {error}") from error
        except msgspec.MsgspecError as error:
            raise ServerError(f"{url} did not answer with a list of models: {error}") from error
        if len(names) != 1:
            raise ServerError(
                f"the server has {len(names)} models ({', '.join(names)}): choose one by --model"
            )
        return names[0]

    async def complete(self, body: bytes) -> Outcome:
        """Sends one request (JSON of a streaming completion with one choice), and follows it to its
        end."""
        outcome = Outcome(sent_at=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, outcome)
        except TimeoutError:
            outcome.error = f"not finished within {self._timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            outcome.error = f"connection failed: {type(error).__name__}: {error}"[:ERROR_CHARS]
        outcome.ended_at = time.perf_counter()
        if outcome.error is None:
            outcome.error = _flaw(outcome)
        return outcome

    async def _stream(self, body: bytes, outcome: Outcome) -> None:
        headers = {"content-type": "application/json"}
        async with self._session.post(
            f"{self._base}/v1/completions", data=body, headers=headers
        ) as answer:
            outcome.status = answer.status
            if answer.status != 200:
                outcome.error = _refusal(answer.status, await answer.read())
                return
            parser = StreamParser(outcome)
            async for piece in answer.content.iter_any():
                parser.feed(piece, time.perf_counter())


class StreamParser:
    """Parses server-sent events into an Outcome. Pieces may end anywhere, and lines end in LF or
    CRLF."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._rest = b""
        self._has_ids = False

    def feed(self, piece: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and self._outcome.error is None:
                self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        outcome = self._outcome
        if data == b"[DONE]":
            return
        try:
            event = _decode_event(data)
        except msgspec.MsgspecError as error:
            outcome.error = f"an event is no completion chunk ({error}): {_text(data)}"
            return
        if event.error is not None:
            outcome.error = f"error in the stream: {_text(data)}"
            return
        for choice in event.choices:
            self._count(choice, now)
            outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        if event.usage is not None:
            self._take_usage(event.usage)

    def _take_usage(self, usage: _Usage) -> None:
        if usage.completion_tokens and not self._has_ids:
            self._outcome.num_tokens = usage.completion_tokens
        self._outcome.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self._outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _count(self, choice: _Choice, now: float) -> None:
        """Counts tokens. An event that only says why the choice ended holds none."""
        outcome = self._outcome
        if choice.token_ids is not None:
            self._has_ids = True
            outcome.num_tokens += len(choice.token_ids)
            if choice.token_ids:
                outcome.arrivals.append(now)
        elif choice.text or choice.finish_reason is None:
            outcome.num_tokens += 1
            outcome.arrivals.append(now)


def _flaw(outcome: Outcome) -> str | None:
    """Says what is wrong with a stream that ended by itself, or returns None."""
    if outcome.finish_reason is None:
        return f"the stream ended after {outcome.num_tokens} tokens without a finish_reason"
    if not outcome.arrivals:
        return "the stream held no tokens"
    return None


def _refusal(status: int, body: bytes) -> str:
    return f"{status}: {_text(body)}"


def _text(data: bytes) -> str:
    return data[:ERROR_CHARS].decode("utf-8", "replace")
