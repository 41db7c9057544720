"""One real router in front of very many workers on paper, in virtual time: what it costs, and how
soon it notices a death.

    python -m benchmarks.router.scale_scene NUM_WORKERS --split auto

This is the main module of a process that `scale` starts. The router (fleet, chooser, service,
request runs) is real. Workers send the messages of real ones, and their reports include the load of
all other routers. A quarter of them hold the first half of every prompt. They answer a request with
one token per step. CPU is that of this process, by its own clock. Everything else happens at
virtual moments.
"""

import argparse
import asyncio
import gc
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from pdserve.plan.simulation.virtual_time import CLOCK, VirtualLoop, patch_clocks

if TYPE_CHECKING:
    from pdserve.protocol.commands import Command

BLOCK = 64
NUM_OUT = 128
PROMPT = 2048
SHARED = 1024  # tokens that all prompts begin with
HOLDING = 4  # one in so many workers holds these
VOCABULARY = 1 << 17
TTFT_MS, TPOT_MS = 200.0, 7.0
STEP_S = 0.008
KEYS = {10: 20_000, 100: 20_000, 1000: 4_000, 10_000: 400}  # keys in each worker's prefix cache
CHANGE_S = 0.1  # period of Load and CacheChange, as from busy real workers
KEYS_PER_CHANGE = 20
REST_S = 5.0  # time with only reports
SILENCE_S = 15.0
REQUESTS = {10: 100, 100: 100, 1000: 30, 10_000: 5}


def _cpu() -> float:
    return time.process_time()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Worker:
    """A worker on paper that implements `WorkerLink`."""

    def __init__(self, number: int, is_prefill: bool, counts: Counter[str]) -> None:
        self.worker_id = f"w{number}"
        self.role = "prefill" if is_prefill else "decode"
        self.alive = True
        self._number = number
        self._counts = counts
        self._stream: asyncio.Queue[bytes] = asyncio.Queue()
        self._change = 0

    async def events(self, router_id: str, session: int) -> AsyncIterator[bytes]:
        while True:
            yield await self._stream.get()

    async def send(self, command: "Command") -> None:
        from pdserve.protocol.commands import ConnectPeer, Submit

        self._counts["commands"] += 1
        if isinstance(command, ConnectPeer):
            self._counts["introductions"] += 1
        if isinstance(command, Submit):
            self._counts["requests"] += command.phase != "decode"
            self._counts["handed_over"] += command.phase == "decode"
            self._counts["fetches"] += command.prefix is not None
            loop = asyncio.get_running_loop()
            loop.call_later(STEP_S, self._answer, command, 0)

    def push(self, *events: Any) -> None:
        from pdserve.protocol.codec import encode
        from pdserve.protocol.events import EventBatch

        if self.alive:
            self._counts["messages"] += 1
            self._stream.put_nowait(
                encode(EventBatch(worker_id=self.worker_id, incarnation=1, events=events))
            )

    def meta(self) -> Any:
        from pdserve.protocol.handoff import KVCacheMeta, RankMemory

        return KVCacheMeta(
            engine_id=f"e{self._number}",
            incarnation=1,
            connector="paper",
            model="m",
            rows="r",
            block_size=BLOCK,
            num_blocks=10_000,
            generation_address=0,
            mailbox="",
            ranks=(RankMemory("", b"", 0, "VRAM", 0, BLOCK * 131_072, ()),),
        )

    def hello(self) -> None:
        from pdserve.protocol.codec import PROTOCOL_VERSION
        from pdserve.protocol.events import CacheState, Hello

        hello = Hello(
            protocol=PROTOCOL_VERSION,
            role=self.role,
            model_fingerprint="m",
            rows_digest="r",
            vocab_size=VOCABULARY,
            max_model_len=1 << 17,
            max_request_tokens=1 << 17,
            block_size=BLOCK,
            kv_cache=self.meta(),
            fetches_prefixes=True,
        )
        state = CacheState(number=0, part=0, final=True, stored=b"")
        self.push(hello, state, self.snapshot())

    def snapshot(self) -> Any:
        from pdserve.protocol.events import Snapshot

        return Snapshot(
            role=self.role,
            num_waiting=0,
            num_running=20 + self._number % 20,
            queue_tokens=(self._number * 7919) % 4096,
            free_blocks=6000,
            total_blocks=10_000,
            pinned_blocks=0,
            quarantined_blocks=0,
            metrics=(),
            cache_number=self._change,
            prefill_tokens_per_s=40_000.0 + self._number % 100,
            pace=self.pace(),
        )

    def load(self) -> Any:
        from pdserve.protocol.events import Load

        return Load(
            queue_tokens=(self._number * 7919 + self._change) % 4096,
            num_running=20 + (self._number + self._change) % 20,
            num_waiting=0,
            pace=self.pace(),
        )

    def pace(self) -> Any:
        """Like an H200 with Llama-8B."""
        from pdserve.protocol.events import PaceState

        is_decode = self.role == "decode"
        return PaceState(
            tpot_ms=TPOT_MS,
            base_step_ms=5.0 + self._number % 20 / 20 if is_decode else 4.3,
            row_ms=0.02,
            prompt_tokens_per_s=10_000.0 if is_decode else 40_000.0,
            burst_tokens=self._number * 31 % 4096 if is_decode else 0,
            stream_ms=1000.0 if is_decode else 0.0,
            pair_tokens=1e-5,
            top_tokens_per_s=30_000.0 if is_decode else 0.0,
        )

    def keys(self, count: int) -> bytes:
        first = self._number * 1_000_003 + self._change * 1009
        return b"".join((first + i).to_bytes(8, "little") for i in range(count))

    def change(self, count: int) -> None:
        from pdserve.protocol.events import CacheChange

        self._change += 1
        change = CacheChange(number=self._change, stored=self.keys(count), dropped=b"")
        self.push(self.load(), change)

    def _answer(self, submit: Any, count: int) -> None:
        from pdserve.protocol.events import Arrived, Delta, Handoff, PromptScored
        from pdserve.protocol.handoff import Ticket

        key = submit.key
        named = {"request_id": key.request_id, "attempt": key.attempt}
        position = count + (1 if submit.phase == "decode" else 0)
        last = submit.phase != "prefill" and position == submit.sampling.max_tokens - 1
        delta = Delta(
            key.request_id, key.attempt, 0, position, (7,), "length" if last else None, None, None
        )
        if submit.phase == "prefill":
            ticket = Ticket(
                engine_id=f"e{self._number}",
                incarnation=1,
                key=key,
                content=b"",
                num_tokens=1,
                block_size=BLOCK,
                block_ids=(0,),
                generations=(0,),
                lease_s=30.0,
                written_at=0.0,
            )
            self.push(
                PromptScored(cached_tokens=0, **named), delta, Handoff(ticket=ticket, **named)
            )
            return
        first: list[Any] = [Arrived(source="p2p", num_bytes=1, **named)] * (
            submit.phase == "decode"
        )
        if submit.phase == "full":
            first = [PromptScored(cached_tokens=0, **named)]
        self.push(*(first if count == 0 else []), delta)
        if not last:
            asyncio.get_running_loop().call_later(STEP_S, self._answer, submit, count + 1)


