"""Offline generation in this process: `LLM(model).generate(prompts, params)`, without Ray, router
or hand-off.

Adds text to the engine: tokenising, detokenising, stop strings, a progress bar. Results look as
vLLM users know them. Re-exports SamplingParams, the one name that users need besides LLM.
"""

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine.grammars.forms import check_calls, form_grammar
from pdserve.engine.grammars.grammar import Grammar
from pdserve.engine.grammars.make import grammar_builder
from pdserve.engine.llm_prompts import Prompt, as_batch, params_for, tokenise
from pdserve.engine.llm_run import (
    CompletionOutput,
    EmbeddingForm,
    EmbeddingRequestOutput,
    EmbeddingRun,
    RequestOutput,
    Run,
)
from pdserve.engine.ranks import build_with_ranks
from pdserve.kernels.experts.load_file import write_load
from pdserve.models.checkpoint import resolve_folder, tokenizer_folder
from pdserve.models.generation_defaults import described, read_generation_defaults
from pdserve.models.task import read_embedding
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.events import Event
from pdserve.protocol.logit_rules import check_rules
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import MAX_SEED, SamplingParams
from pdserve.text.answers.reading import AnswerReading
from pdserve.text.grammars.structured import structured_outputs as asked_form
from pdserve.text.stop import StopStrings
from pdserve.text.tokenizer import Tokenizer
from pdserve.turns.model_turns import ModelTurns
from pdserve.turns.turn import make_turn

logger = logging.getLogger(__name__)

__all__ = ["LLM", "CompletionOutput", "EmbeddingRequestOutput", "RequestOutput", "SamplingParams"]


