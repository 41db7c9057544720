"""An in-process worker behind a WorkerLink: deterministic tokens, tickets, cancels, and faults a
router must survive.

A token depends on prompt, seed, choice, position and all tokens before it, so a wrong forced token
changes all that follow.
"""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from pdserve.protocol.codec import PROTOCOL_VERSION, encode
from pdserve.protocol.commands import (
    AskExpertLoad,
    Cancel,
    Command,
    ConnectPeer,
    DisconnectPeer,
    Prepare,
    SetRole,
    Submit,
)
from pdserve.protocol.events import (
    Arrived,
    CacheState,
    Delta,
    Embedded,
    Event,
    EventBatch,
    ExpertCounts,
    Failed,
    Handoff,
    Hello,
    LegsWaiting,
    PaceState,
    PeerStatus,
    PromptScored,
    Snapshot,
    TokenLogprob,
)
from pdserve.protocol.handoff import KVCacheMeta, RankMemory, Ticket
from pdserve.protocol.metric_families import MetricFamily, Sample
from pdserve.protocol.request_key import FinishReason, RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.fleet.link import WorkerLost

VOCAB = 403
EOS = 2
FIRST_PLAIN = 3


def next_token(
    prompt: tuple[int, ...], sampling: SamplingParams, choice: int, tokens: list[int]
) -> int:
    drawn = zlib.crc32(repr((prompt, sampling.seed, choice, tokens)).encode())
    if drawn % 29 == 0 and not sampling.ignore_eos and len(tokens) >= sampling.min_tokens:
        return EOS
    return FIRST_PLAIN + (drawn >> 8) % (VOCAB - FIRST_PLAIN)


def finish_of(
    sampling: SamplingParams, tokens: list[int]
) -> tuple[FinishReason | None, int | None]:
    if tokens and len(tokens) > sampling.min_tokens:
        if tokens[-1] in sampling.stop_token_ids:
            return "stop", tokens[-1]
        if tokens[-1] == EOS and not sampling.ignore_eos:
            return "stop", None
    return ("length", None) if len(tokens) == sampling.max_tokens else (None, None)


def expected_tokens(
    prompt: tuple[int, ...], sampling: SamplingParams, choice: int
) -> tuple[list[int], str]:
    tokens: list[int] = []
    while True:
        tokens.append(next_token(prompt, sampling, choice, tokens))
        reason, _ = finish_of(sampling, tokens)
        if reason is not None:
            return tokens, reason


def row_of(prompt: tuple[int, ...]) -> np.ndarray:
    """The hidden row of a prompt to embed, float32 `[8]`."""
    drawn = np.random.default_rng(zlib.crc32(repr(prompt).encode()))
    return drawn.normal(size=8).astype("<f4")


def logprob_of(token: int, count: int) -> TokenLogprob:
    top = tuple((3 + (token + i) % 300, -1.0 - i) for i in range(count))
    return TokenLogprob(token, -0.5, 1, top)


@dataclass
class World:
    """All fake workers of a test, so that D finds P's tickets."""

    workers: dict[str, "FakeWorker"] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def held(self) -> int:
        return sum(worker.held() for worker in self.workers.values())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work in the background, until `close`."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def close(self) -> None:
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def settled(self, seconds: float = 20.0) -> int:
        """Waits for at most `seconds` until nothing is held; returns what is held then."""
        for _ in range(int(seconds / 0.01)):
            if self.held() == 0:
                break
            await asyncio.sleep(0.01)
        return self.held()


