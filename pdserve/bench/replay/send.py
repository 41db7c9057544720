"""Sends a window of a trace to a server in an open loop: requests leave at their times, whatever
the server does.

Knows no rates, no files and no promises. Called by sweep.py.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop
from tqdm import tqdm

from pdserve.bench.load import ClientClock, open_loop
from pdserve.bench.record import Json
from pdserve.bench.replay.figures import RequestRecord, record_of, summary
from pdserve.bench.replay.prompts import Prompts, shareable_tokens
from pdserve.bench.replay.trace_lines import TraceRequest
from pdserve.bench.replay.window import Window
from pdserve.bench.sse_client import CompletionClient, Outcome, ServerError


@dataclass(frozen=True)
class Target:
    """The server that requests go to, and their common settings."""

    url: str
    model: str | None  # None asks the server for its only one.
    timeout_s: float  # Limit for a whole request.
    clients: int | None  # Limit of requests in flight, or None; others wait, and are sent late.
    seed: int  # Sampling seed of each request, and seed of prompts.
    vocab_size: int

    def prompts(self, window_name: str) -> Prompts:
        """Returns the maker of a window's prompts; each window has its own."""
        return Prompts(self.seed, window_name, self.vocab_size)

    def body(self, model: str, prompt: str | list[int], max_tokens: int) -> bytes:
        """Returns the JSON of one request to /v1/completions."""
        fields: Json = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        return msgspec.json.encode(fields)


def prepare(target: Target, window: Window, num_warmups: int, salt: str) -> str:
    """Warms the server up, and returns the model's name there.

    The window's longest request is sent num_warmups times, with other tokens. Raises ServerError (a
    ValueError) if it fails.
    """
    longest = max(window.requests, key=lambda r: r.input_length + r.output_length)
    return uvloop.run(_prepare(target, longest, num_warmups, salt))


async def _prepare(target: Target, longest: TraceRequest, num_warmups: int, salt: str) -> str:
    async with CompletionClient(target.url, target.timeout_s) as client:
        model = target.model or await client.only_model()
        for number in range(num_warmups):
            prompt = target.prompts(f"warm-up {number}/{salt}").prompt(longest, 0)
            outcome = await client.complete(target.body(model, prompt, longest.output_length))
            if outcome.error is not None:
                raise ServerError(
                    f"a warm-up with the longest request ({longest.input_length} tokens in, "
                    f"{longest.output_length} out) failed: {outcome.error}; if it is too long for "
                    "the server, use --max-input and --max-output"
                )
        return model


def replay_window(
    target: Target, model: str, window: Window, window_name: str, label: str, progress: bool
) -> tuple[list[RequestRecord], Json]:
    """Sends all requests of a window and waits for their ends. The progress bar shows `label`.

    Returns a record for each request, in the order of arrival, and the fields of a WindowResult
    that follow from the answers. Failures are counted, never raised.
    """
    prompts = target.prompts(window_name)
    bodies = [
        target.body(model, prompts.prompt(request, index), request.output_length)
        for index, request in enumerate(window.requests, window.first_index)
    ]
    with tqdm(total=len(bodies), desc=label, unit="request", disable=not progress) as bar:
        sent = _send(target, bodies, [request.at_s for request in window.requests], bar.update)
        outcomes, lateness, cpu_share = uvloop.run(sent)
    records = [
        record_of(
            outcome,
            index=index,
            at_s=request.at_s,
            late_s=late,
            input_tokens=request.input_length,
            asked=request.output_length,
        )
        for index, (request, outcome, late) in enumerate(
            zip(window.requests, outcomes, lateness, strict=True), window.first_index
        )
    ]
    seconds = max(outcome.ended_at for outcome in outcomes) - outcomes[0].sent_at
    itls = [gap for outcome in outcomes if outcome.error is None for gap in outcome.itls]
    figures = summary(records, itls, seconds, window.seconds)
    return records, figures | {
        "shareable_tokens": shareable_tokens(window),
        "client_cpu_share": round(cpu_share, 3),
    }


async def _send(
    target: Target, bodies: list[bytes], times: list[float], done: Callable[[], Any]
) -> tuple[list[Outcome], list[float], float]:
    bound = asyncio.Semaphore(target.clients) if target.clients is not None else None

    async def send(body: bytes) -> Outcome:
        async with AsyncExitStack() as held:
            if bound is not None:
                await held.enter_async_context(bound)
            outcome = await client.complete(body)
        done()
        return outcome

    async with CompletionClient(target.url, target.timeout_s) as client:
        with ClientClock() as clock:
            outcomes, lateness = await open_loop(send, bodies, times)
    return outcomes, lateness, clock.cpu_share
