"""How many milliseconds a worker will need for a request: its queue, the prompt, the transfer, its
decodes, its memory.

A worker that paces its steps computes prompts at the speed that its decodes leave
(`router.choosing.paced`); everything here counts with it, so what chooses a worker, refuses a
request, drains a queue, and scales counts predicts the same. Pure arithmetic over what workers
report (docs/design/routing.md says where the constants come from). Decides nothing: that is
`router.choosing.choose`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from pdserve.router.choosing.holders import PrefixFetch, fetch_of, holders_of
from pdserve.router.choosing.paced import prompt_speed
from pdserve.router.fleet.prefix_index import PromptBlocks
from pdserve.router.fleet.worker_state import WorkerState

# of prefill, while nobody has measured: between a CPU's 2,000 and an H200's 45,000
ASSUMED_TOKENS_PER_S = 10_000.0
ASSUMED_BYTES_PER_S = 1e9  # of a link without self-test
POOL_BYTES_PER_S = 5e9  # 7 to 8 through shared memory on a CPU, and the lookup
ASSUMED_BYTES = 131_072  # of a token's rows, where nobody says: Llama-8B's
# speeds that differ by less are taken for one: else the one that happened to measure more gets it
# all
ALIKE = 1.5
# a sequence being decoded costs its neighbours as much time as so many prompt tokens
DECODE_TOKENS = 256
SAMPLED = 64  # workers, or up to twice as many, whose speeds give the typical one
NO_BLOCKS_MS = 1000.0  # until running sequences have freed the blocks of a whole request


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of a prompt's first token. wait_ms: for what was there before; own_ms: to compute the prompt.
    worker: the id of the one that would compute it."""

    wait_ms: float
    own_ms: float
    worker: str

    @property
    def total_ms(self) -> float:
        return self.wait_ms + self.own_ms


