"""Two workers in this thread, joined by the in-process connector: what the worker and phase tests
drive.

`Pair` plays the router by hand: submits, turns both loops, gathers events, so a test can stop at
any point between two turns.
"""

import itertools
import random
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from support.local_pool_backend import LocalPoolServer, local_pool
from support.local_transfer import LocalTransferConfig
from support.shares import ONE_RANK, Degrees, dims_of, num_ranks
from support.waiting import until

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.configs.transfer import TransferConfig
from pdserve.decode.decode_phase import DecodePhase
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine
from pdserve.engine.grammars.builder import GrammarBuilder
from pdserve.engine.llm import LLM
from pdserve.kvtransfer.build import build_connector, build_rank
from pdserve.kvtransfer.connector import KVCacheMemory, KVPool, Wake
from pdserve.kvtransfer.p2p.remote_rank import RemoteRank, serve_rank
from pdserve.kvtransfer.pool.remote_pool import RanksPool, RemotePool, serve_pool
from pdserve.kvtransfer.remote import Service
from pdserve.kvtransfer.transport.local_agent import LocalAgent, LocalFaults
from pdserve.parallel.rank_link import RankLink
from pdserve.prefill.prefill_phase import PrefillPhase
from pdserve.protocol.codec import decode_batch, decode_command, encode
from pdserve.protocol.commands import (
    Cancel,
    Command,
    ConnectPeer,
    RouterLost,
    Start,
    Submit,
    Subscribe,
)
from pdserve.protocol.events import Arrived, Delta, Event, EventBatch, Handoff, PeerStatus
from pdserve.protocol.request_key import Phase, RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.worker.fetching.fetch_phase import FetchPhase
from pdserve.worker.hosts.pool_servers import shard_of
from pdserve.worker.loop import WorkerLoop
from pdserve.worker.metrics import WorkerMetrics

ROUTER = "router"
SESSION = 7
WAIT_S = 60.0
_incarnations = itertools.count(1)


class Worker:
    """A WorkerLoop whose batches are kept; every message passes through its encoded form.

    `shared` is the KV pool's server. `degrees` are those of the ranks that share the KV cache, all
    in this process; the loop reaches all but the first over sockets.
    """

    def __init__(
        self,
        model: Path,
        name: str,
        role: str,
        transfer: TransferConfig,
        shared: LocalPoolServer | None = None,
        degrees: Degrees = ONE_RANK,
        grammars: GrammarBuilder | None = None,
        **engine: object,
    ) -> None:
        self.degrees = degrees
        self.num_ranks = num_ranks(degrees)
        self.engine = self.make_engine(model, **engine)
        self._services: list[Service[Any]] = []
        memory = self.memory(0)
        metrics = WorkerMetrics(self.engine)
        incarnation = next(_incarnations)
        sender, receiver = build_connector(
            transfer, memory, name, incarnation, lambda: None, registry=metrics.registry
        )
        self.sender = sender
        self.receiver = receiver
        self.rank_receivers = list(receiver.local_ranks)
        self._add_ranks(transfer, name, incarnation)
        self.pool: Any = self._make_pool(shared, transfer) if shared is not None else None
        self.loop = WorkerLoop(
            self.engine,
            metrics,
            transfer,
            role,
            name,
            incarnation,
            sender,
            receiver,
            self._sent,
            self.pool,
            "pool",
            grammars,
        )
        self.events: list[Event] = []
        self.by_session: dict[str, list[Event]] = defaultdict(list)
        self.command(Subscribe(router_id=ROUTER, session=SESSION))
        self.loop.turn()

    def make_engine(self, model: Path, **engine: Any) -> Engine:
        """Makes an engine; quantization among its settings is passed to the model."""
        config = ModelConfig(path=str(model), quantization=engine.pop("quantization", None))
        return build_engine(config, EngineConfig(**engine))

    def _add_ranks(self, transfer: TransferConfig, name: str, incarnation: int) -> None:
        memories = []
        remotes = []
        for rank in range(1, self.num_ranks):
            near, far = linked()
            make = partial(build_rank, transfer, self.memory(rank), name, incarnation, rank)
            service = serve_rank(far, make)
            remote = RemoteRank(near, lambda: None, dims_of(rank, self.degrees).home)
            memories.append(remote.memory(WAIT_S))
            remotes.append(remote)
            self._services.append(service)
            self.rank_receivers.append(service.served)
        self.sender.add_ranks(memories)
        self.receiver.add_ranks(remotes)

    def _make_pool(self, shared: LocalPoolServer, transfer: TransferConfig) -> KVPool:
        def of(rank: int, wake: Wake) -> KVPool:
            shard = shard_of(dims_of(rank, self.degrees))
            return local_pool(shared, transfer.pool, self.memory(rank), wake, shard=shard)

        own = of(0, lambda: None)
        others = []
        for rank in range(1, self.num_ranks):
            near, far = linked()
            self._services.append(serve_pool(far, partial(of, rank)))
            others.append(RemotePool(near, lambda: None, dims_of(rank, self.degrees).home))
        return RanksPool(own, others) if others else own

    def memory(self, rank: int) -> KVCacheMemory:
        """Returns the memory of a rank."""
        assert rank == 0, "a real engine has one rank here"
        engine = self.engine
        return KVCacheMemory(
            engine.kv_cache,
            engine.homes.generations,
            engine.model_fingerprint,
            engine.rows_digest,
            unrounded=engine.unrounded,
        )

    def _sent(self, target: str, batch: EventBatch) -> None:
        events = decode_batch(encode(batch)).events
        self.by_session[target] += events
        self.events += events

    def command(self, command: Command) -> None:
        self.loop.handle(decode_command(encode(command)))

    def until(self, done: Callable[[], object]) -> None:
        """Turn this loop alone until `done()`."""
        until(done, doing=self.loop.turn, pause_s=0.0005)

    @property
    def faults(self) -> LocalFaults:
        """Tells the first rank's in-process transport what to do wrong."""
        return self.all_faults[0]

    @property
    def all_faults(self) -> list[LocalFaults]:
        """Tells each rank's transport what to do wrong."""
        agents = [receiver.agent for receiver in self.rank_receivers]
        return [agent.faults for agent in agents if isinstance(agent, LocalAgent)]

    @property
    def prefill(self) -> PrefillPhase:
        assert self.loop.prefill is not None
        return self.loop.prefill

    @property
    def decode(self) -> DecodePhase:
        assert self.loop.decode is not None
        return self.loop.decode

    @property
    def fetch(self) -> FetchPhase:
        assert self.loop.fetch is not None
        return self.loop.fetch

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.receiver.close()
        for service in self._services:
            service.close()
        self.sender.close()