async def measure(num_workers: int, split: Any) -> dict[str, Any]:
    from typing import cast

    from pdserve.configs.router import LogConfig, RouterConfig, SloConfig
    from pdserve.plan.simulation.paper_tokenizer import PaperTokenizer
    from pdserve.protocol.block_digests import NOBODY
    from pdserve.protocol.events import CacheState, PeerStatus
    from pdserve.protocol.sampling_params import SamplingParams
    from pdserve.router.fleet.fleet import Fleet
    from pdserve.router.fleet.prefix_index import PromptBlocks
    from pdserve.router.request.prompts import SharedIds
    from pdserve.router.request.service import Service
    from pdserve.text.tokenizer import Tokenizer

    counts: Counter[str] = Counter()
    workers = [Worker(number, number % 3 == 0, counts) for number in range(num_workers)]
    fleet = Fleet(worker_silence_s=SILENCE_S, attempt_deadline_s=1e9, router_id="router-0")
    service = Service(
        fleet,
        cast(Tokenizer, PaperTokenizer()),
        RouterConfig(split=split),
        "paper",
        # nothing is refused, though all requests come at once
        slo=SloConfig(ttft_ms=TTFT_MS, tpot_ms=TPOT_MS, refuse_beyond=None),
        logs=LogConfig(requests=False),
    )
    # Every D has a connection to every P, as after a long time. The pairs are not asked one by one.
    introducer = fleet.introducer
    joined, introducer.joined = introducer.joined, lambda worker, workers: None  # type: ignore[method-assign]
    began = _cpu()
    for worker in workers:
        fleet.join(worker)
        worker.hello()
    while len(fleet.workers) < num_workers:
        await asyncio.sleep(0)
    join_s = _cpu() - began
    prefills = [worker for worker in workers if worker.role == "prefill"]
    connected = {
        (f"e{worker._number}", 1): PeerStatus(
            engine_id=f"e{worker._number}", incarnation=1, connected=True, bytes_per_s=2e11
        )
        for worker in prefills
    }
    for state in fleet.workers:
        state.peers = connected
    introducer.joined = joined  # type: ignore[method-assign]

    began = _cpu()
    introducer.changed()
    introducer.introduce(fleet.workers)
    walk_s = _cpu() - began
    began = _cpu()
    introducer.joined(fleet.workers[-1], fleet.workers)
    one_join_s = _cpu() - began
    began = _cpu()
    for _ in range(3):
        fleet.watch.look()
    tick_s = (_cpu() - began) / 3

    gc.collect()
    before_bytes, began = _peak_bytes(), _cpu()
    num_keys = KEYS[num_workers]
    prompts = [_prompt(number) for number in range(REQUESTS[num_workers])]
    shared = PromptBlocks(prompts[0], NOBODY).keys("r", BLOCK, SHARED // BLOCK)
    held = b"".join(key.to_bytes(8, "little") for key in shared)
    for number, worker in enumerate(workers):
        stored = worker.keys(num_keys) + (held if number % HOLDING == 0 else b"")
        worker.push(CacheState(number=0, part=0, final=True, stored=stored))
    while any(len(state.cached) < num_keys for state in fleet.workers[-1:]):
        await asyncio.sleep(0)
    fill_s = _cpu() - began
    index_bytes = _peak_bytes() - before_bytes

    counts["messages"] = 0
    began, virtual = _cpu(), CLOCK.now
    pushing = asyncio.ensure_future(_report(workers))
    await asyncio.sleep(REST_S)
    rest_s = (_cpu() - began) / (CLOCK.now - virtual)
    messages = counts["messages"] / (CLOCK.now - virtual)

    async def ask(number: int, num_out: int) -> None:
        sampling = SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True, seed=0)
        prompt = SharedIds(prompts[number], VOCABULARY)
        async for _ in service.generate([prompt], sampling, request_id=f"r{number}-{num_out}"):
            pass

    pushing.cancel()
    count = len(prompts)
    spent = {}
    for num_out in (2, NUM_OUT):  # all at once, before any worker has been silent for too long
        began = _cpu()
        await asyncio.gather(*(ask(number, num_out) for number in range(count)))
        spent[num_out] = (_cpu() - began) / count
    token_s = (spent[NUM_OUT] - spent[2]) / (NUM_OUT - 2)

    pushing = asyncio.ensure_future(_report(workers, with_changes=False))
    await asyncio.sleep(1.1)
    victim = workers[-1]
    victim.alive = False
    died = CLOCK.now
    while len(fleet.workers) == num_workers:
        await asyncio.sleep(0.05)
    noticed_s = CLOCK.now - died
    pushing.cancel()
    return {
        "workers": num_workers,
        "split": split,
        "split_requests": counts["handed_over"] / counts["requests"],
        "fetching_requests": counts["fetches"] / counts["requests"],
        "pairs": len(prefills) * (num_workers - len(prefills)),
        "join_us_per_worker": 1e6 * join_s / num_workers,
        "walk_of_all_pairs_ms": 1e3 * walk_s,
        "introduce_one_ms": 1e3 * one_join_s,
        "tick_ms": 1e3 * tick_s,
        "messages_per_s": messages,
        "cpu_share_of_reports": rest_s,
        "us_per_message": 1e6 * rest_s / messages,
        "ms_per_request": 1e3 * (spent[2] - 2 * token_s),
        # with more workers, it is less than what two equal choices differ by
        "us_per_token": 1e6 * token_s if num_workers <= 100 else None,
        "keys": num_keys * num_workers,
        "index_bytes_per_key": index_bytes / (num_keys * num_workers),
        "fill_us_per_key": 1e6 * fill_s / (num_keys * num_workers),
        "silent_death_noticed_s": noticed_s,
    }


def _prompt(number: int) -> tuple[int, ...]:
    return (*range(SHARED), *range(SHARED + number, PROMPT + number))


async def _report(workers: list[Worker], with_changes: bool = True) -> None:
    """Lets each worker report once per second, and its load and cache ten times per second, evenly
    spread."""
    slots = round(1 / CHANGE_S)
    slot = 0
    while True:
        for number, worker in enumerate(workers):
            if number % slots == slot % slots:
                worker.push(worker.snapshot())
            if with_changes:
                worker.change(KEYS_PER_CHANGE)
        slot += 1
        await asyncio.sleep(CHANGE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workers", type=int, help="number of workers")
    parser.add_argument("--split", choices=("auto", "always"), default="auto")
    options = parser.parse_args()
    patch_clocks()
    import logging

    logging.disable(logging.ERROR)
    gc.freeze()
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    print(json.dumps(loop.run_until_complete(measure(options.workers, options.split))), flush=True)
    sys.stdout.flush()
    import os

    os._exit(0)  # thousands of streams need not be closed


if __name__ == "__main__":
    main()
