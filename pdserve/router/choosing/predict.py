"""Predicts how many milliseconds a worker needs for a request: its queue, the prompt, the transfer,
its decodes, and its memory.

A paced worker computes prompts at the speed that its decodes leave (`router.choosing.paced`), and
every prediction here uses that speed. So choosing a worker, refusing a request, draining a queue
and scaling counts all predict the same. Pure arithmetic over what workers report;
docs/design/routing.md says where the constants come from. Decides nothing: `router.choosing.choose`
does.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from pdserve.protocol.prompt_work import prompt_work
from pdserve.router.choosing.holders import PrefixFetch, fetch_of, holders_of
from pdserve.router.choosing.paced import base_step_ms, prompt_speed, top_speed
from pdserve.router.fleet.prefix_index import PromptBlocks
from pdserve.router.fleet.worker_state import Earliness, WorkerState

# prefill speed while nobody has measured one: between a CPU's 2,000 and an H200's 45,000
ASSUMED_TOKENS_PER_S = 10_000.0
ASSUMED_BYTES_PER_S = 1e9  # rate of a link that has no self-test yet
POOL_BYTES_PER_S = 5e9  # shared memory on a CPU gives 7 to 8, and the lookup takes time too
ASSUMED_BYTES = 131_072  # KV bytes per token where no worker reports them: Llama-8B's
# speeds within this factor count as equal. Otherwise one worker would get everything, only because
# it happened to measure a higher speed
ALIKE = 1.5
# a decoding sequence costs its neighbours as much time as this number of prompt tokens
DECODE_TOKENS = 256
# a prompt waits for the end of the step under way, and for one that is planned already
STEPS_AHEAD = 1.5
SAMPLED = 64  # the typical speed is taken from this number of workers, or up to twice as many
NO_BLOCKS_MS = 1000.0  # time until running sequences have freed the blocks of a whole request


@dataclass(frozen=True, slots=True)
class Forecast:
    """A prediction of when a prompt's first token comes."""

    wait_ms: float  # Time spent behind the work that is there already.
    own_ms: float  # Time to compute the prompt.
    worker: str  # Id of the worker that would compute it.
    saved_ms: float = 0.0  # By how much both are shorter because its streams have saved up time.
    earliness: Earliness | None = None  # Learns from this forecast; None: it teaches no worker.

    @property
    def total_ms(self) -> float:
        return self.wait_ms + self.own_ms

    @property
    def factor(self) -> float:
        """The factor that first tokens of this worker have taught until now."""
        return 1.0 if self.earliness is None else self.earliness.factor


