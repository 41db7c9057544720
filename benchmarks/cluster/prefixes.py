"""Are four prefix caches on two hosts as good as one that is as large as all of them? This counts
computed prompt tokens, with and without fetching prefixes from other workers, and with a KV pool.

Two network namespaces are the hosts. Each has two workers (real engines of the demo model on CPU),
and NIXL moves rows over TCP. Two routers serve them over HTTP and get the requests in turn. Every
run starts with empty caches. "ratio" is the number of prompt tokens that the four workers compute,
over that of one ideal LRU cache. That cache is as large as all four together, and answers the same
requests one after another. `--cache` is each worker's KV cache, as a share of the working set (the
different blocks of all prompts).

    python -m benchmarks.cluster.prefixes --out benchmarks/results/prefixes-cpu.jsonl
    python -m benchmarks.cluster.prefixes --load hot --fetch on off
    python -m benchmarks.cluster.prefixes --fetch on off --pool off on --cache 0.0625

The loads are `trace` (closed loop: --clients requests at a time, in the trace's order) and `hot`
(bursts for the same few prefixes). The namespaces need root. A run takes one to five minutes on two
cores.
"""

import argparse
import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.support.markdown import table
from benchmarks.support.places import BENCHMARKS, DEMO
from benchmarks.support.prefix_cluster import NUM_WORKERS, Setting, cluster, workers
from benchmarks.support.prefix_loads import Ask, hot, ideal_computed, traced, working_set
from benchmarks.support.two_hosts import Net, available, two_hosts
from benchmarks.support.worker_process import WorkerProcess
from pdserve.bench.option_values import POSITIVE, SEED, integer
from pdserve.bench.record import Json, append, check_writable, circumstances, percentiles
from pdserve.bench.replay.send import Target
from pdserve.bench.replay.trace import read_trace
from pdserve.bench.sse_client import CompletionClient, Outcome

TRACE = BENCHMARKS / "traces" / "mooncake_synthetic_trace.jsonl.xz"
TIMEOUT_S = 300.0
TOLD_S = 0.5  # until then, workers have reported to routers what a burst left in the caches
MIN_BLOCKS = 160  # a worker's KV cache must hold the longest prompt and its answer

Bursts = list[list[Ask]]


def blocks_of(asks: Sequence[Ask], share: float) -> int:
    """Returns the KV blocks of each worker: this share of the working set, but at least enough for
    one long request."""
    return max(MIN_BLOCKS, round(share * working_set(asks)))


def measure(setting: Setting, net: Net, bursts: Bursts, clients: int) -> Json:
    """Measures one run with new workers. Bursts are sent one after another, each in its order by
    `clients` clients. Raises ValueError if a request fails."""
    with workers(setting, net) as running:
        return asyncio.run(_measure(setting, running, bursts, clients))


async def _measure(
    setting: Setting, running: Sequence[WorkerProcess], bursts: Bursts, clients: int
) -> Json:
    asks = list(itertools.chain.from_iterable(bursts))
    num_blocks = NUM_WORKERS * (setting.num_kv_blocks - 1)  # block 0 of each is never used
    ideal = ideal_computed(asks, num_blocks)
    async with cluster(setting, running) as found, contextlib.AsyncExitStack() as stack:
        routers = [
            await stack.enter_async_context(CompletionClient(url, TIMEOUT_S)) for url in found.urls
        ]
        began = time.perf_counter()
        outcomes = await _send(routers, found.urls[0], bursts, clients)
        seconds = time.perf_counter() - began
        counts = await found.counts()
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise ValueError(f"{len(errors)} of {len(outcomes)} requests failed: {errors[0]}")
    computed = counts["pdserve_engine_prompt_tokens_total"]
    return {
        "requests": len(asks),
        "prompt_tokens": sum(len(ask.prompt) for ask in asks),
        "working_set_blocks": working_set(asks),
        "kv_blocks": num_blocks,
        "computed": int(computed),
        "ideal": ideal,
        "ratio": round(computed / ideal, 4),
        "fetched": int(counts.get("pdserve_prefix_fetch_tokens_total", 0)),
        "fetched_bytes": int(counts.get("pdserve_prefix_fetch_bytes_total", 0)),
        "fetch_mean_ms": _mean_ms(counts, "pdserve_prefix_fetch_seconds"),
        "fetches": _outcomes(counts, "pdserve_prefix_fetches_total/"),
        "pool": _outcomes(counts, "pdserve_kv_pool_requests_total/"),
        "pool_bytes": _outcomes(counts, "pdserve_kv_pool_bytes_total/"),
        "pool_evicted_chunks": int(counts.get("pdserve_kv_pool_evicted_chunks_total", 0)),
        "preemptions": int(counts.get("pdserve_num_preemptions_total", 0)),
        "ttft_ms": percentiles([outcome.ttft for outcome in outcomes], (50, 90, 99)),
        "seconds": round(seconds, 1),
    }


def _mean_ms(counts: dict[str, float], name: str) -> float | None:
    """Returns the mean of a histogram of seconds in ms. None: nothing was observed."""
    num = counts.get(f"{name}_count", 0.0)
    return round(1000 * counts[f"{name}_sum"] / num, 1) if num else None


def _outcomes(counts: dict[str, float], start: str) -> Json:
    return {
        name.removeprefix(start): int(n) for name, n in counts.items() if name.startswith(start)
    }


