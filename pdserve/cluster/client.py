"""Python access to a running cluster without HTTP: `connect().generate(prompts, params)`.

Each prompt is one call to a router replica through a Serve handle; Serve spreads the calls. All
calls run on one background event loop, so the same client serves plain scripts and asyncio
programs. Users call this module, and so do the commands of `cluster.operate.commands`. It
imports no torch.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from pdserve.cluster.links.framing import Joiner
from pdserve.cluster.links.handle_api import (
    Answer,
    Choice,
    EmbeddedWhole,
    EmbedFields,
    GenerateCall,
    OutputChunks,
    Whole,
    decode_answer,
    encode,
)
from pdserve.cluster.loop_thread import LoopThread
from pdserve.cluster.names import ROUTER
from pdserve.cluster.orders import ClusterError, OrdersClient, check
from pdserve.protocol.events import TokenLogprob
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.timeline import PromptTimeline
from pdserve.turns.turn import TURN_OPTIONS, make_turn

APP_NAME = "pdserve"
MAX_IN_FLIGHT = 256
CLOSED = "this client is closed: make a new one with connect()"
OPTIONS: dict[str, type] = {
    "cache_salt": str,
    "priority": int,
    "session_id": str,
    "structured_outputs": dict,
    "traceparent": str,
}
EMBED_OPTIONS: dict[str, type] = {
    "dimensions": int,
    "normalize": bool,
    "truncate_prompt_tokens": int,
}

SAMPLING_FIELDS = SamplingParams.__struct_fields__

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class EmbeddingOutput:
    """One prompt and its float32 embedding. `prompt` is None if token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: np.ndarray
    num_cached_tokens: int


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its choices; the fields are named as in `pdserve.engine.llm.RequestOutput`.

    `prompt` is None if token ids were given. `timeline` shows where time and bytes went, if the
    call asked for it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Choice]
    prompt_logprobs: list[TokenLogprob | None] | None
    num_cached_tokens: int
    timeline: PromptTimeline | None = None
    finished: bool = True


def connect(address: str | None = None, app_name: str = APP_NAME) -> "Client":
    """Connects to the application `app_name` on the Ray cluster at `address`.

    If `address` is None, RAY_ADDRESS counts, or else the cluster on this machine. A connection that
    this process already has is used. Raises ConnectionError (no such cluster, or one that refuses
    this process) and ValueError (no such application).
    """
    if not ray.is_initialized():
        try:
            ray.init(address=address or "auto", namespace="serve", log_to_driver=False)
        except ConnectionError as error:
            raise ConnectionError(f"{error}{_cure(str(error))}") from error
    try:
        serve.get_app_handle(app_name)
    except RayServeException as error:
        raise ValueError(
            f"app_name: this cluster serves no application {app_name!r}; see `serve status`"
        ) from error
    return Client(app_name)


def _cure(message: str) -> str:
    """Says what Ray's message leaves out: that a cluster may have refused this process."""
    if not message.startswith("Failed to connect"):
        return ""
    mode = os.environ.get("RAY_AUTH_MODE")
    here = "not set" if mode is None else repr(mode)
    return (
        f"; RAY_AUTH_MODE is {here} here: if Ray says InvalidAuthToken, set RAY_AUTH_MODE and the "
        "token as where the cluster was started"
    )


