"""Generation without HTTP: prompts and SamplingParams in, chunks of text and tokens out.

Checks everything a request says against the model, the tokenizer and the router's limits before any worker hears of it,
draws the seed, and merges the streams of several prompts. Knows no OpenAI forms and no framework.
Called by `router.app` and by the Python handle (`cluster/client.py`).
"""

import asyncio
import itertools
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdserve.configs.schema import LogConfig, RouterConfig, SloConfig
from pdserve.engine.protocol import FinishReason, SamplingParams, TokenLogprob
from pdserve.router.admission import Admission
from pdserve.router.choose import Chooser, NoWorker
from pdserve.router.dispatch import Chunk, Dispatcher, Job, RequestRun
from pdserve.router.errors import ApiError, RequestFailed, value_error
from pdserve.router.fleet import Fleet
from pdserve.router.held import PIECE_BYTES, Account, Held, size_of
from pdserve.router.metrics import RouterMetrics
from pdserve.router.pace import Pacer
from pdserve.router.predict import Forecast
from pdserve.router.prompts import Lengths, Limits, Prompt, Prompts, context_length_error
from pdserve.router.request_log import RequestLog
from pdserve.router.slo import Goodput
from pdserve.router.timeline import PromptTimeline
from pdserve.text.stop import StopStrings
from pdserve.text.tokenizer import Tokenizer

# far above what anyone needs; without them one body could keep the event loop busy for minutes
MAX_CHOICES = 8192
MAX_EDITS = 1 << 20  # entries of logit_bias and stop_token_ids, times choices: each has its own copy at a worker
MAX_SCORES = 1 << 19  # log-probabilities of prompt tokens in an answer: each takes 13 bytes here, 50 to 70 in JSON
MERGED_BATCHES = 64  # of several prompts, that wait for their reader: the others wait as single events
RUNS_AT_ONCE = 16  # prompts of one call that begin or end in one turn of the event loop
MAX_SALT_CHARS = 256
MAX_SESSION_CHARS = 256
MAX_PRIORITY = 2**31 - 1  # and as far below zero


