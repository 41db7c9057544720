"""An admitted call: the runs of its prompts, merged into one stream, and what is held for its
client.

    admitted --stream or collect--> ended --close--> closed      (close: from any of them)

Knows neither how a call was checked nor the form of its answer. Made by `router.request.service`;
read by `router.http` and by the Python handle.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from pdserve.background.pace import Pacer
from pdserve.protocol.events import TokenLogprob
from pdserve.router.errors import RequestFailed
from pdserve.router.held_bytes import EVENT_BYTES, Account, size_of
from pdserve.router.request.chunks import AnswerEnd, OutputChunk
from pdserve.router.request.request_run import RequestRun
from pdserve.router.request.timeline import PromptTimeline
from pdserve.router.request.traces.call_trace import CallTrace
from pdserve.text.answers.pieces import Piece, joined
from pdserve.text.answers.reading import AnswerReading

# batches of several prompts that wait for their reader; more of them wait as single events
MERGED_BATCHES = 64
RUNS_AT_ONCE = 16  # prompts of one call that begin or end in one turn of the event loop


@dataclass(slots=True)
class ChoiceResult:
    """One choice that is complete."""

    index: int
    # Only the content, if the answer is read for reasoning and calls.
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    # One per token; empty if none were asked for.
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: AnswerEnd | None = None
    stop_reason: int | str | None = None
    # All pieces, if the answer is read for reasoning and calls.
    pieces: list[Piece] = field(default_factory=list)


class Generation:
    """An admitted request of one or several prompts.

    Iterate `stream` once, or call `collect`. `close` stops it at once.
    """

    def __init__(
        self,
        request_id: str,
        n: int,
        runs: Sequence[RequestRun],
        prompts: Sequence[tuple[int, ...]],
        pacer: Pacer,
        account: Account,
        reading: AnswerReading | None = None,
        unenforced: tuple[str, ...] = (),
        trace: CallTrace | None = None,
    ) -> None:
        """Takes over the runs.

        `account` counts what is held for the client; `on_cut`, which may be set, is called when the
        account is cut off. `reading` says how answers are read; with None everything is content.
        `unenforced` names keywords of a turn's JSON schemas (form or tools) that are not enforced,
        in a form fit for a header. `trace` is the call's and ends with this; None: no trace.
        """
        self.request_id = request_id
        self.reading = reading
        self.unenforced = unenforced
        self.n = n
        self.prompts = tuple(prompts)
        self.prompt_lengths = tuple(map(len, prompts))
        self.num_prompt_tokens = sum(self.prompt_lengths)
        self._runs = runs
        self.pacer = pacer
        self._pumps: list[asyncio.Task[None]] = []
        self._starter: asyncio.Task[None] | None = None
        self._closed = False
        self._trace = trace
        self._stopped = False
        self._is_cut = False
        self.account = account
        account.on_cut = self._cut
        self.on_cut: Callable[[], None] = _nothing

    def prompt_logprobs(self, prompt: int) -> Iterator[TokenLogprob | None] | None:
        """One log-probability per prompt token (None for the first), if they were asked for.

        They are complete before the prompt's first chunk.
        """
        return self._runs[prompt].record.prompt_logprobs()

    def embedded_row(self, prompt: int) -> bytes:
        """The hidden row of a prompt to embed, in the form of `Embedded`.

        It is there once everything is collected, and held until `close`.
        """
        row = self._runs[prompt].record.embedded
        assert row is not None, "a prompt's row is asked for before its end"
        return row

    def forget_prompt_logprobs(self, prompt: int) -> None:
        """Frees the prompt's log-probabilities, which are in the answer now."""
        record = self._runs[prompt].record
        self.account.add(-record.num_score_bytes)
        record.forget_scores()

    @property
    def num_cached_tokens(self) -> int:
        return sum(run.record.cached_tokens or 0 for run in self._runs)

    @property
    def num_generated_tokens(self) -> int:
        return sum(run.record.num_tokens for run in self._runs)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(run.num_reasoning_tokens for run in self._runs)

    def served(self) -> None:
        """Counts the time of the answer, whose last byte is out."""
        self._runs[0].report.served(alone=len(self._runs) == 1)

    def timelines(self) -> Iterator[PromptTimeline]:
        """Says where time and bytes went so far; one timeline per prompt."""
        return (run.report.timeline() for run in self._runs)

    def forget_prompts(self) -> None:
        """Frees the prompts, because the answer shows none of them."""
        self.prompts = ()

    def hold(self, num_bytes: int) -> None:
        """Counts more bytes as held for the client, until `close`.

        Raises RequestFailed if that is too much.
        """
        self.account.add(num_bytes)
        if self._is_cut:
            raise _too_much_held()

    def close(self) -> None:
        """Cancels everything at the workers; many prompts are cancelled in the background.

        Idempotent. It does not wait, so it works from a task that is being cancelled.
        """
        if self._closed:
            return
        self._closed = True
        self.account.close()
        self.on_cut = _nothing
        self._stop()
        if self._trace is not None:
            self._trace.close()

    def _stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._starter is not None:
            self._starter.cancel()
        if len(self._runs) > RUNS_AT_ONCE:
            self.pacer.later(self._close_many())
        else:
            self._close_runs(0, len(self._runs))

    def _cut(self) -> None:
        self._is_cut = True
        for run in self._runs:
            run.fail(_too_much_held())  # one error per run: it refers to all who have raised it
        self.pacer.later(self._end_runs())
        self.on_cut()

    async def _end_runs(self) -> None:
        """Ends the runs at the workers; readers get the error."""
        with self.pacer.pace() as pace:
            for run in self._runs:
                if pace.is_due:
                    await pace.rest()
                run.close()

    async def _close_many(self) -> None:
        with self.pacer.pace() as pace:
            for start in range(0, len(self._runs), RUNS_AT_ONCE):
                self._close_runs(start, start + RUNS_AT_ONCE)
                await pace.rest()

    def _close_runs(self, start: int, end: int) -> None:
        for pump in self._pumps[start:end]:
            pump.cancel()
        for run in self._runs[start:end]:
            run.close()

    def stream(self) -> AsyncGenerator[list[OutputChunk], None]:
        """Yields all that became certain at one moment, until all choices are finished.

        Raises RequestFailed.
        """
        return self._runs[0].stream() if len(self._runs) == 1 else self._merged()

    async def collect(self) -> list[ChoiceResult]:
        """Returns all choices, complete and in order of their index; held until `close`."""
        results = [ChoiceResult(index) for index in range(len(self._runs) * self.n)]
        texts: list[list[str]] = [[] for _ in results]
        async with aclosing(self.stream()) as batches:
            async for batch in batches:
                for chunk in batch:
                    result = results[chunk.index]
                    texts[chunk.index].append(chunk.text)
                    result.token_ids += chunk.token_ids
                    result.logprobs += chunk.logprobs
                    result.finish_reason = chunk.finish_reason
                    result.stop_reason = chunk.stop_reason
                    if self.reading is not None:
                        result.pieces += chunk.all_pieces()
                    self.hold(size_of(len(chunk.token_ids), chunk.logprobs) - EVENT_BYTES)
        for result, parts in zip(results, texts, strict=True):
            result.text = "".join(parts)
            result.pieces = joined(result.pieces)
        return results

    async def _merged(self) -> AsyncGenerator[list[OutputChunk], None]:
        """Merges the runs through a queue. A batch counts until the reader asks for the next."""
        queue: asyncio.Queue[tuple[list[OutputChunk], int] | Exception | None] = asyncio.Queue(
            MERGED_BATCHES
        )

        async def pump(run: RequestRun) -> None:
            try:
                async with aclosing(run.stream()) as batches:
                    async for batch in batches:
                        await queue.put((batch, run.pass_on()))
                await queue.put(None)
            except RequestFailed as error:
                # its traceback refers to this queue, where others' errors stay
                await queue.put(error.with_traceback(None))
            except Exception as error:
                await queue.put(error)

        async def start() -> None:
            """Starts the runs, a few at a time, as each one takes time to choose its workers."""
            try:
                with self.pacer.pace() as pace:
                    for run in self._runs:
                        self._pumps.append(asyncio.create_task(pump(run)))
                        if len(self._pumps) % RUNS_AT_ONCE == 0:
                            await pace.rest()
            except Exception as error:  # otherwise the call would wait for prompts that never began
                await queue.put(error)

        running = len(self._runs)
        try:
            self._starter = asyncio.create_task(start())
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    batch, num_bytes = item
                    yield batch
                    self.account.add(-num_bytes)
        finally:
            item = None  # an error that was raised refers to this frame
            if running:
                self.close()
            else:
                self._stop()  # what is held for the answer counts until the caller closes


def _nothing() -> None:
    return None


def _too_much_held() -> RequestFailed:
    message = (
        "this router holds too much for its clients, and most of it for this request: read faster, "
        "ask for fewer tokens, choices or log-probabilities, or raise router.max_held_bytes"
    )
    error = RequestFailed("unavailable", message)
    error.code = "too_much_held"
    return error