class Client(OrdersClient):
    """A thread-safe client of one cluster.

    Methods come in pairs: plain ones block, those with an `a` are for asyncio. `close` ends the
    client's thread, and so does leaving a `with` block.

    Without sampling_params, the model's defaults (its generation_config.json) are used, and those
    of SamplingParams where the model has none. Fields of SamplingParams may also be keywords
    (max_tokens=64, temperature=0.2): they override the defaults, or the fields of sampling_params
    where both are given. All methods take these keywords:

    - `priority`: an int; lower runs first.
    - `session_id`: prompts of one session go to one worker unless something speaks against it.
    - `cache_salt`: prefix-cache blocks are shared only between equal salts.
    - `structured_outputs`: the form of the answer, as a dict such as {"json": schema}, {"regex":
      "..."} or {"choice": ["yes", "no"]}.
    - `timeline=True`: fills RequestOutput.timeline; only for whole answers.

    All methods raise ValueError when the request is wrong, and ClusterError when the cluster cannot
    answer it.
    """

    def __init__(self, app_name: str = APP_NAME) -> None:
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._thread = LoopThread("pdserve-client", CLOSED)
        try:
            self._handle: DeploymentHandle = self._thread.do(
                _router_handle(app_name, method_name="generate", stream=True)
            )
            self._orders: Any = self._thread.do(_router_handle(app_name, method_name="admin"))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancels what is still running and ends the client's thread.

        Later calls raise RuntimeError. Closing twice is allowed.
        """
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Returns whole answers, one per prompt, in order. A prompt is a text or a list of token
        ids."""
        return self._thread.do(self._generate(prompts, sampling_params, options))

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Does what `generate` does, for asyncio. Cancelling it cancels the requests."""
        return await self._thread.result_of(self._generate(prompts, sampling_params, options))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> Iterator[OutputChunk]:
        """Yields new text and tokens of each choice as they come. Closing the iterator cancels the
        request."""
        return self._thread.items_of(self._stream(_call(prompt, sampling_params, True, options)))

    def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[OutputChunk, None]:
        """Does what `stream` does, for asyncio."""
        call = _call(prompt, sampling_params, True, options)
        return self._thread.items_for_loop(self._stream(call))

    def embed(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[EmbeddingOutput]:
        """Returns one embedding per prompt, in order; the model must embed
        (docs/use/embeddings.md).

        Keywords are dimensions, normalize and truncate_prompt_tokens, as in `LLM.embed`, and
        priority, cache_salt, session_id and traceparent.
        """
        return self._thread.do(self._embed(prompts, options))

    async def aembed(
        self, prompts: Prompt | Sequence[Prompt], **options: Any
    ) -> list[EmbeddingOutput]:
        """Does what `embed` does, for asyncio. Cancelling it cancels the requests."""
        return await self._thread.result_of(self._embed(prompts, options))

    def chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """Returns the next answer of a conversation; `messages` are in OpenAI's form.

        Its `outputs` have text (the content), `reasoning` and `tool_calls`. Further keywords mean
        what they mean in /v1/chat/completions: tools, tool_choice, parallel_tool_calls,
        chat_template_kwargs, add_generation_prompt, continue_final_message, documents,
        reasoning_effort and thinking_token_budget.
        """
        return self._thread.do(self._whole(_chat_call(messages, sampling_params, False, options)))

    async def achat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """Does what `chat` does, for asyncio. Cancelling it cancels the request."""
        call = _chat_call(messages, sampling_params, False, options)
        return await self._thread.result_of(self._whole(call))

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **options: Any
    ) -> Iterator[OutputChunk]:
        """Yields the answer of `chat` as it comes; each chunk has `all_pieces()` of one choice.

        Closing the iterator cancels the request.
        """
        call = _chat_call(messages, sampling_params, True, options)
        return self._thread.items_of(self._stream(call))

    def astream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[OutputChunk, None]:
        """Does what `stream_chat` does, for asyncio."""
        call = _chat_call(messages, sampling_params, True, options)
        return self._thread.items_for_loop(self._stream(call))

    async def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None,
        options: dict[str, Any],
    ) -> list[RequestOutput]:
        batch = _as_batch(prompts)
        calls = [_call(prompt, sampling, False, options) for prompt in batch]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._whole(call)) for call in calls]
        return [task.result() for task in tasks]

    async def _embed(
        self, prompts: Prompt | Sequence[Prompt], options: dict[str, Any]
    ) -> list[EmbeddingOutput]:
        calls = [_embed_call(prompt, options) for prompt in _as_batch(prompts)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._embedding(call)) for call in calls]
        return [task.result() for task in tasks]

    async def _embedding(self, call: GenerateCall) -> EmbeddingOutput:
        async with self._slots, aclosing(self._answers(call)) as answers:
            async for answer in answers:
                assert isinstance(answer, EmbeddedWhole)
                return EmbeddingOutput(
                    answer.request_id,
                    call.prompt if isinstance(call.prompt, str) else None,
                    answer.prompt_token_ids,
                    np.frombuffer(answer.values, dtype="<f4"),
                    answer.num_cached_tokens,
                )
        raise ClusterError("the router gave no answer")

    async def _whole(self, call: GenerateCall) -> RequestOutput:
        async with self._slots, aclosing(self._answers(call)) as answers:
            async for answer in answers:
                assert isinstance(answer, Whole)
                return RequestOutput(
                    answer.request_id,
                    call.prompt if call.turn is None and isinstance(call.prompt, str) else None,
                    answer.prompt_token_ids,
                    answer.choices,
                    answer.prompt_logprobs,
                    answer.num_cached_tokens,
                    answer.timeline,
                )
        raise ClusterError("the router gave no answer")

    async def _stream(self, call: GenerateCall) -> AsyncGenerator[OutputChunk, None]:
        async with aclosing(self._answers(call)) as answers:
            async for answer in answers:
                assert isinstance(answer, OutputChunks)
                for chunk in answer.chunks:
                    yield chunk

    async def _answers(self, call: GenerateCall) -> AsyncGenerator[Answer, None]:
        """Yields OutputChunks or one Whole. Raises what the router refused."""
        response: Any = self._handle.remote(encode(call))
        joiner = Joiner()
        try:
            async for piece in response:
                message = joiner.feed(piece)
                if message is not None:
                    answer = decode_answer(message)
                    check(answer)
                    yield answer
        except (RayError, RayServeException) as error:
            raise ClusterError(f"the router is gone: {error}") from error
        except (asyncio.CancelledError, GeneratorExit):
            response.cancel()
            raise


async def _router_handle(app_name: str, **options: Any) -> DeploymentHandle:
    """Makes a handle on the client's own loop.

    With Serve's throughput flags a handle belongs to the loop that first uses it.
    """
    handle = serve.get_deployment_handle(ROUTER, app_name)
    return handle.options(_by_reference=False, **options)


def _call(
    prompt: Prompt, sampling: SamplingParams | None, stream: bool, options: dict[str, Any]
) -> GenerateCall:
    known = OPTIONS if stream else OPTIONS | {"timeline": bool}
    fields = {name: options[name] for name in SAMPLING_FIELDS if name in options}
    options = {name: value for name, value in options.items() if name not in fields}
    for name, value in options.items():
        if name not in known:
            names = ", ".join((*known, *SAMPLING_FIELDS))
            raise ValueError(f"unknown keyword {name!r}: known are {names}")
        if type(value) is not known[name]:  # isinstance would take True as a priority
            raise ValueError(f"{name} must be of type {known[name].__name__}, not {value!r}")
    if sampling is not None and fields:
        sampling = msgspec.structs.replace(sampling, **fields)
        fields = {}
    return GenerateCall(
        prompt=prompt if isinstance(prompt, str) else list(prompt),
        sampling=sampling,
        stream=stream,
        sampling_fields=fields,
        **options,
    )


def _chat_call(
    messages: Messages,
    sampling: SamplingParams | None,
    stream: bool,
    options: dict[str, Any],
) -> GenerateCall:
    turn = make_turn(messages, **{k: v for k, v in options.items() if k in TURN_OPTIONS})
    others = {name: value for name, value in options.items() if name not in TURN_OPTIONS}
    return msgspec.structs.replace(_call("", sampling, stream, others), turn=turn)


def _embed_call(prompt: Prompt, options: dict[str, Any]) -> GenerateCall:
    own = {name: options[name] for name in EMBED_OPTIONS if name in options}
    others = {name: value for name, value in options.items() if name not in own}
    for name, value in own.items():
        if value is not None and type(value) is not EMBED_OPTIONS[name]:
            wanted = EMBED_OPTIONS[name].__name__
            raise ValueError(f"{name} must be of type {wanted}, not {value!r}")
    for name in others:
        if name not in OPTIONS or name == "structured_outputs":
            names = ", ".join((*EMBED_OPTIONS, *OPTIONS)).replace(", structured_outputs", "")
            raise ValueError(f"unknown keyword {name!r}: known are {names}")
    call = _call(prompt, None, False, others)
    return msgspec.structs.replace(call, embed=EmbedFields(**own))


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns a list of prompts. A single prompt is a text, or a list whose items are token ids."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
