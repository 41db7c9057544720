"""Finds the workers that could lend the beginning of a prompt, and how long a fetch would take.

Pure arithmetic over what workers report: the contents of their prefix caches, their links, and what
they already lend for this router. Decides nothing: `predict.Predictor` compares a fetch with
computing, and `router.request.legs` tells the worker.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdserve.protocol.commands import PrefixHint
from pdserve.protocol.handoff import KVCacheMeta
from pdserve.router.fleet.peers import may_pair
from pdserve.router.fleet.prefix_index import PromptBlocks
from pdserve.router.fleet.worker_state import WorkerState

MAX_HOLDERS = 4  # only the workers that hold most of the prompt are considered
FETCH_MS = 3.0  # fixed cost of a fetch: question, answer, blocks, generations
ASSUMED_BYTES_PER_S = 1e9  # rate of an open link that has no self-test yet
# Rate of a link that has never been open, a third of NVLink's. Too high a value only opens links
# whose self-test then shows that they do not pay; with too low a one, fast links are never opened.
HOPED_BYTES_PER_S = 100e9
# a lookup of holders stays valid this long: choosing, refusing and sending share one
SAME_MOMENT_S = 0.05


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker that reported that it holds the first `num_tokens` of the prompt.

    `meta` describes its KV cache.
    """

    worker: WorkerState
    meta: KVCacheMeta
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixFetch:
    """A fetch of a prefix from another worker."""

    holder: Holder
    num_tokens: int  # Tokens of the whole prefix.
    num_new: int  # Those of them that the fetching worker lacks.
    ms: float  # Time until they arrive, after what the holder already lends.
    rate: float  # Bytes per second.

    @property
    def hint(self) -> PrefixHint:
        meta = self.holder.meta
        return PrefixHint(meta.engine_id, meta.incarnation, self.num_tokens)

    def note_sent(self, now: float) -> None:
        """Notes that the worker was told to fetch. Until it is done, the holder's other fetches
        share the rate."""
        num_bytes = int(self.num_new * self.holder.meta.token_bytes)
        self.holder.worker.lending.add(num_bytes, now, self.rate)


def holders_of(
    prompt: PromptBlocks,
    workers: Iterable[WorkerState],
    cached_tokens: Callable[[WorkerState], int],
    now: float,
) -> list[Holder]:
    """Returns the workers that hold most of the prompt, those with the most tokens first.

    What a worker was only sent does not count, because it may not have computed it yet.
    `cached_tokens` gives a cheap upper bound of what a worker holds.
    """
    if prompt.holders is not None and now < prompt.holders[0] + SAME_MOMENT_S:
        return prompt.holders[1]
    likely = [
        (tokens, worker)
        for worker in workers
        if worker.hello.fetches_prefixes
        and not worker.draining
        and (tokens := cached_tokens(worker))
    ]
    likely.sort(key=lambda pair: -pair[0])
    found = []
    for _, worker in likely[:MAX_HOLDERS]:
        hello = worker.hello
        told = prompt.num_cached_tokens(
            worker.cached, hello.rows_digest, hello.block_size, math.inf
        )
        if told and worker.kv_cache is not None:
            found.append(Holder(worker, worker.kv_cache, told))
    found.sort(key=lambda holder: -holder.num_tokens)
    prompt.holders = now, found
    return found


def fetch_of(
    worker: WorkerState, holder: Holder, num_cached: int, num_prompt_tokens: int, now: float
) -> PrefixFetch | None:
    """Returns what the worker would fetch from `holder`; None if it would gain nothing.

    The worker itself holds `num_cached` tokens. The link may still have to be opened: then its time
    is what may be hoped for. Only blocks that are whole in both block sizes move, and the last
    token is always computed.
    """
    theirs, hello = holder.worker.hello, worker.hello
    if (
        not hello.fetches_prefixes
        or not may_pair(holder.worker, worker)
        or theirs.rows_digest != hello.rows_digest
    ):
        return None
    step = max(theirs.block_size, hello.block_size)
    num_tokens = min(holder.num_tokens, num_prompt_tokens - 1) // step * step
    num_new = num_tokens - num_cached
    if num_new <= 0:
        return None
    rate = worker.link_rate(holder.worker)
    if not rate:
        is_open = worker.is_connected_to(holder.worker)
        rate = ASSUMED_BYTES_PER_S if is_open else HOPED_BYTES_PER_S
    num_bytes = holder.worker.lending.left(now, rate) + num_new * holder.meta.token_bytes
    return PrefixFetch(holder, num_tokens, num_new, FETCH_MS + 1000 * num_bytes / rate, rate)
