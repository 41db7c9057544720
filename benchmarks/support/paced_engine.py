"""An engine that computes nothing: one token per step for each choice, and steps at fixed moments,
whatever they cost.

It speaks the protocol of a worker's engine, as P, as D or as both. So a benchmark around it
measures the router, Ray and the wires. First tokens are sent at once for up to MAX_SEQS choices.
Further prompts wait. router_cpu.py and watched_router.py use it by a socket, and cluster_cpu.py as
an engine host under Ray.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import zmq

from pdserve.configs.schema import WorkerConfig
from pdserve.protocol.codec import PROTOCOL_VERSION, decode_command, encode
from pdserve.protocol.commands import (
    Cancel,
    Command,
    ConnectPeer,
    RouterLost,
    Stop,
    Submit,
    Subscribe,
)
from pdserve.protocol.events import (
    Arrived,
    CacheState,
    Delta,
    Event,
    EventBatch,
    Handoff,
    Hello,
    PeerStatus,
    PromptScored,
    Snapshot,
    TokenLogprob,
)
from pdserve.protocol.handoff import KVCacheMeta, RankMemory, Ticket
from pdserve.protocol.request_key import FinishReason, RequestKey
from pdserve.protocol.start_progress import StartProgress
from pdserve.worker.engine_client import EngineClient

STEP_S = 0.02
SNAPSHOT_PERIOD_S = 1.0
VOCAB = 1 << 16
MANY = 1 << 20
MAX_SEQS = 512  # choices that run at once, as on a GPU by default
SCORES_PER_EVENT = 1 << 14  # log-probabilities in one PromptScored, as an engine sends them
EVENTS_PER_STEP = 5  # events of a scored prompt that are computed per step
ALL_ROUTERS = "*"


@dataclass(slots=True)
class _Choice:
    """A running choice."""

    number: int
    position: int  # of its next token
    last: int  # position of its last token
    top: tuple[tuple[int, float], ...] | None  # alternatives of each token; None: no logprobs


class PacedEngine:
    """An engine on paper with the methods of `cluster.deployments.engine_actor.Host`.

    - role: "prefill", "decode" or "both".
    - step_s: Seconds of a decode step.
    - max_model_len: Limit that Hello announces.
    """

    def __init__(
        self,
        address: str,
        role: str,
        step_s: float,
        worker_id: str = "paced",
        incarnation: int = 1,
        max_model_len: int = MANY,
    ) -> None:
        self._role = role
        self._step_s = step_s
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._max_model_len = max_model_len
        self._waiting: OrderedDict[RequestKey, Submit] = OrderedDict()
        self._scoring: deque[tuple[Submit, Iterator[PromptScored], list[PromptScored]]] = deque()
        self._running: dict[RequestKey, list[_Choice]] = {}
        self._num_running = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(address)
        self._stopped = False

    def start(self) -> dict[str, Any]:
        return {"role": self._role}

    def run(self) -> None:
        due = snapshot_due = time.monotonic() + self._step_s
        while not self._stopped:
            now = time.monotonic()
            if now >= snapshot_due:
                snapshot_due += SNAPSHOT_PERIOD_S
                self._send(ALL_ROUTERS, self._snapshot())
            is_busy = self._running or self._scoring
            wait_ms = 1000 * ((due if is_busy else snapshot_due) - now)
            if wait_ms > 0 and self._socket.poll(int(wait_ms)):
                self._handle(decode_command(self._socket.recv()))
            elif is_busy and wait_ms <= 0:
                due = max(due + self._step_s, now)
                self._step()
        self._context.destroy(linger=0)

    def _handle(self, command: Command) -> None:
        match command:
            case Subscribe(router_id=router_id, session=session):
                state = CacheState(number=0, part=0, final=True, stored=b"")
                self._send(f"{router_id}/{session}", self._hello(), state, self._snapshot())
            case ConnectPeer(meta=meta):
                status = PeerStatus(
                    engine_id=meta.engine_id,
                    incarnation=meta.incarnation,
                    connected=True,
                    bytes_per_s=1e9,
                )
                self._send(ALL_ROUTERS, status)
            case Submit():
                self._waiting[command.key] = command
                self._admit()
            case Cancel(key=key, choices=choices):
                self._cancel(key, choices)
                self._admit()
            case RouterLost(router_id=router_id, session=session):
                for key in [*self._waiting, *self._running]:
                    if (key.router_id, key.session) == (router_id, session):
                        self._cancel(key, None)
            case Stop():
                self._stopped = True

    def _cancel(self, key: RequestKey, choices: tuple[int, ...] | None) -> None:
        self._waiting.pop(key, None)
        self._scoring = deque(entry for entry in self._scoring if entry[0].key != key)
        before = self._running.pop(key, [])
        left = (
            [] if choices is None else [choice for choice in before if choice.number not in choices]
        )
        if left:
            self._running[key] = left
        self._num_running -= len(before) - len(left)

    def _admit(self) -> None:
        """Begins waiting prompts as far as there is room."""
        while self._waiting:
            submit = next(iter(self._waiting.values()))
            if self._num_running and self._num_running + len(submit.starts) > MAX_SEQS:
                return
            self._waiting.popitem(last=False)
            if submit.sampling.prompt_logprobs is None:
                self._begin(submit)
            else:
                self._scoring.append((submit, _scores(submit), []))

    def _begin(self, submit: Submit) -> None:
        """Sends all immediate events of a prompt: first tokens, and the hand-off after them or the
        arrival before them."""
        room = self._max_model_len - len(submit.prompt_token_ids)
        key = submit.key
        last = (submit.sampling.max_tokens or room) - 1
        name = key.request_id
        attempt = key.attempt
        top = None if submit.sampling.logprobs is None else _top(submit.sampling.logprobs)
        choices = [_Choice(start.choice, len(start.forced), last, top) for start in submit.starts]
        events: list[Event] = []
        if submit.phase == "decode":
            events.append(Arrived(request_id=name, attempt=attempt, source="p2p", num_bytes=1))
        else:
            if submit.sampling.prompt_logprobs is None:
                events.append(PromptScored(request_id=name, attempt=attempt, cached_tokens=0))
            events += [_token(key, choice) for choice in choices]
        if submit.phase == "prefill":
            events.append(Handoff(request_id=name, attempt=attempt, ticket=self._ticket(submit)))
        else:
            self._run_on(key, [choice for choice in choices if choice.position <= last])
        self._send(_target(key), *events)

    def _run_on(self, key: RequestKey, choices: list[_Choice]) -> None:
        if choices:
            self._running[key] = choices
            self._num_running += len(choices)

    def _step(self) -> None:
        """Does one step. Sends one batch to each router's stream."""
        self._score()
        events: dict[str, list[Event]] = {}
        for key, choices in list(self._running.items()):
            events.setdefault(_target(key), []).extend([_token(key, choice) for choice in choices])
            if any(choice.position > choice.last for choice in choices):
                ended = tuple(choice.number for choice in choices if choice.position > choice.last)
                self._cancel(key, ended)
        for target, batch in events.items():
            self._send(target, *batch)
        self._admit()

    def _score(self) -> None:
        """Computes some log-probabilities of the first scored prompt. After the last of them, all
        are sent, and the prompt begins."""
        if not self._scoring:
            return
        submit, parts, made = self._scoring[0]
        made += islice(parts, EVENTS_PER_STEP)
        if made[-1].final:
            self._scoring.popleft()
            for part in made:
                self._send(_target(submit.key), part)
            self._begin(submit)

    def _send(self, target: str, *events: Event) -> None:
        batch = EventBatch(worker_id=self._worker_id, incarnation=self._incarnation, events=events)
        self._socket.send_multipart([target.encode(), encode(batch)])

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            role=self._role,
            model_fingerprint="paced",
            rows_digest="paced",
            vocab_size=VOCAB,
            max_model_len=self._max_model_len,
            max_request_tokens=self._max_model_len,
            block_size=16,
            kv_cache=None if self._role == "both" else self._meta(),
        )

    def _meta(self) -> KVCacheMeta:
        return KVCacheMeta(
            engine_id=f"engine-{self._worker_id}",
            incarnation=self._incarnation,
            connector="local",
            model="paced",
            rows="paced",
            block_size=16,
            num_blocks=MANY,
            generation_address=0,
            mailbox="",
            ranks=(RankMemory("", b"", 0, "DRAM", 0, 1024, ()),),
        )

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            role=self._role,
            num_waiting=len(self._waiting) + len(self._scoring),
            num_running=self._num_running,
            queue_tokens=0,
            free_blocks=MANY - self._num_running,
            total_blocks=MANY,
            pinned_blocks=0,
            quarantined_blocks=0,
            metrics=(),
        )

    def _ticket(self, submit: Submit) -> Ticket:
        meta = self._meta()
        return Ticket(
            engine_id=meta.engine_id,
            incarnation=meta.incarnation,
            key=submit.key,
            content=b"",
            block_size=meta.block_size,
            block_ids=(0,),
            generations=(0,),
            num_tokens=len(submit.prompt_token_ids),
            lease_s=30.0,
            written_at=time.time(),
        )