def linked() -> tuple[RankLink, RankLink]:
    """Both ends of a link between two ranks."""
    near, far = socket.socketpair()
    return RankLink(near), RankLink(far)


class Pair:
    """P and D over one model, connected. Leases and pulls outlast the limits of this file's waits,
    unless the test says otherwise: what waits in vain is not saved by them."""

    def __init__(
        self,
        model: Path,
        *,
        p: dict | None = None,
        d: dict | None = None,
        shared: LocalPoolServer | None = None,
        **transfer: object,
    ) -> None:
        config = LocalTransferConfig(**{"lease_s": 300.0, "pull_deadline_s": 300.0, **transfer})
        common = {"device": "cpu", "num_kv_blocks": 128, "shared": shared}
        suffix = next(_incarnations)
        self.p = Worker(model, f"P{suffix}", "prefill", config, **{**common, **(p or {})})
        try:
            self.d = Worker(model, f"D{suffix}", "decode", config, **{**common, **(d or {})})
        except ValueError:
            self.p.close()
            raise
        self.d.command(ConnectPeer(meta=self.p.sender.meta()))
        self.until(lambda: any(isinstance(e, PeerStatus) and e.connected for e in self.d.events))
        self._ids = itertools.count()

    def close(self) -> None:
        self.p.close()
        self.d.close()

    def turn(self) -> None:
        self.p.loop.turn()
        self.d.loop.turn()

    def until(self, done: Callable[[], object]) -> None:
        """Turn both loops until `done()`."""
        until(done, doing=self.turn, pause_s=0.0005)

    def turn_for(self, seconds: float) -> None:
        """Turn both loops for so long: nothing that could be awaited is to happen."""
        limit = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > limit)

    def prefill(
        self, prompt: list[int], sampling: SamplingParams
    ) -> tuple[Handoff | None, dict[int, list[int]]]:
        """Run the prefill leg: the hand-off (None when every choice is finished) and the first
        tokens."""
        key = RequestKey(ROUTER, SESSION, f"r{next(self._ids)}", 1)
        self.p.command(submit(key, "prefill", prompt, sampling))
        firsts: list[Delta] = []

        def done() -> bool:
            firsts[:] = [e for e in of(self.p, key) if isinstance(e, Delta)]
            ended = len(firsts) == sampling.n and all(f.finish_reason for f in firsts)
            return ended or any(isinstance(e, Handoff) for e in of(self.p, key))

        self.until(done)
        handoff = next((e for e in of(self.p, key) if isinstance(e, Handoff)), None)
        return handoff, {first.choice: list(first.token_ids) for first in firsts}

    def decode(
        self, handoff: Handoff | None, prompt: list[int], sampling: SamplingParams, forced: dict
    ) -> RequestKey:
        """Submit the decode leg of the choices in `forced`."""
        request_id = handoff.request_id if handoff else f"r{next(self._ids)}"
        key = RequestKey(ROUTER, SESSION, request_id, 2)
        starts = tuple(Start(choice, tuple(tokens)) for choice, tokens in forced.items())
        ticket = handoff.ticket if handoff else None
        self.d.command(submit(key, "decode", prompt, sampling, starts=starts, ticket=ticket))
        return key

    def finish(self, key: RequestKey, num_choices: int = 1) -> dict[int, list[int]]:
        """Turn until the decode leg ends; its tokens by choice."""
        self.until(lambda: len([d for d in deltas(self.d, key) if d.finish_reason]) == num_choices)
        return tokens_of(self.d, key)

    def split(self, prompt: list[int], sampling: SamplingParams) -> dict[int, list[int]]:
        """Runs both legs. Returns all tokens by choice."""
        handoff, first = self.prefill(prompt, sampling)
        if handoff is None:
            return first
        open_choices = {
            e.choice: list(e.token_ids)
            for e in self.p.events
            if isinstance(e, Delta)
            and e.request_id == handoff.request_id
            and e.finish_reason is None
        }
        key = self.decode(handoff, prompt, sampling, open_choices)
        rest = self.finish(key, len(open_choices))
        return {choice: first[choice] + rest.get(choice, []) for choice in first}

    def assert_empty(self) -> None:
        """Everything is free on both sides, soon."""
        self.until(lambda: not any(owned(w) for w in (self.p, self.d)))
        for worker in (self.p, self.d):
            worker.loop.check_integrity()

    def lose_router(self) -> None:
        for worker in (self.p, self.d):
            worker.command(RouterLost(router_id=ROUTER, session=SESSION))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(256) for _ in range(length)]


