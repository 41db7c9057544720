"""Workers as a router knows them, made by hand: no link, no stream."""

import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from router.fake_worker import FakeWorker, World

from pdserve.protocol.block_digests import NOBODY, BlockHasher
from pdserve.protocol.events import CacheState, PeerStatus, Snapshot
from pdserve.protocol.request_key import LegName, Phase
from pdserve.router.choosing.choose import note_sent
from pdserve.router.fleet.prefix_index import PromptBlocks
from pdserve.router.fleet.worker_state import WorkerState


def made(
    worker_id: str, role: str = "both", holds: tuple[int, ...] = (), **reported: Any
) -> WorkerState:
    """Makes the state of a worker that has the blocks of the tokens `holds` cached.

    `reported` are members of its Snapshot.
    """
    fake = FakeWorker(World(), worker_id, role)
    fake.max_tokens = 4096
    now = time.monotonic()
    worker = WorkerState(fake, 1, fake.hello(), 1, now)
    digests: list[bytes] = []
    BlockHasher("model", 16).extend(digests, holds, NOBODY)
    stored = b"".join(digest[:8] for digest in digests)
    worker.cached.filled(CacheState(number=0, part=0, final=True, stored=stored), now)
    values: dict[str, Any] = {
        "num_waiting": 0,
        "num_running": 0,
        "queue_tokens": 0,
        "free_blocks": 1000,
        "total_blocks": 1000,
    }
    values |= {
        "pinned_blocks": 0,
        "quarantined_blocks": 0,
        "prefill_tokens_per_s": 10_000.0,
        **reported,
    }
    worker.snapshot = Snapshot(role=role, **values)
    worker.told(worker.snapshot, now)
    return worker


def join(prefill: WorkerState, *decodes: WorkerState, bytes_per_s: float = 1e9) -> None:
    """Connect them."""
    meta = prefill.kv_cache
    assert meta is not None
    for decode in decodes:
        status = PeerStatus(
            engine_id=meta.engine_id,
            incarnation=meta.incarnation,
            connected=True,
            bytes_per_s=bytes_per_s,
        )
        decode.met(status)


_legs = count()


def send_prompt(
    workers: Sequence[WorkerState],
    worker: WorkerState,
    prompt: PromptBlocks,
    phase: Phase,
    now: float | None = None,
) -> LegName:
    """Notes that a new leg was opened, and returns its name."""
    leg = f"leg {next(_legs)}", 0
    note_sent(workers, worker, prompt, phase, leg, now)
    return leg