@dataclass(slots=True)
class ChoiceResult:
    """One whole choice. logprobs: one a token, or empty when none were asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Generation:
    """An admitted request of one or several prompts. Iterate `stream` once, or `collect`; `close` stops it at once."""

    def __init__(
        self,
        request_id: str,
        n: int,
        runs: Sequence[RequestRun],
        prompts: Sequence[tuple[int, ...]],
        pacer: Pacer,
        account: Account,
    ) -> None:
        """account: what is held for the client. on_cut, which may be set: called when that is cut off."""
        self.request_id = request_id
        self.n = n
        self.prompts = tuple(prompts)
        self.num_prompt_tokens = sum(map(len, prompts))
        self._runs = runs
        self.pacer = pacer
        self._pumps: list[asyncio.Task[None]] = []
        self._starter: asyncio.Task[None] | None = None
        self._closed = False
        self._stopped = False
        self._is_cut = False
        self.account = account
        account.on_cut = self._cut
        self.on_cut: Callable[[], None] = _nothing

    def prompt_logprobs(self, prompt: int) -> Iterator[TokenLogprob | None] | None:
        """One a prompt token (the first is None), when they were asked for; there before the prompt's first chunk."""
        return self._runs[prompt].record.prompt_logprobs()

    def forget_prompt_logprobs(self, prompt: int) -> None:
        """They are in the answer now: hold them no longer."""
        record = self._runs[prompt].record
        self.account.add(-record.num_score_bytes)
        record.forget_scores()

    @property
    def num_cached_tokens(self) -> int:
        return sum(run.record.cached_tokens or 0 for run in self._runs)

    @property
    def num_generated_tokens(self) -> int:
        return sum(run.record.num_tokens for run in self._runs)

    def served(self) -> None:
        """The answer's last byte is out: count what it took."""
        self._runs[0].served(alone=len(self._runs) == 1)

    def timelines(self) -> Iterator[PromptTimeline]:
        """Where time and bytes went up to now, one a prompt."""
        return (run.timeline() for run in self._runs)

    def forget_prompts(self) -> None:
        """The answer shows none of them."""
        self.prompts = ()

    def hold(self, num_bytes: int) -> None:
        """Count num_bytes more as held for the client, until `close`. RequestFailed when that was
        too much."""
        self.account.add(num_bytes)
        if self._is_cut:
            raise _too_much_held()

    def close(self) -> None:
        """Cancel everything at the workers; many prompts in the background. Idempotent; does not wait,
        so it works from a task that is being cancelled."""
        if self._closed:
            return
        self._closed = True
        self.account.close()
        self.on_cut = _nothing
        self._stop()

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
            run.fail(_too_much_held())  # one each: an error refers to all who have raised it
        self.pacer.later(self._end_runs())
        self.on_cut()

    async def _end_runs(self) -> None:
        """At the workers; whoever reads gets the error."""
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

    def stream(self) -> AsyncGenerator[list[Chunk], None]:
        """Everything that became certain at one moment, until all choices are finished. Raises RequestFailed."""
        return self._runs[0].stream() if len(self._runs) == 1 else self._merged()

    async def collect(self) -> list[ChoiceResult]:
        """All choices, complete, in order of their index. They are held until `close`."""
        results = [ChoiceResult(index) for index in range(len(self._runs) * self.n)]
        texts: list[list[str]] = [[] for _ in results]
        async with aclosing(self.stream()) as batches:
            async for batch in batches:
                for chunk in batch:
                    result = results[chunk.index]
                    texts[chunk.index].append(chunk.text)
                    result.token_ids += chunk.token_ids
                    result.logprobs += chunk.logprobs
                    result.finish_reason, result.stop_reason = chunk.finish_reason, chunk.stop_reason
                    self.hold(size_of(len(chunk.token_ids), chunk.logprobs) - PIECE_BYTES)
        for result, parts in zip(results, texts, strict=True):
            result.text = "".join(parts)
        return results

    async def _merged(self) -> AsyncGenerator[list[Chunk], None]:
        """Batches go through a queue; what they hold counts until the reader asks for the next."""
        queue: asyncio.Queue[tuple[list[Chunk], int] | Exception | None] = asyncio.Queue(MERGED_BATCHES)

        async def pump(run: RequestRun) -> None:
            try:
                async with aclosing(run.stream()) as batches:
                    async for batch in batches:
                        await queue.put((batch, run.pass_on()))
                await queue.put(None)
            except RequestFailed as error:
                await queue.put(error.with_traceback(None))  # which refers to this queue, where others' errors stay
            except Exception as error:
                await queue.put(error)

        async def start() -> None:
            """Each prompt chooses its workers, which takes its time."""
            try:
                with self.pacer.pace() as pace:
                    for run in self._runs:
                        self._pumps.append(asyncio.create_task(pump(run)))
                        if len(self._pumps) % RUNS_AT_ONCE == 0:
                            await pace.rest()
            except Exception as error:  # or the call would wait for prompts that never began
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


