"""Talks to one OpenAI-compatible server: messages in, pieces of an answer out as they come.

Every failure is a ServerError whose text is a sentence for the user. Closing an answer's iterator
closes its connection; the server notices that and stops. Knows no terminal. Made by `chat.cli`.
"""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import httpx
from httpx_sse import EventSource, SSEError

from pdserve.text.answers.pieces import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Piece,
    Reasoning,
)

Json = dict[str, Any]

CONNECT_S = 10.0
_SHOWN = 500  # characters to show of an error's body that is not in OpenAI's form


class ServerError(Exception):
    """The server gave no answer, or not all of it. The text is a sentence."""


class Server:
    def __init__(
        self,
        url: str,
        model: str | None,
        api_key: str | None,
        body: Mapping[str, Any],
        wait_s: float,
    ) -> None:
        """Takes a `url` without /v1, and further fields of each request in `body`.

        If `model` is None, the first model that the server names is taken. An answer is given up
        after wait_s seconds without a byte. Raises ServerError if the server does not say which
        models it has.
        """
        self.url = url
        self._body = dict(body)
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        timeout = httpx.Timeout(wait_s, connect=CONNECT_S)
        try:
            self._http = httpx.Client(
                base_url=url, headers=headers, timeout=timeout, trust_env=False
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ValueError(f"--url or the API key cannot be used: {error}") from error
        try:
            self.model = model or self._first_model()
        except BaseException:
            self._http.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def answer(
        self, messages: Sequence[Json], streams: bool = True
    ) -> Generator[Piece | str, None, None]:
        """Yields the pieces of the next message, and at last its finish_reason. Raises
        ServerError."""
        body = {**self._body, "model": self.model, "messages": list(messages), "stream": streams}
        with self._says_why(), self._http.stream("POST", "/v1/chat/completions", json=body) as got:
            _check(got)
            yield from _streamed(got) if streams else _whole(got)

    def _first_model(self) -> str:
        with self._says_why():
            got = self._http.get("/v1/models")
            _check(got)
            names = [model["id"] for model in got.json()["data"]]
        if not names:
            raise ServerError(f"{self.url} serves no model: name one by --model, or try later.")
        return str(names[0])

    @contextmanager
    def _says_why(self) -> Iterator[None]:
        """Turns errors of httpx and of strange answers into a ServerError with a sentence."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerError(
                f"Nothing answers at {self.url} ({error}): start a server with `pdserve up`, or "
                "name another by --url."
            ) from error
        except httpx.TimeoutException as error:
            raise ServerError(
                f"{self.url} has sent nothing for {self._http.timeout.read:g} s: try again, or "
                "allow more time by --timeout."
            ) from error
        except (SSEError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise ServerError(
                f"{self.url} does not answer as an OpenAI-compatible server does ({error!r:.200}): "
                "check --url."
            ) from error
        except httpx.HTTPError as error:
            raise ServerError(
                f"The connection to {self.url} broke ({error}): is the server still running?"
            ) from error


def _check(got: httpx.Response) -> None:
    """Raises ServerError for a status that is no success."""
    if got.is_success:
        return
    got.read()
    message = _message(got)
    if got.status_code == 401:
        raise ServerError(f"The server needs an API key, see --api-key-env: {message}")
    if got.status_code == 429:
        after = got.headers.get("retry-after")
        when = "" if after is None else f" Try again in {after} s."
        raise ServerError(f"The server has too much to do: {message}{when}")
    if got.is_server_error:
        raise ServerError(f"The server failed with status {got.status_code}: {message}")
    raise ServerError(f"The server refused this with status {got.status_code}: {message}")


def _message(got: httpx.Response) -> str:
    try:
        return str(got.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return " ".join(got.text.split())[:_SHOWN] or got.reason_phrase


def _streamed(got: httpx.Response) -> Iterator[Piece | str]:
    calls = _Calls()
    reason: str | None = None
    for event in EventSource(got).iter_sse():
        if event.data == "[DONE]":
            break
        data = json.loads(event.data)
        if "error" in data:
            raise ServerError(f"The server ended the answer early: {data['error']['message']}")
        for choice in data["choices"]:
            yield from _texts(choice["delta"])
            for part in choice["delta"].get("tool_calls") or ():
                yield from calls.more(part)
            reason = choice.get("finish_reason") or reason
    if reason is None:
        raise ServerError("The answer broke off early: is the server still running?")
    yield from calls.end(reason)
    yield reason


def _whole(got: httpx.Response) -> Iterator[Piece | str]:
    got.read()
    choice = got.json()["choices"][0]
    calls = _Calls()
    yield from _texts(choice["message"])
    for index, call in enumerate(choice["message"].get("tool_calls") or ()):
        yield from calls.more({**call, "index": index})
    yield from calls.end(choice["finish_reason"])
    yield str(choice["finish_reason"])


def _texts(message: Json) -> Iterator[Piece]:
    """Yields the texts of a delta or a whole message. Reasoning has one of two names, or both."""
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        yield Reasoning(reasoning)
    if content := message.get("content"):
        yield Content(content)


class _Calls:
    """The calls of an answer, which come in parts.

    A call ends when the next one begins. The last one ends with the answer, unless that was cut
    off.
    """

    def __init__(self) -> None:
        self._num_begun = 0

    def more(self, part: Json) -> Iterator[Piece]:
        index = part["index"]
        if index == self._num_begun:
            if index:
                yield CallEnd(index - 1)
            self._num_begun += 1
            yield CallBegin(index, part["function"]["name"], part.get("id") or "")
        if arguments := (part.get("function") or {}).get("arguments"):
            yield CallArguments(index, arguments)

    def end(self, reason: str) -> Iterator[Piece]:
        if self._num_begun and reason != "length":
            yield CallEnd(self._num_begun - 1)