class Predictor:
    """One moment's view. prompt None: nothing is known of the prompt but its length, so nothing of
    it is cached."""

    def __init__(
        self,
        workers: Iterable[WorkerState],
        prompt: PromptBlocks | None,
        num_prompt_tokens: int,
        now: float,
    ) -> None:
        self._workers = workers = list(workers)
        measured = _measured_speeds(workers)
        self.is_measured = bool(measured)
        self._typical = median(measured) if measured else ASSUMED_TOKENS_PER_S
        self._prompt = prompt
        self._num_prompt_tokens = num_prompt_tokens
        self._now = now
        self._cached: dict[str, int] = {}
        self._pooled: dict[tuple[str, str, int], int] = {}
        self._fetches: dict[str, PrefixFetch | None] = {}

    def speed(self, worker: WorkerState) -> float:
        """Prompt tokens per second of one of the worker's homes, beside its decodes where it paces
        its steps."""
        return prompt_speed(worker, self.full_speed(worker))

    def full_speed(self, worker: WorkerState) -> float:
        """Prompt tokens per second of one of the worker's homes when nothing decodes: its own where
        it differs from what others do by more than measuring."""
        own = _measured_speed(worker)
        return own if own and not 1 / ALIKE <= own / self._typical <= ALIKE else self._typical

    def cached_tokens(self, worker: WorkerState) -> int:
        """Of the prompt, that need no computing there."""
        if self._prompt is None:
            return 0
        known = self._cached.get(worker.worker_id)
        if known is None:
            hello = worker.hello
            known = self._prompt.num_cached_tokens(
                worker.cached, hello.rows_digest, hello.block_size, self._now
            )
            self._cached[worker.worker_id] = known
        return known

    def uncached_tokens(self, worker: WorkerState) -> int:
        return self._num_prompt_tokens - self.cached_tokens(worker)

    def fetched_tokens(self, worker: WorkerState) -> int:
        """Of the prompt, that the worker will take from its KV pool: it asks for no less than a
        chunk."""
        if self._prompt is None or worker.pooled is None:
            return 0
        hello = worker.hello
        cached = self.cached_tokens(worker)
        kind = hello.kv_pool, hello.rows_digest, hello.block_size
        known = self._pooled.get(kind)
        if known is None:
            known = self._prompt.num_pooled_tokens(worker.pooled, *kind[1:], hello.pool_chunk)
            self._pooled[kind] = known
        return known - cached if known - cached >= hello.pool_chunk else 0

    def prefix_fetch(self, worker: WorkerState) -> PrefixFetch | None:
        """What the worker should fetch from another one's prefix cache: what gives the whole
        prompt's rows soonest; None where nothing beats computing, or its KV pool."""
        if worker.worker_id not in self._fetches:
            best = min(self._fetchable(worker, True), key=self._fetch_key(worker), default=None)
            self._fetches[worker.worker_id] = best
        return self._fetches[worker.worker_id]

    def wished_holder(self, worker: WorkerState) -> WorkerState | None:
        """Who the worker should connect to, since fetching from there would pay more than what it
        can do now."""
        wished = list(self._fetchable(worker, False))
        if not wished:
            return None
        fetch = min(wished, key=self._fetch_key(worker))
        now = self.prefix_fetch(worker)
        if now is not None and now.num_tokens >= fetch.num_tokens:
            return None
        return fetch.holder.worker

    def _fetch_key(self, worker: WorkerState) -> Callable[[PrefixFetch], float]:
        return lambda fetch: self._ms_with(worker, fetch)

    def _fetchable(self, worker: WorkerState, is_connected: bool) -> Iterator[PrefixFetch]:
        if self._prompt is None or not worker.hello.fetches_prefixes:
            return
        holders = holders_of(self._prompt, self._workers, self.cached_tokens, self._now)
        cached = self.cached_tokens(worker)
        for holder in holders:
            if (
                holder.num_tokens <= cached
                or worker.is_connected_to(holder.worker) is not is_connected
            ):
                continue
            fetch = fetch_of(worker, holder, cached, self._num_prompt_tokens, self._now)
            if fetch is not None and self._ms_with(worker, fetch) < self._alone_ms(worker):
                yield fetch

    def _ms_with(self, worker: WorkerState, fetch: PrefixFetch) -> float:
        computed = self.uncached_tokens(worker) - fetch.num_new
        return 1000 * computed / self.speed(worker) + fetch.ms

    def _alone_ms(self, worker: WorkerState) -> float:
        """Without other workers: its KV pool, and computing."""
        meta = worker.kv_cache
        size = meta.token_bytes if meta is not None else ASSUMED_BYTES
        pooled = self.fetched_tokens(worker)
        computed = self.uncached_tokens(worker) - pooled
        return 1000 * computed / self.speed(worker) + 1000 * pooled * size / POOL_BYTES_PER_S

    def computed_tokens(self, worker: WorkerState) -> int:
        fetch = self.prefix_fetch(worker)
        fetched = fetch.num_new if fetch is not None else self.fetched_tokens(worker)
        return self.uncached_tokens(worker) - fetched

    def queue_speed(self, worker: WorkerState) -> float:
        """Prompt tokens a second of all homes: the one that is free takes the next prompt."""
        return self.speed(worker) * worker.num_homes

    def queue_ms(self, worker: WorkerState) -> float:
        """Until the prompts that are there already are computed."""
        speed = self.queue_speed(worker)
        return 1000 * worker.queue.left(self._now, speed) / speed

    def queue_alone_ms(self, worker: WorkerState) -> float:
        """The same, if it had no decodes."""
        speed = self.full_speed(worker) * worker.num_homes
        return 1000 * worker.queue.left(self._now, self.queue_speed(worker)) / speed

    def compute_ms(self, worker: WorkerState) -> float:
        """Until the whole prompt's rows are there: fetched from another worker or from the KV pool,
        whichever is better, and computed."""
        fetch = self.prefix_fetch(worker)
        return self._alone_ms(worker) if fetch is None else self._ms_with(worker, fetch)

    def transfer_ms(self, decode: WorkerState, prefill: WorkerState) -> float:
        """To move the rows that `decode` lacks."""
        meta = prefill.kv_cache
        link = decode.peer_status(prefill)
        if meta is None:
            return 0.0
        rate = (
            link.bytes_per_s if link is not None and link.bytes_per_s > 0 else ASSUMED_BYTES_PER_S
        )
        return 1000 * self.uncached_tokens(decode) * meta.token_bytes / rate

    def decode_load_ms(self, worker: WorkerState) -> float:
        """What the sequences beside it in its home will cost this one."""
        full = self.full_speed(worker) * worker.num_homes
        return 1000 * DECODE_TOKENS * worker.num_decodes / full

    def memory_ms(self, worker: WorkerState) -> float:
        """What the wait for blocks may cost, when too few are free for the prompt in every home."""
        if worker.snapshot is None:
            return 0.0
        needed = -(-self.uncached_tokens(worker) // worker.hello.block_size)
        missing = needed - worker.free_blocks
        return NO_BLOCKS_MS * missing / needed if missing > 0 else 0.0

    def first_token(
        self, worker: WorkerState, share_ahead: float = 1.0, unsent_tokens: float = 0.0
    ) -> Forecast:
        """When that worker computes the prompt: what chooses a worker and what refuses a request.
        share_ahead: of its queue, what the prompt does not overtake. unsent_tokens: of prompts that
        will be sent there before this one."""
        ahead_ms = share_ahead * (
            self.queue_ms(worker) + 1000 * unsent_tokens / self.queue_speed(worker)
        )
        own_ms = self.compute_ms(worker)
        saved_ms = min(self._burst_ms(worker), self._slack_part(worker) * (ahead_ms + own_ms))
        own_saved = min(saved_ms, self._slack_part(worker) * own_ms)
        wait_ms = max(0.0, ahead_ms - (saved_ms - own_saved)) + self.memory_ms(worker)
        return Forecast(wait_ms, own_ms - own_saved, worker.worker_id)

    def _slack_part(self, worker: WorkerState) -> float:
        """Share of the time that a prompt takes there, in which it waits for streams: 0 where it
        has full speed."""
        return 1 - self.speed(worker) / self.full_speed(worker)

    def _burst_ms(self, worker: WorkerState) -> float:
        """What prompts save there because streams have saved up time. The queue drains at the speed
        at which they do so again, so what is left of it says what is used up."""
        tokens = worker.pace.burst_tokens if worker.pace is not None else 0
        return 1000 * tokens * self._slack_part(worker) / self.speed(worker)


def _measured_speeds(workers: Iterable[WorkerState]) -> list[float]:
    """Of all workers; of an even sample where they are many, unless that has measured nothing."""
    workers = list(workers)
    sample = workers[:: max(1, len(workers) // SAMPLED)]
    found = [speed for worker in sample if (speed := _measured_speed(worker))]
    return found or [speed for worker in workers if (speed := _measured_speed(worker))]


def _measured_speed(worker: WorkerState) -> float:
    return worker.snapshot.prefill_tokens_per_s if worker.snapshot is not None else 0.0