class FakeWorker:
    parts_from = 0  # longer prompts are prepared at D; 0: none
    cut_below = 2e9
    link_rate = 1e9
    fetches_prefixes = False
    hands_over = True
    grammar_engine = ""

    def __init__(
        self, world: World, worker_id: str, role: str, pool: bool = True, incarnation: int = 1
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.incarnation = incarnation
        self.alive = True
        self.step_s = 0.0
        # tokens of a choice by its prompt and number, if a test writes the answers itself
        self.answers: Callable[[tuple[int, ...], int], Sequence[int]] | None = None
        self.tokens_at_once: Callable[[], int] = lambda: 1  # of a choice in a step
        self.vocab_size = VOCAB
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self.going = asyncio.Event()  # no step begins while this is not set
        self.going.set()
        self.send_delay: Callable[[Command], float] = lambda command: 0.0
        self.before_batch: Callable[[int], None] = lambda number: None
        self.mangle: Callable[[list[Event]], list[Event]] = lambda events: events
        self.fail_submit: Callable[[Submit], Any] = lambda submit: None
        self.refuse_connects = 0
        self.max_tokens = 256
        self.protocol = PROTOCOL_VERSION
        self.fingerprint = "model"
        self.mute = False
        self.expert_rows: dict[int, tuple[int, ...]] = {}  # by layer
        self.gate: asyncio.Event | None = None  # what it is sent waits until this is set
        self.loses: Callable[[Submit], bool] = lambda submit: False  # on its way
        self.hangs_at: int | None = None  # tokens of a leg, behind which nothing comes
        self.kv_pool = ""
        self.cache_number = 0
        self.cache_keys = b""
        self.queue_tokens = 0
        self.prefill_tokens_per_s = 0.0
        self.pace: PaceState | None = None
        self.role_by = ""
        self.free_blocks = self.total_blocks = 64
        self.commands: list[Command] = []
        self.tickets: dict[RequestKey, tuple[int, ...]] = {}
        self.prepared: dict[RequestKey, tuple[int, ...]] = {}
        self.connected: set[tuple[str, int]] = set()
        self.num_batches = 0
        self._world = world
        self._streams: dict[tuple[str, int], asyncio.Queue[bytes | None]] = {}
        self._runs: dict[RequestKey, set[int]] = {}
        self.queued: set[RequestKey] = set()  # legs that wait there
        self._tombstones: set[RequestKey] = set()
        self._closed: set[tuple[str, int]] = set()
        self.meta = self._meta() if pool else None
        world.workers[worker_id] = self

    def _meta(self) -> KVCacheMeta:
        return KVCacheMeta(
            engine_id=f"engine-{self.worker_id}",
            incarnation=self.incarnation,
            connector="local",
            model="x",
            rows="x",
            block_size=16,
            num_blocks=64,
            generation_address=0,
            mailbox="",
            ranks=(RankMemory("", b"", 0, "DRAM", 0, 1024, ()),),
        )

    def held(self) -> int:
        return (len(self._runs) + len(self.tickets) + len(self.prepared)) if self.alive else 0

    def die(self) -> None:
        self.alive = False
        self._runs.clear()
        self.prepared.clear()
        self.cut()

    def cut(self) -> None:
        """Every stream ends."""
        for queue in self._streams.values():
            queue.put_nowait(None)

    def hello(self) -> Hello:
        return Hello(
            protocol=self.protocol,
            role=self.role,
            model_fingerprint=self.fingerprint,
            rows_digest=self.fingerprint,
            vocab_size=self.vocab_size,
            grammar_engine=self.grammar_engine,
            max_model_len=self.max_tokens,
            max_request_tokens=self.max_tokens,
            block_size=16,
            kv_cache=self.meta,
            parts_from=self.parts_from,
            cut_below=self.cut_below,
            kv_pool=self.kv_pool,
            fetches_prefixes=self.fetches_prefixes,
            pool_chunk=32 if self.kv_pool else 0,
            hands_over=self.hands_over,
        )

    def snapshot(self) -> Snapshot:
        family = MetricFamily(
            "pdserve_engine_steps",
            "counter",
            "Steps.",
            (Sample("pdserve_engine_steps_total", {"kind": 'a"b'}, 3),),
        )
        return Snapshot(
            role=self.role,
            num_waiting=0,
            num_running=len(self._runs),
            queue_tokens=self.queue_tokens,
            free_blocks=self.free_blocks,
            total_blocks=self.total_blocks,
            pinned_blocks=0,
            quarantined_blocks=0,
            metrics=(family,),
            cache_number=self.cache_number,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            pace=self.pace,
            role_by=self.role_by,
        )

    async def events(self, router_id: str, session: int) -> AsyncIterator[bytes]:
        if not self.alive:
            raise WorkerLost("dead")
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._streams[router_id, session] = queue
        state = CacheState(number=self.cache_number, part=0, final=True, stored=self.cache_keys)
        queue.put_nowait(self._batch([self.hello(), state, self.snapshot()]))
        try:
            while (data := await queue.get()) is not None:
                yield data
        finally:
            self._streams.pop((router_id, session), None)
            self._closed.add((router_id, session))
            self._runs = {
                k: v
                for k, v in self._runs.items()
                if (k.router_id, k.session) != (router_id, session)
            }
            self.tickets = {
                k: v
                for k, v in self.tickets.items()
                if (k.router_id, k.session) != (router_id, session)
            }
            self.prepared = {
                k: v
                for k, v in self.prepared.items()
                if (k.router_id, k.session) != (router_id, session)
            }

    def push(self, key: RequestKey | None, events: list[Event]) -> None:
        """One batch to the key's stream, or to all."""
        if key is not None:
            self.num_batches += 1
            self.before_batch(self.num_batches)
        if not self.alive or self.mute:
            return
        for stream, queue in self._streams.items():
            if key is None or stream == (key.router_id, key.session):
                queue.put_nowait(self._batch(self.mangle(events)))

    def report(self) -> None:
        """Sends the reports that a worker sends once a second."""
        for (router_id, session), queue in self._streams.items():
            keys = [
                key
                for key in self.queued & self._runs.keys()
                if (key.router_id, key.session) == (router_id, session)
            ]
            waiting = LegsWaiting(legs=tuple((key.request_id, key.attempt) for key in keys))
            if self.alive and not self.mute:
                queue.put_nowait(self._batch([*([waiting] if keys else []), self.snapshot()]))

    def _batch(self, events: list[Event]) -> bytes:
        return encode(
            EventBatch(worker_id=self.worker_id, incarnation=self.incarnation, events=tuple(events))
        )

    async def send(self, command: Command) -> None:
        await asyncio.sleep(self.send_delay(command))
        if not self.alive:
            raise WorkerLost("dead")
        self.commands.append(command)
        if isinstance(command, Submit):
            self._submitted(command)
        elif isinstance(command, Prepare):
            self._announced(command)
        elif isinstance(command, Cancel):
            self._cancelled(command)
        elif isinstance(command, ConnectPeer):
            self._connect(command)
        elif isinstance(command, DisconnectPeer):
            self.connected.discard((command.engine_id, command.incarnation))
            told = PeerStatus(
                engine_id=command.engine_id, incarnation=command.incarnation, connected=False
            )
            self.push(None, [told])
        elif isinstance(command, SetRole):
            self.role = command.role
            self.role_by = command.by
            self.push(None, [self.snapshot()])
        elif isinstance(command, AskExpertLoad):
            answer = ExpertCounts(layers=self.expert_rows)
            self.push(RequestKey(command.router_id, command.session, ""), [answer])

    def submits(self, phase: str | None = None) -> list[Submit]:
        return [c for c in self.commands if isinstance(c, Submit) and phase in (None, c.phase)]

    def _connect(self, command: ConnectPeer) -> None:
        self.refuse_connects -= 1
        ok = self.refuse_connects < 0
        peer = (command.meta.engine_id, command.meta.incarnation)
        if ok:
            self.connected.add(peer)
        self.push(
            None,
            [
                PeerStatus(
                    engine_id=peer[0], incarnation=peer[1], connected=ok, bytes_per_s=self.link_rate
                )
            ],
        )

    def _cancelled(self, command: Cancel) -> None:
        if command.choices is None:
            self._tombstones.add(command.key)
            self._runs.pop(command.key, None)
            self.tickets.pop(command.key, None)
            self.prepared.pop(command.key, None)
        elif command.key in self._runs:
            self._runs[command.key] -= set(command.choices)
            if not self._runs[command.key]:
                del self._runs[command.key]

    def _announced(self, prepare: Prepare) -> None:
        submit = prepare.submit
        source = prepare.source
        key = submit.key
        is_open = (key.router_id, key.session) in self._streams
        if key in self._tombstones or not is_open or any(key == s.key for s in self.submits()):
            return
        assert submit.phase == "decode" and submit.ticket is None and submit.starts
        assert not any(start.forced for start in submit.starts), (
            "a prompt that was computed already"
        )
        assert (
            source.engine_id,
            source.incarnation,
        ) in self.connected and source.key.attempt != key.attempt
        self.prepared[key] = submit.prompt_token_ids

    def _submitted(self, submit: Submit) -> None:
        key = submit.key
        assert self.prepared.pop(key, submit.prompt_token_ids) == submit.prompt_token_ids
        if key in self._tombstones or (key.router_id, key.session) in self._closed:
            return
        assert (key.router_id, key.session) in self._streams, "a command before the Hello"
        if submit.phase != "prefill" and submit.kind != "embed":
            submit = self._clamped(submit)
        assert submit.starts and submit.sampling.seed is not None and not submit.sampling.stop
        assert all(
            finish_of(submit.sampling, list(start.forced))[0] is None for start in submit.starts
        )
        assert submit.phase != "prefill" or not any(start.forced for start in submit.starts)
        if self.loses(submit):
            return
        kind = self.fail_submit(submit)
        if kind is not None:
            self.push(
                key,
                [
                    Failed(
                        request_id=key.request_id,
                        attempt=key.attempt,
                        kind=kind,
                        message=f"{kind} by test",
                    )
                ],
            )
            return
        self._runs[key] = {start.choice for start in submit.starts}
        self._world.run(self._run(submit))

    def _clamped(self, submit: Submit) -> Submit:
        """With as many tokens as fit here, as an engine does it."""
        room = self.max_tokens - len(submit.prompt_token_ids)
        assert all(len(start.forced) < room for start in submit.starts), (
            "sent to a worker that has no room for it"
        )
        max_tokens = min(submit.sampling.max_tokens or room, room)
        assert max_tokens >= submit.sampling.min_tokens
        return msgspec.structs.replace(
            submit, sampling=msgspec.structs.replace(submit.sampling, max_tokens=max_tokens)
        )

    async def _run(self, submit: Submit) -> None:
        key = submit.key
        if self.gate is not None:
            self.queued.add(key)
            await self.gate.wait()
            self.queued.discard(key)
        await self._pause()
        if submit.kind == "embed":
            if self._runs.pop(key, None) and self.alive and self.hangs_at is None:
                self.push(key, [self._embedded(submit)])
            return
        if submit.phase == "decode":
            self.push(key, [self._pull(submit)])
        tokens = {start.choice: list(start.forced) for start in submit.starts}
        first = [] if submit.phase == "decode" else [self._scored(submit)]
        begun = sum(map(len, tokens.values()))
        while key in self._runs and self.alive:
            if (
                self.hangs_at is not None
                and sum(map(len, tokens.values())) - begun >= self.hangs_at
            ):
                return
            events: list[Event] = [*first, *self._step(submit, tokens)]
            if submit.phase == "prefill":
                del self._runs[key]
                self.tickets[key] = submit.prompt_token_ids
                self.push(key, [*events, self._handoff(submit)])
                return
            self.push(key, events)
            first = []
            await self._pause()

    async def _pause(self) -> None:
        await self.sleep(self.step_s)
        await self.going.wait()

    def _step(self, submit: Submit, tokens: dict[int, list[int]]) -> list[Event]:
        deltas: list[Event] = []
        sampling = submit.sampling
        key = submit.key
        for choice in sorted(self._runs[key]):
            known = tokens[choice]
            position = len(known)
            reason, stop = None, None
            # a choice's first token comes alone: P computes no more
            count = self.tokens_at_once() if position else 1
            while len(known) < position + count and reason is None:
                known.append(self._next(submit, choice, known))
                reason, stop = finish_of(sampling, known)
            new = tuple(known[position:])
            logprobs = (
                None
                if sampling.logprobs is None
                else tuple(logprob_of(token, sampling.logprobs) for token in new)
            )
            delta = Delta(
                key.request_id, key.attempt, choice, position, new, reason, stop, logprobs
            )
            deltas.append(delta)
            if reason is not None:
                self._runs[key].discard(choice)
        if not self._runs[key] and submit.phase != "prefill":
            del self._runs[key]
        return deltas

    def _next(self, submit: Submit, choice: int, known: list[int]) -> int:
        if self.answers is None:
            return next_token(submit.prompt_token_ids, submit.sampling, choice, known)
        written = self.answers(submit.prompt_token_ids, choice)
        return written[min(len(known), len(written) - 1)]

    def _scored(self, submit: Submit) -> PromptScored:
        count = submit.sampling.prompt_logprobs
        prompt = submit.prompt_token_ids
        logprobs = (
            None if count is None else (None, *(logprob_of(token, count) for token in prompt[1:]))
        )
        key = submit.key
        return PromptScored(
            request_id=key.request_id, attempt=key.attempt, cached_tokens=1, logprobs=logprobs
        )

    def _embedded(self, submit: Submit) -> Embedded:
        key = submit.key
        row = row_of(submit.prompt_token_ids)
        return Embedded(
            request_id=key.request_id, attempt=key.attempt, cached_tokens=1, values=row.tobytes()
        )

    def _handoff(self, submit: Submit) -> Handoff:
        assert self.meta is not None
        ticket = Ticket(
            engine_id=self.meta.engine_id,
            incarnation=self.incarnation,
            key=submit.key,
            content=b"c",
            block_size=16,
            block_ids=(1,),
            generations=(1,),
            num_tokens=len(submit.prompt_token_ids),
            lease_s=30,
            written_at=time.time(),
        )
        return Handoff(request_id=submit.key.request_id, attempt=submit.key.attempt, ticket=ticket)

    def _pull(self, submit: Submit) -> Arrived:
        assert submit.ticket is not None
        sender = next(
            (
                w
                for w in self._world.workers.values()
                if w.meta and w.meta.engine_id == submit.ticket.engine_id
            ),
            None,
        )
        found = (
            sender is not None
            and sender.alive
            and sender.tickets.get(submit.ticket.key) == submit.prompt_token_ids
        )
        key = submit.key
        if not found:
            return Arrived(
                request_id=key.request_id,
                attempt=key.attempt,
                source="recompute",
                reason="peer-lost",
            )
        assert sender is not None
        assert (submit.ticket.engine_id, submit.ticket.incarnation) in self.connected, (
            "a pull between strangers"
        )
        del sender.tickets[submit.ticket.key]
        return Arrived(request_id=key.request_id, attempt=key.attempt, source="p2p", num_bytes=1)
