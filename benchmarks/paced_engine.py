"""An engine that computes nothing: one token a step for each request, steps at fixed moments, whatever they cost.

It speaks what a worker's engine speaks, as P, as D or as both: what is measured around it is the router, Ray and the
wires. First tokens come at once. Used by router_cpu.py (a socket) and cluster_cpu.py (as an engine host under Ray).
"""

import time
from typing import Any

import zmq

from pdserve.configs.schema import WorkerConfig
from pdserve.engine.protocol import (
    PROTOCOL_VERSION,
    Arrived,
    CacheState,
    Cancel,
    Command,
    ConnectPeer,
    Delta,
    Event,
    EventBatch,
    Handoff,
    Hello,
    PeerStatus,
    PoolMeta,
    PromptScored,
    RequestKey,
    RouterLost,
    Snapshot,
    Stop,
    Submit,
    Subscribe,
    Ticket,
    decode_command,
    encode,
)

STEP_S = 0.02
SNAPSHOT_PERIOD_S = 1.0
VOCAB = 1 << 16
MANY = 1 << 20
ALL_ROUTERS = "*"


class PacedEngine:
    """role: "prefill", "decode" or "both". step_s: of a decode step. The methods of `cluster.engine_actor.Host`."""

    def __init__(self, address: str, role: str, step_s: float, worker_id: str = "paced", incarnation: int = 1) -> None:
        self._role, self._step_s = role, step_s
        self._worker_id, self._incarnation = worker_id, incarnation
        self._running: dict[RequestKey, tuple[int, int]] = {}  # next position, last position
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
            wait_ms = 1000 * ((due if self._running else snapshot_due) - now)
            if wait_ms > 0 and self._socket.poll(int(wait_ms)):
                self._handle(decode_command(self._socket.recv()))
            elif self._running and wait_ms <= 0:
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
                    engine_id=meta.engine_id, incarnation=meta.incarnation, connected=True, bytes_per_s=1e9
                )
                self._send(ALL_ROUTERS, status)
            case Submit():
                self._submitted(command)
            case Cancel(key=key, choices=None):
                self._running.pop(key, None)
            case RouterLost(router_id=router_id, session=session):
                lost = (router_id, session)
                self._running = {k: v for k, v in self._running.items() if (k.router_id, k.session) != lost}
            case Stop():
                self._stopped = True

    def _submitted(self, submit: Submit) -> None:
        """What stands at once: a first token, and the hand-off behind it or the arrival before it."""
        key, last = submit.key, (submit.sampling.max_tokens or 1) - 1
        name, attempt = key.request_id, key.attempt
        position = len(submit.starts[0].forced)
        events: list[Event] = []
        if submit.phase == "decode":
            events.append(Arrived(request_id=name, attempt=attempt, source="p2p", num_bytes=1))
        else:
            events.append(PromptScored(request_id=name, attempt=attempt, cached_tokens=0))
            events.append(self._token(key, position, last))
            position += 1
        if submit.phase == "prefill":
            events.append(Handoff(request_id=name, attempt=attempt, ticket=self._ticket(submit)))
        elif position <= last:
            self._running[key] = position, last
        self._send(f"{key.router_id}/{key.session}", *events)

    def _step(self) -> None:
        """One batch to each router's stream."""
        events: dict[str, list[Event]] = {}
        for key, (position, last) in list(self._running.items()):
            events.setdefault(f"{key.router_id}/{key.session}", []).append(self._token(key, position, last))
            self._running[key] = position + 1, last
            if position == last:
                del self._running[key]
        for target, batch in events.items():
            self._send(target, *batch)

    def _token(self, key: RequestKey, position: int, last: int) -> Delta:
        token = 3 + hash((key.request_id, position)) % 400
        return Delta(key.request_id, key.attempt, 0, position, (token,), "length" if position == last else None)

    def _send(self, target: str, *events: Event) -> None:
        batch = EventBatch(worker_id=self._worker_id, incarnation=self._incarnation, events=events)
        self._socket.send_multipart([target.encode(), encode(batch)])

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            role=self._role,
            model_fingerprint="paced",
            vocab_size=VOCAB,
            max_model_len=MANY,
            max_request_tokens=MANY,
            block_size=16,
            pool=None if self._role == "both" else self._pool(),
        )

    def _pool(self) -> PoolMeta:
        return PoolMeta(
            engine_id=f"engine-{self._worker_id}",
            incarnation=self._incarnation,
            connector="local",
            compat="paced",
            block_size=16,
            num_blocks=MANY,
            block_bytes=1024,
            head_bytes=512,
            generation_address=0,
            mailbox="",
            ranks=(),
        )

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            role=self._role,
            num_waiting=0,
            num_running=len(self._running),
            queue_tokens=0,
            free_blocks=MANY - len(self._running),
            total_blocks=MANY,
            pinned_blocks=0,
            quarantined_blocks=0,
            metrics=(),
        )

    def _ticket(self, submit: Submit) -> Ticket:
        pool = self._pool()
        return Ticket(
            engine_id=pool.engine_id,
            incarnation=pool.incarnation,
            key=submit.key,
            content=b"",
            block_size=pool.block_size,
            block_ids=(0,),
            generations=(0,),
            num_tokens=len(submit.prompt_token_ids),
            lease_s=30.0,
            written_at=time.time(),
        )


class PacedEngineHost(PacedEngine):
    """The engine host of a cluster on paper: `module:Class` for `cluster.app.assemble`."""

    def __init__(self, config: WorkerConfig, worker_id: str, incarnation: int, address: str) -> None:
        super().__init__(address, config.role, STEP_S, worker_id, incarnation)