class LLM:
    """A model in this process.

    - model: a folder in Hugging Face format or a Hub id.
    - load_format: "auto" or "dummy" (random weights).
    - seed: ModelConfig's. It also draws the seeds of requests without one, so that a run repeats.
    - tokenizer: another folder or Hub id for the tokenizer; False works with token ids only.
    - tensor_parallel_size: number of GPUs (processes, on CPU) that share every layer.
    - data_parallel_size: number of such groups. Each attends to its own sequences; they share the
      experts.
    - enable_expert_parallel: each GPU holds some experts whole, instead of a part of every expert.
    - pipeline_parallel_size: number of stages; each has some of the layers.
    - logits_processors: functions that change the logits of every request. Each is called with the
      tokens that a choice has generated and its logits, float32 `[vocab]`, and returns logits.
      Those of one request are in its `sampling.logit_rules["logits_processors"]`.

    The other parameters up to task are ModelConfig's; further keywords are EngineConfig's.
    ValueError names a bad one. The processes end with this object, or after an error in a step.
    """

    def __init__(
        self,
        model: str = "demo/pdserve-demo",
        *,
        revision: str | None = None,
        dtype: str = "auto",
        load_format: str = "auto",
        seed: int = 0,
        quantization: str | None = None,
        activation_dtype: str = "auto",
        kv_scales: str | None = None,
        tokenizer: str | bool = True,
        chat_template: str | None = None,
        generation_config: str = "auto",
        tool_format: str = "auto",
        reasoning_format: str = "auto",
        tool_enforcement: str = "schema",
        task: str = "auto",
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        pipeline_parallel_size: int = 1,
        logits_processors: Sequence[Callable[[list[int], Tensor], Tensor]] = (),
        **engine: Any,
    ) -> None:
        if logits_processors:
            check_rules({"logits_processors": logits_processors})
        self._processors = tuple(logits_processors)
        given = dict(
            path=model,
            revision=revision,
            tokenizer=tokenizer if isinstance(tokenizer, str) else None,
            chat_template=chat_template,
            dtype=dtype,
            load_format=load_format,
            seed=seed,
            quantization=quantization,
            activation_dtype=activation_dtype,
            kv_scales=kv_scales,
            generation_config=generation_config,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            tool_enforcement=tool_enforcement,
            task=task,
        )
        config = ModelConfig.read(given)
        engine.setdefault("tensor_parallel", tensor_parallel_size)
        engine.setdefault("data_parallel", data_parallel_size)
        engine.setdefault("expert_parallel", enable_expert_parallel)
        engine.setdefault("pipeline_parallel", pipeline_parallel_size)
        engine_config = EngineConfig.read(engine)
        folder = resolve_folder(config.resolved_path, config.load_format, config.revision)
        self._embedding = read_embedding(folder, config.task)
        defaults = read_generation_defaults(folder, config.generation_config)
        self._default_sampling = SamplingParams.from_defaults(defaults)
        if defaults:
            logger.info(
                "default sampling parameters from generation_config.json: %s", described(defaults)
            )
        self.engine, self._steps = build_with_ranks(config, engine_config)
        self.tokenizer = None
        self._grammars = None
        self._turns: ModelTurns | None = None
        if tokenizer is not False:
            self.tokenizer = Tokenizer.load(tokenizer_folder(config), config.template())
            self._grammars = grammar_builder(config, self.engine.config)
            formats = config.tool_format, config.reasoning_format, config.tool_enforcement
            self._turns = ModelTurns(self.tokenizer, *formats)
        self._seeds = random.Random(seed)
        self._num_requests = 0
        self._lock = threading.Lock()
        # True during a call. After a call it is True only if the reset was interrupted, too.
        self._is_dirty = False

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of `generate` and `chat` by default: those of SamplingParams, changed
        by the model's generation_config.json.
        """
        return self._default_sampling

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        structured_outputs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Returns one RequestOutput per prompt, in order.

        - sampling_params: one for all prompts, or one per prompt; by default
          `get_default_sampling_params()`.
        - structured_outputs: the form of every answer, for example {"json": schema},
          {"regex": ...} or {"choice": ["yes", "no"]}. A warning names keywords of a schema that are
          not enforced, once.

        All requests are checked before the first one is computed (ValueError). An exception or
        Ctrl-C ends all of them and empties the prefix cache; the next call works as if it were the
        first. Calls from several threads run one after the other.
        """
        batch = as_batch(prompts)
        params = params_for(self._default_sampling, batch, sampling_params)
        if structured_outputs is not None:
            grammar = form_grammar(asked_form(structured_outputs))
            params = [p.with_rules({"grammar": grammar}) for p in params]
        return self._answers(batch, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        structured_outputs: Mapping[str, Any] | None = None,
        **turn: Any,
    ) -> list[RequestOutput]:
        """Generates the next answers of one or several conversations, with the chat template.

        turn: add_generation_prompt, tools, tool_choice, parallel_tool_calls, chat_template_kwargs,
        continue_final_message, documents, reasoning_effort and thinking_token_budget, as in
        /v1/chat/completions. Outputs have `reasoning` and `tool_calls`; their text is the content,
        to which structured_outputs applies. All else is as in `generate`, also for the tools'
        schemas.
        """
        if self.tokenizer is None or self._turns is None:
            raise ValueError("chat needs a tokenizer: create LLM with tokenizer=True or a folder")
        conversations: Any = (
            messages if messages and not isinstance(messages[0], Mapping) else [messages]
        )
        batch: list[Prompt] = []
        readings: list[AnswerReading | None] = []
        params = params_for(self._default_sampling, conversations, sampling_params)
        form = None if structured_outputs is None else asked_form(structured_outputs)
        for number, conversation in enumerate(conversations):
            asked = make_turn(conversation, **turn)
            self._turns.check(asked, has_engine=True)
            own = params[number].logit_rules
            if form is not None:
                self._turns.check_form(asked, form.field, own)
            text = self._turns.render(asked)
            if form is not None:
                prefix = self._turns.prefix(asked, text)
                calls = self._turns.call_rules(asked, text)
                grammar = form_grammar(form, prefix, calls)
                rules = {**self._turns.budget_rules(asked, text), "grammar": grammar}
            else:
                rules = self._turns.rules(asked, text, True, own)
                if "grammar" in rules:
                    check_calls(rules["grammar"])
            params[number] = params[number].with_rules(rules) if rules else params[number]
            batch.append(self.tokenizer.encode(text, add_special_tokens=False))
            readings.append(self._turns.reading(asked, text))
        return self._answers(batch, params, use_tqdm, readings)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns one embedding per prompt, in order, by an embedding model
        (docs/use/embeddings.md).

        - dimensions: length to which embeddings are cut.
        - normalize: scale embeddings to length 1 (default: what the model says).
        - truncate_prompt_tokens: number of first tokens to which prompts are cut; -1: as many as
          fit.

        Errors and threads are as in `generate`.
        """
        if self._embedding is None:
            raise ValueError(
                "embed: this model generates tokens; create LLM with task='embed', or with an "
                "embedding model"
            )
        self._embedding.check(dimensions)
        fits = self.engine.request_checker.max_request_tokens
        most = fits if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        if most is not None and not 1 <= most <= fits:
            raise ValueError(f"truncate_prompt_tokens must be -1 or from 1 to {fits}, not {most}")
        form = EmbeddingForm(self._embedding, dimensions, normalize)
        runs = [self._make_embedding_run(prompt, form, most) for prompt in as_batch(prompts)]
        self._run(runs, use_tqdm)
        return [run.output for run in runs]

    def expert_load(self) -> dict[int, np.ndarray]:
        """Returns the number of tokens that went to each expert so far, int64 `[num_experts]` per
        layer with a mixture of experts; {} for a model without experts."""
        return self.engine.executor.expert_load()

    def save_expert_load(self, path: str | Path) -> None:
        """Write `expert_load` to a file; engines with `expert_load_file` place experts by it.
        ValueError for a model without experts."""
        load = self.expert_load()
        if not load:
            raise ValueError("the model has no experts, so there is no load to save")
        write_load(path, load)

    def _answers(
        self,
        batch: list[Prompt],
        params: list[SamplingParams],
        use_tqdm: bool,
        readings: Sequence[AnswerReading | None] | None = None,
    ) -> list[RequestOutput]:
        if self._embedding is not None:
            raise ValueError(
                "generate: this model is for embeddings: call embed, or create LLM with "
                "task='generate'"
            )
        stops = {stop: StopStrings(stop) for stop in {p.stop for p in params if p.stop}}
        runs = [
            self._make_run(prompt, p, stops.get(p.stop), reading)
            for prompt, p, reading in zip(
                batch, params, readings or [None] * len(batch), strict=True
            )
        ]
        self._run(runs, use_tqdm)
        return [run.output for run in runs]

    def _make_run(
        self,
        prompt: Prompt,
        params: SamplingParams,
        stops: StopStrings | None,
        reading: AnswerReading | None,
    ) -> Run:
        text, ids = tokenise(self.tokenizer, prompt)
        if params.stop and self.tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer: use stop_token_ids, or create LLM with a tokenizer"
            )
        if self._processors:
            params = params.with_processors(self._processors)
        seed = self._seeds.randint(0, MAX_SEED) if params.seed is None else params.seed
        name = str(self._num_requests)
        self._num_requests += 1
        submit = Submit(
            key=RequestKey("llm", 0, name),
            phase="full",
            prompt_token_ids=tuple(ids),
            sampling=params.with_seed(seed),
            starts=tuple(Start(choice) for choice in range(params.n)),
        )
        outputs = [CompletionOutput(choice) for choice in range(params.n)]
        output = RequestOutput(name, text, ids, outputs)
        request = self.engine.make_request(submit, self._grammar(params))
        return Run(request, submit.starts, output, self.tokenizer, stops, reading)

    def _make_embedding_run(
        self, prompt: Prompt, form: EmbeddingForm, most: int | None
    ) -> EmbeddingRun:
        text, ids = tokenise(self.tokenizer, prompt, most)
        if not ids or text == "":
            raise ValueError("prompt is empty: an embedding needs at least one token")
        name = str(self._num_requests)
        self._num_requests += 1
        submit = Submit(
            key=RequestKey("llm", 0, name),
            phase="full",
            kind="embed",
            prompt_token_ids=tuple(ids),
            sampling=SamplingParams(max_tokens=1, seed=0),
            starts=(Start(0),),
        )
        request = self.engine.make_request(submit)
        return EmbeddingRun(request, submit.starts, EmbeddingRequestOutput(name, text, ids), form)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """Build the grammar that the parameters ask for, if any. ValueError if it cannot be."""
        text = (params.logit_rules or {}).get("grammar")
        if text is None:
            return None
        if self._grammars is None:
            raise ValueError(
                "logit_rules: grammar needs a tokenizer: leave it out, or create LLM with one"
            )
        return self._grammars.build(text)

    def _run(self, runs: Sequence[Run | EmbeddingRun], use_tqdm: bool) -> None:
        """Run all to their ends. Whatever interrupts it, at any instruction, leaves an empty
        engine: at once, or before the next call's first step if emptying was interrupted, too.
        """
        with self._lock:
            if self._is_dirty:
                self._steps(lambda _: self.engine.reset())
            self._is_dirty = True
            try:
                self._steps(lambda is_over: self._run_to_end(runs, use_tqdm, is_over))
            except BaseException as error:
                self._empty(error)
                raise
            self._is_dirty = False

    def _empty(self, error: BaseException) -> None:
        """Empty the engine after an error. If that fails, the next call tries again."""
        try:
            self._steps(lambda _: self.engine.reset())
        except RuntimeError as another:
            error.add_note(str(another))
        else:
            self._is_dirty = False

    def _run_to_end(
        self, runs: Sequence[Run | EmbeddingRun], use_tqdm: bool, is_over: threading.Event
    ) -> None:
        live = {run.request.key: run for run in runs}
        for run in runs:
            self.engine.add(run.request, run.starts)
        bar = tqdm(total=len(runs), desc="generating", unit="request", disable=not use_tqdm)
        with bar as progress:
            while live and not is_over.is_set():
                for key, event in self.engine.step().events:
                    if key in live:
                        self._take(live[key], event)
                        if live[key].finished:
                            del live[key]
                            progress.update()
        # run the steps that were queued for sequences that have ended
        while self.engine.has_work and not is_over.is_set():
            self.engine.step()

    def _take(self, run: Run | EmbeddingRun, event: Event) -> None:
        stopped = run.take(event)
        if stopped is not None:
            self.engine.abort(run.request.key, (stopped,))
