"""One simulated cluster from its start to its last request: a real router, workers on paper, and
clients.

Everything follows from the job: the same job gives the same outcome, to the last bit. A scene runs
in virtual time, in the process of `child`.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Iterator
from typing import cast

import numpy as np

from pdserve.configs.engine import EngineConfig
from pdserve.configs.router import LogConfig, RouterConfig, SloConfig
from pdserve.models.config import ModelSpec
from pdserve.plan.profile.step_times import StepTimes
from pdserve.plan.simulation.jobs import Asked, Job, Outcome, Request, WorkerUse, percentiles
from pdserve.plan.simulation.paper_engine import layout_of, paper_engine
from pdserve.plan.simulation.paper_executor import PaperExecutor
from pdserve.plan.simulation.paper_tokenizer import PaperTokenizer
from pdserve.plan.simulation.paper_transfer import Links, Network
from pdserve.plan.simulation.paper_worker import PaperWorker
from pdserve.plan.simulation.virtual_time import CLOCK
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import ApiError, RequestFailed
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.request.prompts import SharedIds
from pdserve.router.request.service import Service
from pdserve.text.tokenizer import Tokenizer

FIRST_TOKEN = 16  # lowest token id in prompts
READY_S = 30.0
LOOK_S = 0.05
NEVER_S = 1e9


class Scene:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._spec = ModelSpec.model_validate(job.pools[0].profile.spec)
        profile = job.pools[0].profile
        self._http_s = profile.http_s
        self._slo = SloConfig(ttft_ms=job.ttft_ms, tpot_ms=job.tpot_ms)
        self._workers = self._make_workers()
        self._fleet = Fleet(attempt_deadline_s=NEVER_S, router_id="router-0")
        config = RouterConfig(
            split=job.split, max_concurrent_prompts=1 << 20, max_queued_tokens=1 << 40
        )
        self._service = Service(
            self._fleet,
            cast(Tokenizer, PaperTokenizer()),
            config,
            "paper",
            slo=self._slo,
            logs=LogConfig(requests=False),
            seed=0,
        )
        self._ids: dict[tuple[str, int], tuple[int, ...]] = {}
        self._asked: list[Asked | None] = [None] * len(job.requests)
        self._num_tokens = 0
        self._num_missed = self._num_late = 0  # late: has no first token yet, and missed the TTFT
        self._num_asked = 0
        self._waiting: deque[tuple[float, int]] = deque()  # requests without a first token
        self._has_first: set[int] = set()
        self._stopped = asyncio.Event()
        self._kv_peak = dict.fromkeys((worker.worker_id for worker in self._workers), 0.0)

    async def run(self) -> Outcome:
        for worker in self._workers:
            self._fleet.join(worker)
        async with asyncio.timeout(READY_S):
            while not self._is_ready():
                await asyncio.sleep(LOOK_S)
        began = CLOCK.now
        used = [self._used(worker) for worker in self._workers]
        load = asyncio.ensure_future(self._send_all())
        watch = asyncio.ensure_future(self._watch())
        stopped = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait({load, stopped}, return_when=asyncio.FIRST_COMPLETED)
        is_whole = load.done() and not self._stopped.is_set()
        if load.done():
            load.result()
        watch.cancel()
        return self._outcome(CLOCK.now - began, used, is_whole)

    # --- the cluster ---

    def _make_workers(self) -> list[PaperWorker]:
        job = self._job
        profile = job.pools[0].profile
        is_split = any(pool.role != "both" for pool in job.pools)
        network: Network | None = None
        if is_split or sum(pool.count for pool in job.pools) > 1:
            block_size = EngineConfig().for_device("cuda").block_size
            block_bytes = layout_of(self._spec, block_size, profile.dtype).block_bytes
            network = Network(
                Links(
                    block_size,
                    block_bytes,
                    profile.link_bytes_per_s * job.links,
                    profile.hand_over_s,
                    profile.message_s / 2,
                )
            )
        return [
            PaperWorker(
                f"{pool.role}-{number}",
                pool.role,
                paper_engine(
                    self._spec,
                    EngineConfig(max_model_len=job.max_model_len, **pool.engine),
                    StepTimes(pool.profile),
                    pool.num_kv_tokens,
                    profile.dtype,
                    self._slo if job.is_paced else None,
                    seed=number,
                ),
                network,
                profile.command_s,
                profile.message_s,
                job.is_macro,
                is_split,
            )
            for pool in job.pools
            for number in range(pool.count)
        ]

    def _is_ready(self) -> bool:
        workers = self._fleet.workers
        prefills = [worker for worker in workers if worker.can_prefill]
        decodes = [worker for worker in workers if worker.can_decode]
        return len(workers) == len(self._workers) and all(
            decode.is_connected_to(prefill)
            for decode in decodes
            for prefill in prefills
            if prefill is not decode
        )

    # --- clients ---

    async def _send_all(self) -> None:
        if self._job.clients is not None:
            numbers = iter(range(len(self._job.requests)))
            await asyncio.gather(*(self._client(numbers) for _ in range(self._job.clients)))
            return
        began = CLOCK.now
        tasks = []
        for number, request in enumerate(self._job.requests):
            await asyncio.sleep(began + request.at_s - CLOCK.now)
            tasks.append(asyncio.ensure_future(self._ask(number)))
        await asyncio.gather(*tasks)

    async def _client(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._ask(number)

    async def _ask(self, number: int) -> None:
        request = self._job.requests[number]
        received = CLOCK.now
        self._waiting.append((received, number))
        await asyncio.sleep(self._http_s / 2)
        sampling = SamplingParams(
            max_tokens=request.num_out, temperature=0.0, ignore_eos=True, seed=0
        )
        prompt = SharedIds(self._prompt(request), self._spec.vocab_size)
        first: float | None = None
        count = 0
        try:
            chunks = self._service.generate(
                [prompt], sampling, request_id=f"r{number}", received=received
            )
            async for chunk in chunks:
                if first is None:
                    first = CLOCK.now + self._http_s / 2 - received
                    self._has_first.add(number)
                count += len(chunk.token_ids)
        except (ApiError, RequestFailed):
            first = None
        self._has_first.add(number)
        tpot: float | None = None
        if first is not None and count > 1:
            tpot = (CLOCK.now + self._http_s / 2 - received - first) / (count - 1) * 1e3
        self._num_tokens += count
        asked = Asked(request.at_s, None if first is None else first * 1e3, tpot)
        self._asked[number] = asked
        if number >= self._job.skip and not self._keeps(asked):
            self._num_missed += 1

    def _prompt(self, request: Request) -> tuple[int, ...]:
        parts = [self._part(name, count) for name, count in request.prefixes]
        return parts[0] if len(parts) == 1 else tuple(token for part in parts for token in part)

    def _part(self, name: str, count: int) -> tuple[int, ...]:
        known = self._ids.get((name, count))
        if known is None:
            span = self._spec.vocab_size - FIRST_TOKEN
            raw = hashlib.shake_128(name.encode()).digest(4 * count)
            drawn = np.frombuffer(raw, dtype="<u4") % span + FIRST_TOKEN
            known = tuple(drawn.tolist())
            if not name.startswith("own "):
                self._ids[name, count] = known
        return known

    # --- outcome ---

    def _keeps(self, asked: Asked) -> bool:
        return not self._is_late(asked) and not self._is_slow(asked)

    def _is_late(self, asked: Asked) -> bool:
        limit = self._job.ttft_ms
        return asked.ttft_ms is None or (limit is not None and asked.ttft_ms > limit)

    def _is_slow(self, asked: Asked) -> bool:
        limit = self._job.tpot_ms
        return limit is not None and (asked.tpot_ms or 0.0) > limit

    async def _watch(self) -> None:
        """Records how full the KV caches are, and stops a run that can no longer keep its
        promises."""
        job = self._job
        limit = job.stop_beyond * (len(job.requests) - job.skip)
        while True:
            await asyncio.sleep(LOOK_S)
            for worker in self._workers:
                homes = worker.engine.homes
                used = 1 - homes.num_free_blocks / homes.num_usable_blocks
                self._kv_peak[worker.worker_id] = max(self._kv_peak[worker.worker_id], used)
            while self._waiting and self._waiting[0][1] in self._has_first:
                self._waiting.popleft()
            self._num_late = 0
            if job.ttft_ms is not None and self._num_missed + len(self._waiting) > limit:
                due = CLOCK.now - job.ttft_ms / 1e3
                self._num_late = sum(
                    received < due and number not in self._has_first and number >= job.skip
                    for received, number in self._waiting
                )
            if self._num_missed + self._num_late > limit:
                self._stopped.set()

    def _used(self, worker: PaperWorker) -> tuple[float, float]:
        executor = worker.engine.executor
        assert isinstance(executor, PaperExecutor)
        return executor.busy_s, executor.prompt_s

    def _outcome(
        self, seconds: float, before: list[tuple[float, float]], is_whole: bool
    ) -> Outcome:
        counted = [a for a in self._asked[self._job.skip :] if a is not None]
        planned = len(self._job.requests) - self._job.skip
        uses = []
        for worker, (busy, prompts) in zip(self._workers, before, strict=True):
            busy_now, prompts_now = self._used(worker)
            uses.append(
                WorkerUse(
                    worker.worker_id,
                    worker.role,
                    min(1.0, (busy_now - busy) / seconds),
                    min(1.0, (prompts_now - prompts) / seconds),
                    self._kv_peak[worker.worker_id],
                    worker.engine.scheduler.num_preemptions,
                )
            )
        kept = sum(map(self._keeps, counted)) / planned
        seen = max(1, len(counted) + self._num_late)
        digest = hashlib.blake2b(repr(self._asked).encode(), digest_size=8).hexdigest()
        return Outcome(
            kept=kept if is_whole else min(kept, 1 - self._job.stop_beyond),
            missed_ttft=(sum(map(self._is_late, counted)) + self._num_late) / seen,
            missed_tpot=sum(map(self._is_slow, counted)) / seen,
            num_counted=len(counted),
            num_refused=sum(a.ttft_ms is None for a in counted),
            ttft_ms=percentiles([a.ttft_ms for a in counted if a.ttft_ms is not None]),
            tpot_ms=percentiles([a.tpot_ms for a in counted if a.tpot_ms is not None]),
            output_tokens_per_s=self._num_tokens / seconds,
            seconds=seconds,
            uses=tuple(uses),
            is_whole=is_whole,
            digest=digest,
            asked=tuple(counted) if self._job.keeps_all else (),
        )
