"""How soon does a first token come if another worker has the prompt's beginning cached? This
measures it with fetching prefixes from other workers, and without.

    python -m benchmarks.cluster.fetched_prefix --out benchmarks/results/fetched-prefix-h200.jsonl
    python -m benchmarks.cluster.fetched_prefix --gpus 0 --model demo/pdserve-demo --lengths 512

`pdserve up` serves two workers that do whole requests (`mode: aggregated`), on a GPU each. Requests
go to them by turns (`router.policy: round-robin`). Each prefix is new, and is sent twice, with
another end: the first request computes it at one worker, and the second comes to the other one.
Nothing else runs meanwhile. A first pair of each length, which may open the link, is not counted.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from benchmarks.support.markdown import table
from benchmarks.support.places import SHAPES
from benchmarks.support.served_cluster import (
    await_workers,
    cluster_yaml,
    free_port,
    metrics,
    serving,
)
from benchmarks.support.stand_in_tokenizer import servable_folder
from pdserve.bench.option_values import integer
from pdserve.bench.record import Json, append, check_writable, circumstances, percentiles
from pdserve.bench.replay.send import Target
from pdserve.bench.sse_client import CompletionClient

START_S = 400.0
TIMEOUT_S = 60.0
NAME = "fetched-prefix"
NUM_WORKERS = 2
TOLD_S = 0.5  # until then, the first worker has told the router what it has cached
PUSH_S = 1.5  # workers push their counts once per second
END = 16  # tokens after the prefix
NUM_OUT = 2
TOKEN_IDS = range(100, 1500)


def document(model: Path, num_gpus: int, fetch: bool, port: int) -> Json:
    """Returns a cluster.yaml."""
    return cluster_yaml(
        {
            "mode": "aggregated",
            "model": {"path": str(model), "name": NAME, "load_format": "dummy"},
            "router": {"policy": "round-robin"},
            "decode": {"num_gpus": num_gpus, "replicas": NUM_WORKERS},
            "transfer": {"fetch_prefixes": fetch},
        },
        port,
    )


async def measure(url: str, lengths: list[int], rounds: int) -> list[Json]:
    """Returns the times of each length. Raises ValueError if a request fails."""
    draw = random.Random(0)
    rows = []
    async with CompletionClient(url, TIMEOUT_S) as client:
        target = Target(url, NAME, TIMEOUT_S, None, 0, 0)

        async def first_token_s(prompt: list[int]) -> float:
            outcome = await client.complete(target.body(NAME, prompt, NUM_OUT))
            if outcome.error is not None:
                raise ValueError(f"a request failed: {outcome.error}")
            await asyncio.sleep(TOLD_S)
            return outcome.ttft

        for length in lengths:
            new, again = [], []
            for number in range(rounds + 1):
                if number == 1:
                    await asyncio.sleep(PUSH_S)
                    before = _fetched(url)
                prefix = draw.choices(TOKEN_IDS, k=length)
                new.append(await first_token_s(prefix + draw.choices(TOKEN_IDS, k=END)))
                again.append(await first_token_s(prefix + draw.choices(TOKEN_IDS, k=END)))
            await asyncio.sleep(PUSH_S)
            rows.append(
                {
                    "prefix_tokens": length,
                    "new_ttft_ms": percentiles(new[1:], (50, 90)),
                    "again_ttft_ms": percentiles(again[1:], (50, 90)),
                    "fetched_tokens": int(_fetched(url) - before),
                }
            )
    return rows


def _fetched(url: str) -> float:
    return sum(sample.value for sample in metrics(url, "pdserve_prefix_fetch_tokens_total"))


def main() -> int:
    options = _options()
    check_writable(options.out)
    rows = []
    with tempfile.TemporaryDirectory(prefix="pdserve-fetched-") as scratch:
        model = options.model
        if not (model / "tokenizer.json").exists():
            model = servable_folder(model, Path(scratch))
        for fetch in (True, False):
            port = free_port()
            made = document(model.resolve(), options.gpus, fetch, port)
            try:
                with serving(made, port, deadline_s=START_S) as server:
                    await_workers(server.url, NUM_WORKERS, START_S)
                    found = asyncio.run(measure(server.url, options.lengths, options.rounds))
            except (ValueError, OSError) as error:
                print(f"fetched_prefix.py: {error}", file=sys.stderr)
                return 1
            own = {"benchmark": "fetched_prefix", "fetch": fetch, "model": options.model.name}
            for row in found:
                append(options.out, circumstances(options.commit) | own | row)
                rows.append(_cells(fetch, row))
    head = ["fetches", "prefix", "TTFT when new, ms", "TTFT at the other worker, ms", "fetched"]
    print(table(head, rows))
    return 0


def _cells(fetch: bool, row: Json) -> list[str]:
    return [
        "on" if fetch else "off",
        f"{row['prefix_tokens']:,}",
        f"{row['new_ttft_ms']['p50']:.1f}",
        f"{row['again_ttft_ms']['p50']:.1f}",
        f"{row['fetched_tokens']:,}",
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    parser.add_argument("--model", type=Path, default=SHAPES / "llama-3.1-8b")
    parser.add_argument("--gpus", type=int, choices=(0, 1), default=1, help="of a worker")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=integer(1),
        default=[256, 1024, 4096, 8192, 15000],
        help="tokens of the prefixes",
    )
    parser.add_argument("--rounds", type=integer(1), default=10, help="prefixes of each length")
    parser.add_argument("--commit", help="revision noted in results (default: git's)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