async def _send(
    routers: Sequence[CompletionClient], url: str, bursts: Bursts, clients: int
) -> list[Outcome]:
    """Sends all bursts. Returns outcomes in no particular order."""
    target = Target(url, DEMO.name, TIMEOUT_S, clients, 0, 0)
    outcomes: list[Outcome] = []
    turns = itertools.cycle(routers)
    with tqdm(total=sum(map(len, bursts)), unit="request", leave=False, disable=None) as bar:
        for burst in bursts:

            async def one_client(waiting: Iterator[Ask]) -> None:
                for ask in waiting:
                    body = target.body(DEMO.name, ask.prompt, ask.num_answer)
                    outcomes.append(await next(turns).complete(body))
                    bar.update()

            waiting = iter(burst)
            async with asyncio.TaskGroup() as group:
                for _ in range(min(clients, len(burst))):
                    group.create_task(one_client(waiting))
            await asyncio.sleep(TOLD_S)
    return outcomes


def main() -> int:
    """Runs the settings one after another. Returns 1 if one could not be measured, otherwise 0."""
    options = _options()
    check_writable(options.out)
    if reason := available():
        print(f"prefixes.py: cannot make two hosts here: {reason}", file=sys.stderr)
        return 1
    logging.getLogger("pdserve").setLevel(logging.ERROR)
    try:
        if options.load == "trace":
            bursts = [traced(read_trace(options.trace).requests, options.one_in, options.seed)]
        else:
            bursts = hot(options.prefixes, options.at_once, options.rounds, options.seed)
        clients = options.clients if options.load == "trace" else options.at_once
        rows = []
        with two_hosts(options.mbit) as net:
            for pool, fetch in itertools.product(options.pool, options.fetch):
                rows.append(_row(options, net, bursts, clients, fetch == "on", pool == "on"))
    except (ValueError, OSError) as error:
        print(f"prefixes.py: {error}", file=sys.stderr)
        return 1
    print(table(HEAD, map(_cells, rows)))
    return 0


def _row(
    options: argparse.Namespace, net: Net, bursts: Bursts, clients: int, fetch: bool, pool: bool
) -> Json:
    asks = list(itertools.chain.from_iterable(bursts))
    setting = Setting(
        num_kv_blocks=blocks_of(asks, options.cache),
        fetch=fetch,
        pool_gib=options.pool_gib if pool else None,
        split=options.split,
    )
    given = {
        "benchmark": "prefixes",
        "load": options.load,
        "clients": clients,
        "split": options.split,
        "cache": options.cache,
        "fetch": fetch,
        "pool_gib": setting.pool_gib,
    }
    row = circumstances() | given | measure(setting, net, bursts, clients)
    append(options.out, row)
    return row


HEAD = [
    "load",
    "fetch",
    "pool",
    "KV blocks",
    "computed",
    "one ideal cache",
    "ratio",
    "fetched",
    "pool: found, missed; stored; evicted chunks",
    "TTFT p50 / p90, ms",
    "s",
]


def _cells(row: Json) -> list[str]:
    pool = row["pool"]
    return [
        row["load"],
        "on" if row["fetch"] else "off",
        "off" if row["pool_gib"] is None else f"{row['pool_gib']:g} GiB",
        f"{row['kv_blocks']:,}",
        f"{row['computed']:,}",
        f"{row['ideal']:,}",
        f"{row['ratio']:.3f}",
        f"{row['fetched']:,}",
        f"{pool.get('retrieve/done', 0):,}, {pool.get('retrieve/miss', 0):,}; "
        f"{pool.get('store/done', 0):,}; {row['pool_evicted_chunks']:,}",
        f"{row['ttft_ms']['p50']:,.0f} / {row['ttft_ms']['p90']:,.0f}",
        f"{row['seconds']:.0f}",
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    switch = ("on", "off")
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    parser.add_argument("--load", choices=("trace", "hot"), default="trace")
    parser.add_argument("--fetch", nargs="+", choices=switch, default=["on", "off"])
    parser.add_argument(
        "--pool", nargs="+", choices=switch, default=["off"], help="run a KV pool on each host"
    )
    parser.add_argument(
        "--cache", type=POSITIVE, default=0.25, help="KV cache of each worker; see above"
    )
    parser.add_argument(
        "--pool-gib", type=POSITIVE, default=0.25, help="memory of each host's KV pool"
    )
    parser.add_argument(
        "--split",
        action="store_true",
        help="use one worker of each host for prefill, one to decode",
    )
    parser.add_argument("--mbit", type=integer(1), help="limit of the link from host 1 to host 2")
    parser.add_argument("--seed", type=SEED, default=0)
    group = parser.add_argument_group("trace")
    group.add_argument("--trace", type=Path, default=TRACE, help="file in Mooncake's format")
    group.add_argument(
        "--one-in", type=integer(1), default=8, help="send one in this many of its conversations"
    )
    group.add_argument("--clients", type=integer(1), default=4)
    group = parser.add_argument_group("hot")
    group.add_argument("--prefixes", type=integer(1), default=8)
    group.add_argument("--at-once", type=integer(1), default=16, help="requests per burst")
    group.add_argument("--rounds", type=integer(1), default=2, help="bursts per prefix")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