def expected(llm: LLM, prompt: list[int], sampling: SamplingParams) -> dict[int, list[int]]:
    """Returns the answer of one engine alone: tokens by choice."""
    [output] = llm.generate([prompt], sampling, use_tqdm=False)
    return {choice.index: choice.token_ids for choice in output.outputs}


def assert_split_is_whole(
    pair: Pair, llm: LLM, samplings: Iterable[SamplingParams], lengths: Iterable[int]
) -> None:
    """Prompts of these lengths get the tokens of one engine, by pulls, and leave nothing."""
    for sampling, length in itertools.product(samplings, lengths):
        prompt = prompt_of(length, seed=sampling.n)
        assert pair.split(prompt, sampling) == expected(llm, prompt, sampling)
    arrived = [event for event in pair.d.events if isinstance(event, Arrived)]
    assert {event.source for event in arrived} == {"p2p"}
    pair.assert_empty()


def submit(
    key: RequestKey, phase: Phase, prompt: list[int], sampling: SamplingParams, **more: Any
) -> Submit:
    more.setdefault("starts", tuple(Start(choice) for choice in range(sampling.n)))
    return Submit(key=key, phase=phase, prompt_token_ids=tuple(prompt), sampling=sampling, **more)


def cancel(worker: Worker, key: RequestKey, choices: tuple[int, ...] | None = None) -> None:
    worker.command(Cancel(key=key, choices=choices))


def owned(worker: Worker) -> int:
    blocks = [home.blocks for home in worker.engine.homes]
    return sum(each.num_owned + each.num_quarantined for each in blocks)


def of(worker: Worker, key: RequestKey) -> list[Event]:
    named = (key.request_id, key.attempt)
    return [
        e
        for e in worker.events
        if (getattr(e, "request_id", None), getattr(e, "attempt", None)) == named
    ]


def deltas(worker: Worker, key: RequestKey) -> list[Delta]:
    return [e for e in of(worker, key) if isinstance(e, Delta)]


def tokens_of(worker: Worker, key: RequestKey) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = defaultdict(list)
    for delta in deltas(worker, key):
        tokens[delta.choice] += delta.token_ids
    return dict(tokens)