class Predictor:
    """Predictions as of one moment, in which no worker's state may change.

    If `prompt` is None, only the prompt's length is known, so nothing of it counts as cached.
    """

    def __init__(
        self,
        workers: Iterable[WorkerState],
        prompt: PromptBlocks | None,
        num_prompt_tokens: int,
        now: float,
    ) -> None:
        self._workers = workers = list(workers)
        measured, self._has_sure = _measured_speeds(workers)
        self.is_measured = bool(measured)
        self._typical = median(measured) if measured else ASSUMED_TOKENS_PER_S
        self._prompt = prompt
        self._num_prompt_tokens = num_prompt_tokens
        self._now = now
        self._speeds: dict[str, float] = {}
        self._cached: dict[str, int] = {}
        self._pooled: dict[tuple[str, str, int], int] = {}
        self._fetches: dict[str, PrefixFetch | None] = {}

    def speed(self, worker: WorkerState) -> float:
        """Returns prompt tokens per second of one of the worker's homes, beside its decodes if it
        paces its steps."""
        known = self._speeds.get(worker.worker_id)
        if known is None:
            known = prompt_speed(worker, self.full_speed(worker))
            self._speeds[worker.worker_id] = known
        return known

    def full_speed(self, worker: WorkerState) -> float:
        """Returns prompt tokens per second of one of the worker's homes when nothing decodes.

        This is the worker's own speed if it differs from the others' by more than measurements do;
        otherwise it is the typical speed. A vague speed counts only if it is faster, unless all are
        vague: a few slow prompts must not keep all others away for good.
        """
        told = worker.snapshot
        if told is None:
            return self._typical
        own = told.prefill_tokens_per_s
        if told.is_prefill_speed_vague and self._has_sure:
            own = max(own, self._typical)
        return own if own and not 1 / ALIKE <= own / self._typical <= ALIKE else self._typical

    def cached_tokens(self, worker: WorkerState) -> int:
        """Number of prompt tokens already in this worker's prefix cache."""
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
        """Number of prompt tokens that the worker will load from its KV pool. It never asks for
        less than a chunk."""
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
        """Returns the fetch from another worker's prefix cache that completes the prompt soonest.

        Returns None if computing, or the worker's KV pool, is at least as fast.
        """
        if worker.worker_id not in self._fetches:
            best = min(self._fetchable(worker, True), key=self._fetch_key(worker), default=None)
            self._fetches[worker.worker_id] = best
        return self._fetches[worker.worker_id]

    def wished_holder(self, worker: WorkerState) -> WorkerState | None:
        """Returns the worker that this one should connect to, because a fetch from there would save
        more than the fetches possible now."""
        wished = list(self._fetchable(worker, False))
        if not wished:
            return None
        fetch = min(wished, key=self._fetch_key(worker))
        now = self.prefix_fetch(worker)
        if now is not None and self._ms_with(worker, now) <= self._ms_with(worker, fetch):
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

    def _ms_with(
        self, worker: WorkerState, fetch: PrefixFetch, speed: float | None = None
    ) -> float:
        work = work_of(
            worker, self.uncached_tokens(worker) - fetch.num_new, self._num_prompt_tokens
        )
        return 1000 * work / (speed or self.speed(worker)) + fetch.ms

    def _alone_ms(self, worker: WorkerState, speed: float | None = None) -> float:
        """Time without other workers' help: loading from its KV pool, and computing the rest."""
        meta = worker.kv_cache
        size = meta.token_bytes if meta is not None else ASSUMED_BYTES
        pooled = self.fetched_tokens(worker)
        work = work_of(worker, self.uncached_tokens(worker) - pooled, self._num_prompt_tokens)
        own_ms = 1000 * work / (speed or self.speed(worker))
        return own_ms + 1000 * pooled * size / POOL_BYTES_PER_S

    def computed_tokens(self, worker: WorkerState) -> int:
        fetch = self.prefix_fetch(worker)
        fetched = fetch.num_new if fetch is not None else self.fetched_tokens(worker)
        return self.uncached_tokens(worker) - fetched

    def queue_speed(self, worker: WorkerState) -> float:
        """Prompt tokens per second of all homes together, as any free home takes the next one."""
        return self.speed(worker) * worker.num_homes

    def queue_ms(self, worker: WorkerState) -> float:
        """Time until the prompts that wait there are computed."""
        speed = self.queue_speed(worker)
        return 1000 * worker.queue.left(self._now, speed) / speed

    def queue_alone_ms(self, worker: WorkerState) -> float:
        """The same as `queue_ms`, if the worker had no decodes."""
        speed = self.full_speed(worker) * worker.num_homes
        return 1000 * worker.queue.left(self._now, self.queue_speed(worker)) / speed

    def compute_ms(self, worker: WorkerState) -> float:
        """Time until the whole prompt's rows are there.

        They are fetched from another worker or loaded from the KV pool, whichever is faster, and
        the rest is computed.
        """
        return self._rows_ms(worker, self.speed(worker))

    def compute_alone_ms(self, worker: WorkerState) -> float:
        """The same as `compute_ms`, if the worker had no decodes."""
        return self._rows_ms(worker, self.full_speed(worker))

    def _rows_ms(self, worker: WorkerState, speed: float) -> float:
        fetch = self.prefix_fetch(worker)
        if fetch is None:
            return self._alone_ms(worker, speed)
        return self._ms_with(worker, fetch, speed)

    def transfer_ms(self, decode: WorkerState, prefill: WorkerState) -> float:
        """Time to move the rows that `decode` lacks."""
        meta = prefill.kv_cache
        link = decode.peer_status(prefill)
        if meta is None:
            return 0.0
        rate = (
            link.bytes_per_s if link is not None and link.bytes_per_s > 0 else ASSUMED_BYTES_PER_S
        )
        return 1000 * self.uncached_tokens(decode) * meta.token_bytes / rate

    def decode_load_ms(self, worker: WorkerState) -> float:
        """Time that the worker's other sequences will cost this one."""
        full = self.full_speed(worker) * worker.num_homes
        return 1000 * DECODE_TOKENS * worker.num_decodes / full

    def memory_ms(self, worker: WorkerState) -> float:
        """Time that the wait for blocks may take, if every home has too few free ones for the
        prompt."""
        if worker.snapshot is None:
            return 0.0
        needed = -(-self.uncached_tokens(worker) // worker.hello.block_size)
        missing = needed - worker.free_blocks
        return NO_BLOCKS_MS * missing / needed if missing > 0 else 0.0

    def first_token(
        self,
        worker: WorkerState,
        share_ahead: float = 1.0,
        unsent_tokens: float = 0.0,
    ) -> Forecast:
        """Predicts the first token if that worker computes the prompt.

        Both choosing a worker and refusing a request rely on it. `share_ahead` is the share of the
        queue that the prompt does not overtake. `unsent_tokens` counts tokens of prompts that will
        be sent there before this one.
        """
        ahead_ms = share_ahead * (
            self.queue_ms(worker) + 1000 * unsent_tokens / self.queue_speed(worker)
        )
        own_ms = self.compute_ms(worker)
        slack = self._slack_part(worker)
        saved_ms = min(self._burst_ms(worker, slack), slack * (ahead_ms + own_ms))
        own_saved = min(saved_ms, slack * own_ms)
        wait_ms = max(0.0, ahead_ms - (saved_ms - own_saved)) + self.memory_ms(worker)
        own_ms -= own_saved
        if not worker.pace_decodes:
            return Forecast(wait_ms, own_ms, worker.worker_id, saved_ms)
        wait_ms += STEPS_AHEAD * base_step_ms(worker)
        return Forecast(wait_ms, own_ms, worker.worker_id, saved_ms, worker.earliness)

    def _slack_part(self, worker: WorkerState) -> float:
        """Share of a prompt's computing time that it waits for streams; 0 at full speed."""
        return 1 - self.speed(worker) / top_speed(worker, self.full_speed(worker))

    def _burst_ms(self, worker: WorkerState, slack: float) -> float:
        """Time that prompts save because streams have saved up time. `slack` is the worker's
        `_slack_part`.

        The saved time returns as fast as the queue drains, so the rest of the queue shows what is
        used up.
        """
        tokens = worker.pace.burst_tokens if worker.pace is not None else 0
        return 1000 * tokens * slack / self.speed(worker)


def work_of(worker: WorkerState, num_tokens: int, num_prompt_tokens: int) -> float:
    """Returns the work (protocol.prompt_work) of the last num_tokens of a prompt at this worker."""
    pair_tokens = worker.pace.pair_tokens if worker.pace is not None else 0.0
    return prompt_work(num_tokens, num_prompt_tokens - num_tokens, pair_tokens)


def _measured_speeds(workers: Sequence[WorkerState]) -> tuple[list[float], bool]:
    """Returns measured speeds, and whether they are sure.

    They are of the workers that decode nothing, or of all if there are none, as the others have
    measured their prompts beside their decodes. If there are many workers, an even sample is
    enough, unless none in it has measured a speed. Vague speeds count only if the sample has no
    other.
    """
    sample = workers[:: max(1, len(workers) // SAMPLED)]
    plain = [worker for worker in sample if not worker.can_decode]
    for some in (plain, sample):
        if found := [speed for worker in some if (speed := _sure_speed(worker))]:
            return found, True
    for some in (plain, sample, workers):
        if found := [speed for worker in some if (speed := _any_speed(worker))]:
            return found, False
    return [], False


def _sure_speed(worker: WorkerState) -> float:
    """0 if none was measured, or if it is vague."""
    told = worker.snapshot
    if told is None or told.is_prefill_speed_vague:
        return 0.0
    return told.prefill_tokens_per_s


def _any_speed(worker: WorkerState) -> float:
    """Speed of the prompts that the worker has computed, or what its pace has learned. 0: neither
    is known."""
    return worker.snapshot.prefill_tokens_per_s if worker.snapshot is not None else 0.0