def _target(key: RequestKey) -> str:
    return f"{key.router_id}/{key.session}"


def _token(key: RequestKey, choice: _Choice) -> Delta:
    """Returns the next token of a choice."""
    position = choice.position
    choice.position += 1
    token = 3 + hash((key.request_id, choice.number, position)) % 400
    reason: FinishReason | None = "length" if position == choice.last else None
    logprobs = None if choice.top is None else (TokenLogprob(token, -1.0, 1, choice.top),)
    return Delta(
        key.request_id, key.attempt, choice.number, position, (token,), reason, None, logprobs
    )


def _top(count: int) -> tuple[tuple[int, float], ...]:
    return tuple((3 + rank, -1.0 - rank) for rank in range(count))


def _scores(submit: Submit) -> Iterator[PromptScored]:
    prompt = submit.prompt_token_ids
    top = _top(submit.sampling.prompt_logprobs or 0)
    step = SCORES_PER_EVENT // (1 + len(top))
    for start in range(0, len(prompt), step):
        end = min(start + step, len(prompt))
        scored = [
            None if i == 0 else TokenLogprob(prompt[i], -1.0, 1, top) for i in range(start, end)
        ]
        yield PromptScored(
            request_id=submit.key.request_id,
            attempt=submit.key.attempt,
            cached_tokens=0,
            start=start,
            logprobs=tuple(scored),
            final=end == len(prompt),
        )


class PacedLink:
    """A router's `WorkerLink` to an engine on paper, over the engine's own wire."""

    worker_id = "paced"

    def __init__(self, address: str) -> None:
        self._client = EngineClient(address)

    async def send(self, command: Command) -> None:
        self._client.send(command)

    def events(self, router_id: str, session: int) -> Any:
        return self._client.subscribe(router_id, session)


class PacedEngineHost(PacedEngine):
    """The engine host of a cluster on paper. `cluster.app.assemble` gets it as `module:Class`."""

    def __init__(
        self, config: WorkerConfig, worker_id: str, incarnation: int, address: str
    ) -> None:
        super().__init__(address, config.role, STEP_S, worker_id, incarnation)
        self.progress = StartProgress()
        self.step_age_s = 0.0  # it sleeps in place of steps
