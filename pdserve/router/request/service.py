"""The router of one model, without HTTP: prompts and SamplingParams in, a Generation out.

It checks every part of a call before any worker hears of it, draws the seed, and makes a run of
each prompt. Knows no OpenAI forms and no framework. Called by `router.http.app` and by the Python
handle (`cluster/client.py`).
"""

import itertools
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any

import msgspec

from pdserve.background.pace import Pacer
from pdserve.configs.embedding import EmbeddingModel
from pdserve.configs.router import LogConfig, RouterConfig, SloConfig
from pdserve.configs.traces import TracesConfig
from pdserve.protocol.request_key import RequestKind
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.admission import Admission
from pdserve.router.choosing.choose import Chooser, NoWorker
from pdserve.router.choosing.predict import Forecast
from pdserve.router.errors import ApiError, RequestFailed
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.worker_state import WorkerState
from pdserve.router.grammars import Grammars, PartsMaker, Rules, bad_word_ids
from pdserve.router.held_bytes import Held
from pdserve.router.metrics import RouterMetrics
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.generation import ChoiceResult, Generation
from pdserve.router.request.job import Dispatcher, Job
from pdserve.router.request.prompts import Lengths, Limits, Prompt, Prompts
from pdserve.router.request.request_checks import (
    PLAIN_NAMES,
    Names,
    check_call,
    check_num_choices,
    check_room,
    check_scheduling,
    check_scores,
    kept_tokens,
)
from pdserve.router.request.request_log import RequestLog
from pdserve.router.request.request_run import RequestRun
from pdserve.router.request.slo import Goodput
from pdserve.router.request.traces.call_trace import CallTrace
from pdserve.router.request.traces.start import start_tracer
from pdserve.text.answers.reading import AnswerReading
from pdserve.text.grammars.reasoning import NO_REASONING, ReasoningPrefix
from pdserve.text.grammars.structured import StructuredRequest
from pdserve.text.stop import StopStrings
from pdserve.text.tokenizer import Tokenizer
from pdserve.turns.model_turns import ModelTurns
from pdserve.turns.turn import Turn


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
        seed: int | None = None,
        turns: ModelTurns | None = None,
        traces: TracesConfig | None = None,
        aliases: Sequence[str] = (),
        embedding: EmbeddingModel | None = None,
    ) -> None:
        """Builds all parts of the router.

        - `model_name` is the name in metrics and logs; `aliases` are further names for requests.
        - `resume_wait_s` is how long a request that lost its worker waits for one to join.
        - `sampling_defaults` are the model's, by SamplingParams' names, for what requests leave
          open. An impossible one raises ValueError.
        - `seed`: see Chooser.
        - `turns` are the model's; None finds its formats.
        - `traces`: None exports none. Traces that cannot be made raise ValueError.
        - `embedding` says how the model embeds; None: it generates.
        """
        self.fleet = fleet
        self.tokenizer = tokenizer
        self.config = config
        self.model_name = model_name
        self.aliases = tuple(aliases)
        self.embedding = embedding
        self.sampling_defaults = dict(sampling_defaults or {})
        self.turns = turns or ModelTurns(tokenizer)
        self.default_sampling = SamplingParams.from_defaults(self.sampling_defaults)
        self.metrics = RouterMetrics(model_name)
        self.pacer = Pacer()
        self.held = Held(config.max_held_bytes, self.metrics.cuts.inc)
        self.metrics.held_bytes.set_function(lambda: self.held.num_bytes)
        self._grammars = Grammars(fleet, self.metrics)
        self.prompts = Prompts(tokenizer, config.max_prompt_tokens, self.pacer)
        slo = slo or SloConfig()
        chooser, scout = (
            Chooser(config.split_min_tokens, config.policy, config.split, slo, seed)
            for _ in range(2)
        )
        self._scout = scout  # its picks take nobody's turn
        self.split_gain = chooser.gain
        self.metrics.split_gain.set_function(lambda: chooser.gain.mean_s(time.monotonic()))
        self.admission = Admission(config.max_concurrent_prompts, config.max_queued_tokens, slo)
        self.metrics.caution.set_function(lambda: self.admission.caution)
        self.metrics.queued.set_function(lambda: self.admission.queued_tokens)
        self._goodput = Goodput(slo, self.metrics.registry)
        self.tracer = start_tracer(
            traces or TracesConfig(), model_name, fleet.router_id, self.metrics.traces
        )
        self.request_log = RequestLog(model_name, logs or LogConfig())
        self._dispatcher = Dispatcher(
            fleet,
            chooser,
            tokenizer,
            config,
            self.metrics,
            self._goodput,
            self.request_log,
            self.pacer,
            resume_wait_s,
        )
        self._numbers = itertools.count()

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that clients may send as `model`."""
        return (self.model_name, *self.aliases)

    def limits(self) -> Limits:
        """Limits of the workers now. Raises RequestFailed("unavailable") if there are none."""
        workers = self._workers
        if not workers:
            raise RequestFailed("unavailable", "no decode worker is ready: try again in a moment")
        vocab_size = min(worker.hello.vocab_size for worker in workers)
        least_answer = 1 if self.embedding is None else 0
        return Limits(max(worker.token_limit for worker in workers), vocab_size, least_answer)

    @property
    def _workers(self) -> list[WorkerState]:
        """Workers that decide how long a request may be."""
        fleet = self.fleet
        return fleet.decode_workers if self.embedding is None else fleet.embedding_workers

    @property
    def most_tokens(self) -> int | None:
        """Tokens that a request may have here; None while no worker can take it."""
        return max((worker.token_limit for worker in self._workers), default=None)

    def check_kind(self, kind: RequestKind) -> None:
        """Raises ApiError (400) for a kind of request that the model is not for."""
        if kind == "embed" and self.embedding is None:
            message = (
                f"the model {self.model_name!r} generates tokens and embeds nothing: serve a model "
                "that is for embeddings, or set model.task: embed"
            )
        elif kind == "generate" and self.embedding is not None:
            message = (
                f"the model {self.model_name!r} is for embeddings: send texts to /v1/embeddings, "
                "or set model.task: generate"
            )
        else:
            return
        raise ApiError(message, param="model", code="wrong_task")

    def lengths(self) -> Lengths:
        """Limits of a prompt's length now. Raises like `limits`."""
        return self.prompts.lengths(self.limits())

    async def rules(
        self,
        structured: StructuredRequest | None,
        bad_words: Sequence[str] = (),
        allowed_token_ids: Sequence[int] = (),
        prefix: ReasoningPrefix = NO_REASONING,
        call_rules: tuple[str, ...] = (),
        parts: PartsMaker | None = None,
    ) -> Rules:
        """Returns a call's demands on its answer's form and words, as logit rules.

        For `prefix`, `call_rules` and `parts` see `Grammars.rules`. Raises ApiError: 400 naming the
        parameter, 429 if there is too much to do.
        """
        rules = Rules()
        if structured is not None:
            with self._goodput.refusals(1), self.admission.preparing():
                rules = await self._grammars.rules(structured, prefix, call_rules, parts)
        settings = dict(rules.settings)
        if bad_words:
            settings["bad_words"] = bad_word_ids(bad_words, self.tokenizer)
        if allowed_token_ids:
            settings["allowed_token_ids"] = list(allowed_token_ids)
        return Rules(settings, rules.unenforced)

    async def tool_rules(self, text: str, parts: PartsMaker | None = None) -> Rules:
        """Returns a grammar of tool calls as a rule (`Grammars.tool_rules`). Raises ApiError like
        `rules`."""
        with self._goodput.refusals(1), self.admission.preparing():
            return await self._grammars.tool_rules(text, parts)

    async def check(
        self,
        sampling: SamplingParams,
        num_prompts: int,
        priority: int,
        cache_salt: str,
        session_id: str,
        names: Names = PLAIN_NAMES,
        kind: RequestKind = "generate",
    ) -> None:
        """Checks what a call says beside its prompts, as `admit` does. Raises ApiError."""
        if kind != "embed":
            check_num_choices(self.config, sampling.n, num_prompts)
        check_call(self.config, sampling, num_prompts, names, self.limits().vocab_size)
        check_scheduling(priority, cache_salt, session_id)
        text = (sampling.logit_rules or {}).get("grammar")
        if text is not None:  # whoever wrote it: a hostile one may end the process that builds it
            await self._grammars.check(text, "logit_rules")

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
        names: Names = PLAIN_NAMES,
        tenant: str = "",
        open_ended: bool = False,
        reading: AnswerReading | None = None,
        unenforced: tuple[str, ...] = (),
        truncate_prompt_tokens: int | None = None,
        trace: CallTrace | None = None,
        kind: RequestKind = "generate",
    ) -> Generation:
        """Checks everything and prepares. No worker hears of it before the first iteration.

        The caller must iterate the result or `close` it, as it holds places in `admission`.

        - `sampling`: None takes the model's defaults.
        - `open_ended`: if fewer than max_tokens fit the worker that decodes, as many as fit are
          enough. This always holds without `sampling` or without its max_tokens.
        - `request_id` is its name in answers and workers' logs. It need not be unique; by default
          it is new.
        - `received` is perf_counter() when the call came; by default now.
        - `names` are the names that errors use for the request's fields.
        - `tenant` shares cached prefixes only with itself, whatever the salt.
        - `session_id`: prompts of one session go to one worker if nothing speaks against it.
        - `reading` says how answers are read for reasoning and calls; None: all is content.
        - `truncate_prompt_tokens` cuts each prompt to its last tokens, or to its first if it is
          embedded; -1 leaves room for the answer.
        - `unenforced` and `trace`: see `Generation`.

        Raises ApiError: 400 naming the parameter, 429 if there is too much to do, 503 if no worker
        is there.
        """
        self.check_kind(kind)
        received = time.perf_counter() if received is None else received
        request_id = request_id or f"gen-{uuid.uuid4().hex}"
        open_ended = open_ended or sampling is None or sampling.max_tokens is None
        sampling = sampling or self.default_sampling
        await self.check(sampling, len(prompts), priority, cache_salt, session_id, names, kind)
        cache_salt = f"{tenant}:{cache_salt}" if tenant else cache_salt
        limits = self.limits()
        with self._goodput.refusals(len(prompts)):
            seats = self.admission.enter(len(prompts), names.prompt)
            try:
                if truncate_prompt_tokens is None:
                    ids = await self.prompts.token_ids(
                        prompts, add_special_tokens, limits, names.prompt
                    )
                else:
                    most = kept_tokens(
                        truncate_prompt_tokens, sampling, open_ended, self.prompts.lengths(limits)
                    )
                    ids = await self.prompts.cut_token_ids(
                        prompts, add_special_tokens, limits, names.prompt, most, kind == "embed"
                    )
                if kind != "embed":
                    check_room(sampling, open_ended, max(map(len, ids)), limits.max_tokens, names)
                check_scores(sampling, sum(map(len, ids)))
                stops = StopStrings(sampling.stop) if sampling.stop else None
                # this router looks for stop strings, workers do not; checking a copy takes 50 us
                sent = msgspec.structs.replace(sampling, stop=()) if sampling.stop else sampling
                runs = []
                account = self.held.account()
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
                            reading,
                            trace,
                            kind,
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
        if trace is not None:
            trace.admitted(request_id, len(ids), sampling)
        return Generation(
            request_id, sampling.n, runs, ids, self.pacer, account, reading, unenforced, trace
        )

    async def admit_embedding(
        self, prompts: Sequence[Prompt], *, dimensions: int | None, **options: Any
    ) -> Generation:
        """Admits prompts to embed; `collect` then provides their rows (`embedded_row`). Raises
        ApiError like `admit`, and for dimensions that this model's embeddings cannot have."""
        self.check_kind("embed")
        assert self.embedding is not None
        try:
            self.embedding.check(dimensions)
        except ValueError as error:
            raise ApiError(str(error), param="dimensions") from error
        sampling = SamplingParams(max_tokens=1, seed=0)
        return await self.admit(prompts, sampling, kind="embed", **options)

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None, **options: Any
    ) -> AsyncGenerator[OutputChunk, None]:
        """Yields chunks of all choices as they become certain; `options` are those of `admit`.
        Close the iterator to cancel."""
        with closing(await self.admit(prompts, sampling, **options)) as generation:
            async with aclosing(generation.stream()) as batches:
                async for batch in batches:
                    for chunk in batch:
                        yield chunk

    async def collect(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None, **options: Any
    ) -> list[ChoiceResult]:
        """Returns all choices, complete; `options` are those of `admit`. Cancelling the
        awaiting task cancels the request."""
        with closing(await self.admit(prompts, sampling, **options)) as generation:
            return await generation.collect()

    async def chat_prompt(self, turn: Turn, may_be_long: bool = False) -> str:
        """Returns the text of a conversation by the model's chat template, which writes its own
        special tokens. `may_be_long` means that it is cut later. Raises ApiError (400; 429 if there
        is too much to do)."""
        with self._goodput.refusals(1), self.admission.preparing():
            return await self.prompts.render(turn, self.turns, self.limits(), may_be_long)

    async def count_tokens(self, turn: Turn) -> int:
        """Counts the tokens of a conversation's prompt; generates nothing. Raises ApiError (400;
        429 if there is too much to do)."""
        prompt = await self.chat_prompt(turn)
        with self._goodput.refusals(1), self.admission.preparing():
            [ids] = await self.prompts.token_ids([prompt], False, self.limits(), "messages")
        return len(ids)

    def _check_lateness(self, run: RequestRun, priority: int, received: float) -> Forecast | None:
        """Returns the forecast, if there can be one. Raises ApiError (429) if the first token would
        be too late by what workers report of their queues."""
        admission = self.admission
        if not admission.foresees:
            return None
        try:
            forecast = run.forecast(
                self._scout, admission.share_ahead(priority), admission.unsent_tokens
            )
        except NoWorker:
            return None  # the request's run will report it
        if forecast is not None:
            admission.check_lateness(forecast, 1000 * (time.perf_counter() - received))
        return forecast