class Service:
    """The router of one model. Use it from the event loop that the fleet lives in."""

    def __init__(
        self,
        fleet: Fleet,
        tokenizer: Tokenizer,
        config: RouterConfig,
        model_name: str,
        resume_wait_s: float = 60.0,
        slo: SloConfig | None = None,
        logs: LogConfig | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """resume_wait_s: how long a request whose worker was lost waits for another one to join. sampling_defaults: the
        model's, of SamplingParams' names, for what requests do not say; ValueError for one that cannot be."""
        self.fleet = fleet
        self.tokenizer = tokenizer
        self.config = config
        self.model_name = model_name
        self.sampling_defaults = dict(sampling_defaults or {})
        self._default_sampling = SamplingParams.from_defaults(self.sampling_defaults)
        self.metrics = RouterMetrics(model_name)
        self.pacer = Pacer()
        self.held = Held(config.max_held_bytes, self.metrics.cuts.inc)
        self.metrics.held_bytes.set_function(lambda: self.held.num_bytes)
        self.prompts = Prompts(tokenizer, config.max_prompt_tokens, self.pacer)
        chooser = Chooser(config.split_min_tokens, config.policy, config.split)
        self._scout = Chooser(config.split_min_tokens, config.policy, config.split)  # what it picks takes nobody's turn
        slo = slo or SloConfig()
        self.admission = Admission(config.max_concurrent_prompts, config.max_queued_tokens, slo)
        self.metrics.caution.set_function(lambda: self.admission.caution)
        self.metrics.queued.set_function(lambda: self.admission.queued_tokens)
        self._goodput = Goodput(slo, self.metrics.registry)
        self.request_log = RequestLog(model_name, logs or LogConfig())
        self._dispatcher = Dispatcher(
            fleet, chooser, tokenizer, config, self.metrics, self._goodput, self.request_log, self.pacer, resume_wait_s
        )
        self._numbers = itertools.count()

    def limits(self) -> Limits:
        """Raises RequestFailed("unavailable") when no decode worker is there."""
        workers = self.fleet.decode_workers
        if not workers:
            raise RequestFailed("unavailable", "no decode worker is ready: try again in a moment")
        vocab_size = min(worker.hello.vocab_size for worker in workers)
        return Limits(max(worker.token_limit for worker in workers), vocab_size)

    def lengths(self) -> Lengths:
        """What a prompt's length may be now. Raises as `limits`."""
        return self.prompts.lengths(self.limits())

    async def admit(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        session_id: str = "",
        add_special_tokens: bool = True,
        received: float | None = None,
        named: str = "prompt",
        tenant: str = "",
        open_ended: bool = False,
    ) -> Generation:
        """Check everything and prepare. No worker hears of it before the first iteration. The caller must iterate or
        `close` it, as it holds places in `admission`.

        sampling: None takes the model's defaults. open_ended: where fewer than sampling.max_tokens fit the worker that
        decodes, as many as fit will do; always so without sampling, and without max_tokens. request_id: what answers
        and the workers' logs name it by; it need not be unique, and is a new one by default. received: perf_counter()
        when the call came; now by default. named: what errors call the prompt. tenant: shares cached prefixes with
        itself only, whatever the salt. session_id: prompts of one session go to one worker where nothing speaks
        against it. Raises ApiError: 400 naming the parameter, 429 when there is too much to do, 503 when no worker is
        there."""
        received = time.perf_counter() if received is None else received
        request_id = request_id or f"gen-{uuid.uuid4().hex}"
        open_ended = open_ended or sampling is None or sampling.max_tokens is None
        sampling = sampling or self._default_sampling
        self.check_num_choices(sampling.n, len(prompts))
        self._check_sampling(sampling, len(prompts))
        _check_scheduling(priority, cache_salt, session_id)
        cache_salt = f"{tenant}:{cache_salt}" if tenant else cache_salt
        limits = self.limits()
        try:
            sampling.check_vocab(limits.vocab_size)
        except ValueError as error:
            raise value_error(error, SamplingParams.__struct_fields__) from error
        if not prompts:
            raise ApiError("prompt is empty: send a text, a list of token ids, or a list of these", param="prompt")
        with self._goodput.refusals(len(prompts)):
            seats = self.admission.enter(len(prompts))
            try:
                ids = await self.prompts.token_ids(prompts, add_special_tokens, limits, named)
                _check_room(sampling, open_ended, max(map(len, ids)), limits.max_tokens)
                _check_scores(sampling, sum(map(len, ids)))
                stops = StopStrings(sampling.stop) if sampling.stop else None
                # this router looks for them, workers do not; a copy is checked again, which takes 50 us
                sent = msgspec.structs.replace(sampling, stop=()) if sampling.stop else sampling
                runs, account = [], self.held.account()
                with self.pacer.pace() as pace:
                    for number, prompt in enumerate(ids):
                        if pace.is_due:
                            await pace.rest()
                        job = Job(
                            f"{request_id}-{next(self._numbers)}",
                            prompt,
                            sent.with_seed(secrets.randbits(63)) if sent.seed is None else sent,
                            received,
                            number,
                            priority,
                            cache_salt,
                            session_id,
                            stops,
                            open_ended,
                        )
                        runs.append(RequestRun(self._dispatcher, job, seats[number], account))
                self.admission.check_tokens(sum(map(len, ids)))
                longest = max(range(len(ids)), key=lambda number: len(ids[number]))
                forecast = self._check_lateness(runs[longest], priority, received)
            except BaseException:
                for seat in seats:
                    seat.leave()
                raise
        for seat, prompt in zip(seats, ids, strict=True):
            seat.fill(len(prompt), priority, forecast if len(seats) == 1 else None)
        return Generation(request_id, sampling.n, runs, ids, self.pacer, account)

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None, **options: Any
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks of all choices as they become certain; options as in `admit`. Close the iterator to cancel."""
        with closing(await self.admit(prompts, sampling, **options)) as generation:
            async with aclosing(generation.stream()) as batches:
                async for batch in batches:
                    for chunk in batch:
                        yield chunk

    async def collect(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None, **options: Any
    ) -> list[ChoiceResult]:
        """All choices, complete; options as in `admit`. Cancelling the awaiting task cancels the request."""
        with closing(await self.admit(prompts, sampling, **options)) as generation:
            return await generation.collect()

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation by the model's chat template, which writes its own special
        tokens. Raises ApiError (400; 429 when there is too much to do)."""
        variables = variables or {}
        for name in ("self", "messages", "add_generation_prompt", "tools"):
            if name in variables:
                message = f"chat_template_kwargs must not set {name!r}: the server sets it"
                raise ApiError(message, param="chat_template_kwargs")
        with self._goodput.refusals(1), self.admission.preparing():
            return await self.prompts.render(messages, add_generation_prompt, tools, variables, self.limits())

    def check_num_choices(self, n: int, num_prompts: int = 1) -> None:
        """Raises ApiError (400) when n choices of each prompt are more than this router takes."""
        if n > self.config.max_n:
            message = f"n must be at most {self.config.max_n}, not {n}: ask for fewer choices, or raise router.max_n"
            raise ApiError(message, param="n")
        if n * num_prompts > MAX_CHOICES:
            message = (
                f"n ({n}) times the number of prompts ({num_prompts}) must be at most {MAX_CHOICES}: spread them over "
                "several requests"
            )
            raise ApiError(message, param="n" if num_prompts == 1 else "prompt")

    def _check_sampling(self, sampling: SamplingParams, num_prompts: int) -> None:
        bias, num_choices = sampling.logit_bias or {}, sampling.n * num_prompts
        num_ids = len(bias) + len(sampling.stop_token_ids)
        if num_ids * num_choices > MAX_EDITS:
            name = "logit_bias" if len(bias) > len(sampling.stop_token_ids) else "stop_token_ids"
            message = (
                f"{name}: logit_bias and stop_token_ids hold {num_ids} ids for each of {num_choices} choices, and may "
                f"hold {MAX_EDITS} for all of them: send fewer ids, or spread the choices over several requests"
            )
            raise ApiError(message, param=name)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(sampling, name)
            if value is not None and value > self.config.max_logprobs:
                message = (
                    f"{name} ({value}) must not exceed {self.config.max_logprobs}: ask for fewer, or raise "
                    "router.max_logprobs"
                )
                raise ApiError(message, param=name)

    def _check_lateness(self, run: RequestRun, priority: int, received: float) -> Forecast | None:
        """The forecast, if there can be one. ApiError (429) when the first token would come too late, by what workers
        say of their queues."""
        admission = self.admission
        if not admission.foresees:
            return None
        try:
            forecast = run.forecast(self._scout, admission.share_ahead(priority), admission.unsent_tokens)
        except NoWorker:
            return None  # its run will say so
        if forecast is not None:
            admission.check_lateness(forecast, 1000 * (time.perf_counter() - received))
        return forecast


def _nothing() -> None:
    return None


def _too_much_held() -> RequestFailed:
    message = (
        "this router holds too much for its clients, and most for this request: read faster, ask for fewer tokens, "
        "choices or log-probabilities, or raise router.max_held_bytes"
    )
    error = RequestFailed("unavailable", message)
    error.code = "too_much_held"
    return error


def _check_scheduling(priority: int, cache_salt: str, session_id: str) -> None:
    if abs(priority) > MAX_PRIORITY:
        message = f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, the lowest runs first, not {priority}"
        raise ApiError(message, param="priority")
    if len(cache_salt) > MAX_SALT_CHARS:
        message = f"cache_salt must have at most {MAX_SALT_CHARS} characters, not {len(cache_salt)}: send a hash of it"
        raise ApiError(message, param="cache_salt")
    if len(session_id) > MAX_SESSION_CHARS:
        message = (
            f"x-session-id: a session's id must have at most {MAX_SESSION_CHARS} characters, not {len(session_id)}: "
            "send a hash of it"
        )
        raise ApiError(message, param="x-session-id")


def _check_scores(sampling: SamplingParams, num_tokens: int) -> None:
    """Raises ApiError (400) when the log-probabilities of all prompts, as every choice repeats them, are too many."""
    if sampling.prompt_logprobs is None:
        return
    count = num_tokens * sampling.n * (sampling.prompt_logprobs + 1)
    if count > MAX_SCORES:
        message = (
            f"prompt_logprobs (or logprobs with echo): {count} log-probabilities of prompt tokens, more than "
            f"{MAX_SCORES} (tokens x choices x alternatives): ask for fewer, or of shorter prompts"
        )
        raise ApiError(message, param="prompt_logprobs")


def _check_room(sampling: SamplingParams, open_ended: bool, num_prompt: int, limit: int) -> None:
    """Raises ApiError (400) when what must be generated after the longest prompt fits no worker."""
    max_tokens = 1 if open_ended else sampling.max_tokens or 1
    for name, value in (("max_tokens", max_tokens), ("min_tokens", sampling.min_tokens)):
        if num_prompt + value > limit:
            raise context_length_error(limit, num_prompt, value, name)
