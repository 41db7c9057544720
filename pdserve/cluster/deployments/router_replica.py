"""The Serve ingress: one router process with the OpenAI routes for HTTP, and one streaming method
for the Python client.

It puts the parts of `router` together and keeps its fleet equal to the running workers. It handles
no requests itself, and its process imports no torch. `cluster.app` makes it; its own HTTP server or
Serve's proxies, and `cluster.client`, call it.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from itertools import islice
from typing import Any

import msgspec
from ray import serve
from ray.serve.context import _get_internal_replica_context
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from pdserve.background.garbage import GarbageCollector
from pdserve.cluster.deployments import hub_token
from pdserve.cluster.deployments.http_server import Address, HttpServer
from pdserve.cluster.deployments.logs import log_as_serve_does
from pdserve.cluster.deployments.metrics_bridge import Exposed, MetricsBridge
from pdserve.cluster.links.framing import cut
from pdserve.cluster.links.handle_api import (
    Answer,
    ChangeRole,
    Choice,
    Done,
    EmbeddedWhole,
    EmbedFields,
    GenerateCall,
    Look,
    LookAtExperts,
    Order,
    OutputChunks,
    Refused,
    Scale,
    Whole,
    decode_call,
    decode_order,
    encode,
)
from pdserve.cluster.links.serve_links import MembershipWatcher
from pdserve.cluster.scaling.autoscaler import Autoscaler
from pdserve.cluster.scaling.balancer import Balancer
from pdserve.cluster.scaling.decode_guard import DecodeGuard
from pdserve.cluster.scaling.replica_counts import ServeReplicaCounts
from pdserve.configs.embedding import EmbeddingModel
from pdserve.configs.schema import ClusterConfig
from pdserve.models.checkpoint import resolve_folder, tokenizer_folder
from pdserve.models.generation_defaults import described, read_generation_defaults
from pdserve.models.task import read_embedding
from pdserve.protocol.embedding import embedding_of
from pdserve.protocol.events import TokenLogprob
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.admin import Admin
from pdserve.router.errors import ApiError, grammar_error, value_error
from pdserve.router.expert_load import gather_load
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.held_bytes import size_of
from pdserve.router.http.access.hosts import is_loopback
from pdserve.router.http.app import build_app
from pdserve.router.http.openai.completions import PACED_POSITIONS
from pdserve.router.request.generation import Generation
from pdserve.router.request.service import Service
from pdserve.router.request.traces.call_trace import CallTrace, ending
from pdserve.router.turns import admit_turn
from pdserve.text.grammars.structured import StructuredRequest, structured_outputs
from pdserve.text.tokenizer import Tokenizer
from pdserve.turns.model_turns import ModelTurns

# Time that a starting router waits for a worker. After it, the router answers 503, which tells a
# client more than a refused connection.
FIRST_WORKER_S = 10.0

logger = logging.getLogger("ray.serve")
log_as_serve_does()


class RouterReplica:
    """One router replica.

    `config`: configuration of the whole cluster.
    `address`: where this process itself serves HTTP; None leaves that to Serve's proxies.
    `workers`: a handle of each worker deployment.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ClusterConfig, address: Address | None, *workers: DeploymentHandle
    ) -> None:
        if (replica := _get_internal_replica_context()) is not None:
            await asyncio.to_thread(hub_token.take, replica.app_name)
        tokenizer, defaults, embedding = await asyncio.gather(
            asyncio.to_thread(load_tokenizer, config),
            asyncio.to_thread(load_defaults, config),
            asyncio.to_thread(load_embedding, config),
        )
        router = config.router
        self._fleet = Fleet(
            router.worker_silence_s,
            drain_s=router.drain_s,
            attempt_deadline_s=router.attempt_deadline_s,
        )
        self._drain_s = router.drain_s
        name = config.model.served_name
        self._service = Service(
            self._fleet,
            tokenizer,
            config.router,
            name,
            slo=config.slo,
            logs=config.logging,
            sampling_defaults=defaults,
            turns=ModelTurns(
                tokenizer,
                config.model.tool_format,
                config.model.reasoning_format,
                config.model.tool_enforcement,
            ),
            traces=config.traces,
            embedding=embedding,
            aliases=config.model.all_names[1:],
        )
        self._watcher = MembershipWatcher(self._fleet, list(workers))
        self._watcher.start()
        counts = ServeReplicaCounts(config)
        gain = self._service.split_gain
        self._admin = Admin(self._fleet, counts, gain)
        self._autoscaler = Autoscaler(self._fleet, counts, config, is_first)
        self._decode_guard = DecodeGuard(self._fleet, is_first)
        self._balancer = Balancer(
            self._fleet, gain, config, is_first, lambda: self._autoscaler.is_settled
        )
        own = address is not None
        # With a Serve proxy in between, every client seems to be on the proxy's machine.
        admin = self._admin if config.router.admin_http and own else None
        self._app = build_app(
            self._fleet,
            tokenizer,
            config.router,
            name,
            self._service,
            admin,
            names_requests=own,
            on_loopback=address is not None and is_loopback(address.host),
            model_root=config.model.path,
        )
        self._bridge = MetricsBridge(self._metrics)
        self._http = (
            HttpServer(self._app, address, config.router.client_timeout_s)
            if address is not None
            else None
        )
        # The kernel gives this router connections as soon as it listens on the shared port. Serve's
        # proxies do so when this constructor ends.
        if not await self._fleet.until_decode_worker(FIRST_WORKER_S):
            logger.warning(
                "no decode worker after %g s: requests get 503 until one joins", FIRST_WORKER_S
            )
        self._garbage = GarbageCollector()
        self._garbage.start()
        if self._http is not None:
            self._http.start()
        self._autoscaler.start()
        self._decode_guard.start()
        self._balancer.start()

    def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Serve after the constructor."""
        return self._app

    async def check_health(self) -> None:
        """Serve calls this, and replaces a replica that fails it a few times."""
        if self._http is not None and not self._http.running:
            raise RuntimeError("the HTTP server has ended")

    async def generate(self, data: bytes) -> AsyncGenerator[bytes, None]:
        """Takes an encoded GenerateCall and yields encoded Answers in pieces
        (`cluster.links.framing`).

        Closing it cancels the request.
        """
        async with aclosing(self._answers(decode_call(data))) as answers:
            async for answer in answers:
                for piece in cut(encode(answer)):
                    yield piece

    def _metrics(self) -> Exposed:
        return Exposed(
            self._service.metrics.families(self._fleet), {"router": self._fleet.router_id}
        )

    async def admin(self, data: bytes) -> bytes:
        """Takes an encoded Order and returns an encoded Outcome. Whoever can call a handle is an
        operator."""
        try:
            return encode(await self._done(decode_order(data)))
        except ApiError as error:
            return encode(Refused(status=error.status, message=error.message))

    async def _done(self, order: Order) -> Done:
        match order:
            case ChangeRole():
                return Done(
                    worker=await self._admin.set_role(order.worker, order.role, order.force)
                )
            case Scale():
                return Done(cluster=await self._admin.scale(order.targets, order.force))
            case Look():
                return Done(cluster=await self._admin.report())
            case LookAtExperts():
                return Done(experts=await gather_load(self._fleet, order.role))

    async def _answers(self, call: GenerateCall) -> AsyncGenerator[Answer, None]:
        request_id = f"gen-{uuid.uuid4().hex}"
        trace = self._trace(call, request_id)
        try:
            with ending(trace):
                generation = await self._admitted(call, request_id, trace)
            with closing(generation):
                if call.embed is not None:
                    yield await self._embedded(generation, call.embed)
                elif call.stream:
                    async with aclosing(generation.stream()) as batches:
                        async for chunks in batches:
                            yield OutputChunks(chunks)
                else:
                    yield await _whole(generation, call.timeline)
                generation.served()
        except ApiError as error:
            if not error.logged:
                self._service.request_log.refused(request_id, error)
            yield Refused(status=error.status, message=error.message)

    async def _constrained(
        self, call: GenerateCall, sampling: SamplingParams | None
    ) -> SamplingParams:
        """Returns the sampling parameters with the grammar that the call asks for."""
        rules = await self._service.rules(_form(call))
        try:
            return (sampling or self._service.default_sampling).with_rules(rules.settings)
        except ValueError as error:
            raise grammar_error(error) from error

    def _trace(self, call: GenerateCall, request_id: str) -> CallTrace | None:
        tracer = self._service.tracer
        if tracer is None:
            return None
        operation = "text_completion" if call.turn is None else "chat"
        operation = operation if call.embed is None else "embeddings"
        parent = call.traceparent or None
        return tracer.begin(operation, request_id, time.perf_counter(), parent, None)

    async def _admitted(
        self, call: GenerateCall, request_id: str, trace: CallTrace | None = None
    ) -> Generation:
        try:
            sampling, open_ended = call.resolved(self._service.sampling_defaults)
        except ValueError as error:
            raise value_error(error, SamplingParams.__struct_fields__) from error
        options: dict[str, Any] = {
            "trace": trace,
            "request_id": request_id,
            "priority": call.priority,
            "cache_salt": call.cache_salt,
            "session_id": call.session_id,
            "open_ended": open_ended,
        }
        if call.embed is not None:
            del options["open_ended"]
            return await self._service.admit_embedding(
                [call.prompt],
                dimensions=call.embed.dimensions,
                truncate_prompt_tokens=call.embed.truncate_prompt_tokens,
                **options,
            )
        if call.turn is not None:
            return await admit_turn(self._service, call.turn, sampling, _form(call), **options)
        if call.structured_outputs is not None:
            sampling = await self._constrained(call, sampling)
        return await self._service.admit([call.prompt], sampling, **options)

    async def _end_answers(self, http: HttpServer) -> None:
        """Gives unfinished answers drain_s to end, then ends them with an error."""
        closing = asyncio.ensure_future(http.close())
        done, _ = await asyncio.wait([closing], timeout=self._drain_s)
        if not done:
            logger.warning(
                "answers still run after router.drain_s (%g s): they fail now", self._drain_s
            )
            self._watcher.stop()
            await self._fleet.close()
        await closing

    async def _embedded(self, generation: Generation, call: EmbedFields) -> EmbeddedWhole:
        await generation.collect()
        assert self._service.embedding is not None, "only a model that embeds admits the call"
        row = generation.embedded_row(0)
        vector = embedding_of(row, self._service.embedding, call.dimensions, call.normalize)
        return EmbeddedWhole(
            request_id=generation.request_id,
            prompt_token_ids=list(generation.prompts[0]),
            values=vector.astype("<f4").tobytes(),
            num_cached_tokens=generation.num_cached_tokens,
        )

    async def __del__(self) -> None:
        """Serve awaits this at a graceful end, after the last answer that went through Serve."""
        if self._http is not None:
            await self._end_answers(self._http)
        self._bridge.close()
        self._garbage.stop()
        self._autoscaler.stop()
        self._decode_guard.stop()
        self._balancer.stop()
        self._watcher.stop()
        await self._fleet.close()
        if self._service.tracer is not None:
            await asyncio.to_thread(self._service.tracer.close)


def is_first() -> bool:
    """True if this is the first router. Serve numbers replicas, and reuses the number of a dead
    one."""
    replica_rank = serve.get_replica_context().rank  # Serve's rank, not tensor parallelism's
    return replica_rank is not None and replica_rank.rank == 0


def load_tokenizer(config: ClusterConfig) -> Tokenizer:
    model = config.model
    return Tokenizer.load(tokenizer_folder(model), model.template())


def load_embedding(config: ClusterConfig) -> EmbeddingModel | None:
    """Returns how the model embeds, or None if it generates."""
    folder = resolve_folder(config.model.resolved_path, "dummy", config.model.revision)
    return read_embedding(folder, config.model.task)


def load_defaults(config: ClusterConfig) -> dict[str, Any]:
    """Returns the model's sampling defaults, and logs them."""
    folder = resolve_folder(config.model.resolved_path, "dummy", config.model.revision)
    defaults = read_generation_defaults(folder, config.model.generation_config)
    if defaults:
        logger.info(
            "default sampling parameters from generation_config.json: %s", described(defaults)
        )
    return defaults


def _form(call: GenerateCall) -> StructuredRequest | None:
    """Returns the form that the call's answer must have; None means any.

    Raises ApiError (400) when it cannot be read.
    """
    if call.structured_outputs is None:
        return None
    try:
        return structured_outputs(call.structured_outputs)
    except ValueError as error:
        raise grammar_error(error) from error


async def _whole(generation: Generation, shows_timeline: bool) -> Whole:
    choices = await generation.collect()
    prompt_logprobs = await _prompt_logprobs(generation)
    return Whole(
        request_id=generation.request_id,
        prompt_token_ids=list(generation.prompts[0]),
        choices=[msgspec.convert(choice, Choice, from_attributes=True) for choice in choices],
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=generation.num_cached_tokens,
        timeline=next(generation.timelines()) if shows_timeline else None,
    )


async def _prompt_logprobs(generation: Generation) -> list[TokenLogprob | None] | None:
    positions = generation.prompt_logprobs(0)
    if positions is None:
        return None
    made: list[TokenLogprob | None] = []
    with generation.pacer.pace() as pace:
        while part := list(islice(positions, PACED_POSITIONS)):
            made += part
            generation.hold(size_of(0, part))
            if pace.is_due:
                await pace.rest()
    return made
