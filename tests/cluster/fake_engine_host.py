"""An engine host without an engine: the same two methods as `pdserve.worker.hosts.EngineHost`, the
same protocol on the wire.

A submitted request gets one token a step for `max_tokens` steps, or until it is as long as it may
be; token i of a prompt p is `p[0] + i`. Every command received is one line of a journal file named
by the worker, in the folder that WORKER_JOURNAL names, so that tests see what reached an engine.
While a file `held` is there, nobody gets tokens.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pdserve.configs.schema import WorkerConfig
from pdserve.protocol.codec import PROTOCOL_VERSION, decode_command, encode
from pdserve.protocol.commands import Cancel, Command, RouterLost, Stop, Submit, Subscribe
from pdserve.protocol.events import CacheState, Delta, Event, EventBatch, Hello, Snapshot
from pdserve.protocol.metric_families import MetricFamily, Sample
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.start_progress import WORK, StartProgress

STEP_S = 0.02
TELL_S = 1.0
MAX_MODEL_LEN = 1024


def journal_path(worker_id: str) -> Path:
    return Path(os.environ["WORKER_JOURNAL"]) / worker_id.replace("#", "-")


@contextlib.contextmanager
def held(journal: Path) -> Iterator[None]:
    """Within it no engine makes a step; what they had sent may still be on its way."""
    (journal / "held").touch()
    try:
        yield
    finally:
        (journal / "held").unlink()


class FakeEngineHost:
    def __init__(
        self, config: WorkerConfig, worker_id: str, incarnation: int, address: str
    ) -> None:
        self.config = config
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.address = address
        self.progress = StartProgress()
        self.requests: dict[RequestKey, Submit] = {}
        self.positions: dict[RequestKey, int] = {}
        self.num_steps = 0
        self.step_age_s = 0.0

    def start(self) -> dict[str, Any]:
        """With the model's name "fails-in-STAGE" or "hangs-in-STAGE" it gets no further."""
        how, _, stage = self.config.model.served_name.partition("-in-")
        for passed in WORK:
            if passed in ("weights", stage):
                self.progress.enter(passed)
                self.progress.report(1_000_000_000, 4_000_000_000)
            if passed == stage and how == "fails":
                raise ValueError(f"the fake fails in {stage}")
            if passed == stage and how == "hangs":
                time.sleep(3600)
        self.progress.finish()
        return {"role": self.config.role, "pid": os.getpid()}

    def run(self) -> None:
        context = zmq.Context()
        self.socket = context.socket(zmq.PAIR)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(self.address)
        stopped = False
        told = 0.0
        while not stopped:
            if time.monotonic() > told + TELL_S:
                told = time.monotonic()
                self.publish("*", Snapshot(**self.load()))
            timeout_ms = int((STEP_S if self.requests else TELL_S) * 1000)
            if self.socket.poll(timeout_ms):
                stopped = self.handle(decode_command(self.socket.recv()))
            elif self.requests and not journal_path("held").exists():
                self.step()
        context.destroy(linger=0)

    def handle(self, command: Command) -> bool:
        self.note(command)
        match command:
            case Subscribe(router_id=router_id, session=session):
                state = CacheState(number=0, part=0, final=True, stored=b"")
                self.publish(f"{router_id}/{session}", self.hello(), state)
            case Submit(key=key):
                self.requests[key] = command
                self.positions[key] = len(command.starts[0].forced)
            case Cancel(key=key):
                self.requests.pop(key, None)
            case RouterLost(router_id=router_id, session=session):
                self.requests = {
                    k: s
                    for k, s in self.requests.items()
                    if (k.router_id, k.session) != (router_id, session)
                }
        return isinstance(command, Stop)

    def step(self) -> None:
        self.num_steps += 1
        for key, submit in list(self.requests.items()):
            position = self.positions[key]
            self.positions[key] += 1
            room = MAX_MODEL_LEN - len(submit.prompt_token_ids)
            last = position + 1 == (submit.sampling.max_tokens or room)
            token = submit.prompt_token_ids[0] + position
            delta = Delta(
                key.request_id, key.attempt, 0, position, (token,), "length" if last else None
            )
            if last:
                del self.requests[key]
            self.publish(f"{key.router_id}/{key.session}", delta)

    def publish(self, target: str, *events: Event) -> None:
        batch = EventBatch(worker_id=self.worker_id, incarnation=self.incarnation, events=events)
        with contextlib.suppress(zmq.Again):  # nobody is connected any more
            self.socket.send_multipart([target.encode(), encode(batch)], zmq.NOBLOCK)

    def hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            role=self.config.role,
            model_fingerprint="fake",
            rows_digest="fake",
            vocab_size=1000,
            max_model_len=MAX_MODEL_LEN,
            max_request_tokens=MAX_MODEL_LEN,
            block_size=16,
            kv_cache=None,
        )

    def load(self) -> dict[str, Any]:
        counts = dict.fromkeys(
            ("num_waiting", "queue_tokens", "pinned_blocks", "quarantined_blocks"), 0
        )
        blocks = {"free_blocks": 64, "total_blocks": 64}
        load = {"role": self.config.role, "num_running": len(self.requests), **counts, **blocks}
        return load | {"metrics": self.families()}

    def families(self) -> tuple[MetricFamily, ...]:
        """As an engine's: of a histogram, all steps took less than 25 ms."""
        name = "pdserve_engine_step_seconds"
        steps = float(self.num_steps)
        buckets = [
            Sample(f"{name}_bucket", {"le": le}, n)
            for le, n in (("0.01", 0.0), ("0.025", steps), ("+Inf", steps))
        ]
        total = [Sample(f"{name}_sum", {}, steps * STEP_S), Sample(f"{name}_count", {}, steps)]
        return (
            MetricFamily(
                "pdserve_engine_steps",
                "counter",
                "Steps.",
                (Sample("pdserve_engine_steps_total", {}, steps),),
            ),
            MetricFamily(
                "pdserve_kv_blocks",
                "gauge",
                "Blocks.",
                (Sample("pdserve_kv_blocks", {"state": "free"}, 7.0),),
            ),
            MetricFamily(name, "histogram", "Seconds.", (*buckets, *total)),
        )

    def note(self, command: Command) -> None:
        line = {"t": time.time(), "pid": os.getpid(), "command": command}
        with journal_path(self.worker_id).open("ab") as journal:
            journal.write(msgspec.json.encode(line) + b"\n")
