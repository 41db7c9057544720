"""Runs all measurements of a host with two or four H200s, one command after another.

    python -m benchmarks.several_gpus --gpus 2 --out two-gpus               # all, an hour or less
    python -m benchmarks.several_gpus --gpus 2 --out two-gpus --only sums   # parts by name
    python -m benchmarks.several_gpus --gpus 4 --print                      # only the commands

The predictions for each part are in results/cost-model.jsonl, which `benchmarks.engine.cost_model
--all` wrote. JSON lines go to OUT/PART.jsonl. A part that needs engine options that this tree does
not have (data_parallel, expert_parallel) is left out with a message.

Parts with a cluster start `pdserve up` here and load it by `pdserve bench serve`. The workers'
metrics are saved after the load, and say what was moved in what time. Hand-offs between unlike
degrees need more ranks than there are GPUs, so ranks share a GPU, and TTFT is that of a shared GPU.
If a part fails, the others still run, and the exit status is 1.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.places import BENCHMARKS, SHAPES
from benchmarks.support.served_cluster import (
    CLI,
    await_workers,
    cluster_yaml,
    free_port,
    metrics,
    run_command,
    serving,
)
from benchmarks.support.stand_in_tokenizer import servable_folder
from pdserve.bench.record import append, circumstances
from pdserve.configs.engine import EngineConfig
from pdserve.configs.schema import ClusterConfig

LLAMA_8B, LLAMA_70B, QWEN = "llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b"
LLAMA_8B_FP8 = "llama-3.1-8b-fp8"
QWEN_TABLE = str(BENCHMARKS / "targets" / "qwen3-30b-a3b.toml")
START_S = 600.0
ENGINE = {"max_num_batched_tokens": 8192, "max_num_seqs": 512, "enable_prefix_caching": False}


@dataclass(frozen=True)
class Part:
    """One part: a number of commands, and the cluster that they need."""

    id: str
    # words after `python -m`, or after `pdserve` if the part has a cluster
    commands: tuple[tuple[str, ...], ...]
    model: str = ""
    cluster: Mapping[str, Any] = field(default_factory=dict)  # args of its cluster.yaml

    @property
    def num_workers(self) -> int:
        roles = [self.cluster.get(role) for role in ("prefill", "decode")]
        return sum(worker["replicas"] for worker in roles if worker)

    @property
    def missing(self) -> set[str]:
        """Engine options that the part needs and this tree does not have."""
        flags = {word for command in self.commands for word in command if word.startswith("--")}
        later = {"--data-parallel", "--expert-parallel"}
        known = {f"--{name.replace('_', '-')}" for name in EngineConfig.model_fields}
        return (flags & later) - known


def table_rows(part: str, model: str, *options: str) -> Part:
    """Makes a part of the offline rows of a model's table, with random weights."""
    table = ("--table", QWEN_TABLE) if model == QWEN else ()
    command = ("benchmarks.targets", *table, "--model", str(SHAPES / model), "--only", "offline")
    return Part(part, ((*command, "--repeats", "2", *options),))


def load(*options: str) -> tuple[str, ...]:
    return ("bench", "serve", *options)


def split(
    prefill: Mapping[str, Any], decode: Mapping[str, Any], rule: str = "always"
) -> dict[str, Any]:
    """Makes the `args` of a disaggregated cluster. `rule` says which prompts go to prefill
    workers."""
    return {
        "mode": "disaggregated",
        "engine": ENGINE,
        "router": {"split": rule},
        "prefill": prefill,
        "decode": decode,
    }


def whole(decode: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the `args` of a cluster whose workers do whole requests."""
    return {"mode": "aggregated", "engine": ENGINE, "decode": decode}


def worker(replicas: int, num_gpus: float, **engine: Any) -> dict[str, Any]:
    return {"replicas": replicas, "num_gpus": num_gpus, "engine": engine}


def clients(count: int, num_requests: int, shape: str) -> tuple[str, ...]:
    """Makes the command of a closed loop. `shape` is (tokens of a prompt)x(tokens of its
    answer)."""
    return load("--clients", str(count), *requests(num_requests, shape))


def poisson(rate: int, num_requests: int, shape: str) -> tuple[str, ...]:
    """Makes the command of an open loop of `rate` requests per second."""
    return load("--rate", str(rate), *requests(num_requests, shape))


def requests(count: int, shape: str) -> tuple[str, ...]:
    input_len, output_len = shape.split("x")
    return ("--num-requests", str(count), "--input-len", input_len, "--output-len", output_len)


def hand_off(part: str, model: str, prefill: str = "", decode: str = "", decodes: int = 1) -> Part:
    """Makes a part that moves prompts of 8,192 tokens from P to D, without Ray. `prefill` and
    `decode` are engine options of each, as NAME=VALUE words. Several D pull together."""
    command = (
        *("benchmarks.transfer.hand_off", "--model", str(SHAPES / model), "--load-format", "dummy"),
        *("--parts", "requests", *(["together", "--decodes", str(decodes)] if decodes > 1 else [])),
        *("--tokens", "8192", "--repeats", "5", "--batch", "4"),
        *("--max-num-batched-tokens", "8192", "--num-kv-blocks", "4096"),
    )
    own = [("--prefill-engine", prefill.split()), ("--decode-engine", decode.split())]
    return Part(part, ((*command, *(word for option, ws in own if ws for word in (option, *ws))),))


LONG_PROMPTS = clients(1, 20, "8192x32")
# the loads of the "pair" rows of targets/targets.toml
PAIR_LOADS = (
    clients(1, 20, "1024x128"),
    LONG_PROMPTS,
    clients(64, 320, "1024x128"),
    poisson(10, 200, "2048x128"),
    poisson(15, 300, "2048x128"),
    poisson(10, 200, "2048x512"),
)
FP8_WORKER = worker(1, 1, kv_cache_dtype="fp8")
RATES = tuple(poisson(rate, 15 * rate, "2048x128") for rate in (20, 30, 40))

TWO_GPUS = (
    Part("sums", (("benchmarks.engine.sums", "--ranks", "2"),)),
    Part(
        "followers",
        (
            (
                *("benchmarks.engine.followers", "--model", str(SHAPES / LLAMA_8B)),
                *("--load-format", "dummy"),
            ),
        ),
    ),
    table_rows("8b-tp2", LLAMA_8B, "--tensor-parallel", "2"),
    table_rows("8b-pp2", LLAMA_8B, "--pipeline-parallel", "2"),
    table_rows("70b-tp2", LLAMA_70B, "--tensor-parallel", "2"),
    table_rows("70b-pp2", LLAMA_70B, "--pipeline-parallel", "2"),
    table_rows("30b-tp2", QWEN, "--tensor-parallel", "2"),
    table_rows("30b-ep2-tp", QWEN, "--tensor-parallel", "2", "--expert-parallel", "true"),
    Part(
        "30b-ep2-dp",
        (clients(64, 320, "1024x128"), clients(512, 1536, "1024x128")),
        QWEN,
        whole(worker(1, 1, data_parallel=2, expert_parallel=True)),
    ),
    Part("30b-1p-1d", PAIR_LOADS, QWEN, split(worker(1, 1), worker(1, 1), "auto")),
    Part("30b-2-whole", PAIR_LOADS, QWEN, whole(worker(2, 1))),
    Part("8b-fp8-1p-1d", PAIR_LOADS, LLAMA_8B_FP8, split(FP8_WORKER, FP8_WORKER, "auto")),
    Part(
        "hand-off-tp1-to-ep2",
        (clients(8, 40, "4096x64"),),
        QWEN,
        split(
            worker(1, 0.5, num_kv_blocks=1600),
            worker(1, 0.5, data_parallel=2, expert_parallel=True, num_kv_blocks=1600),
        ),
    ),
    hand_off("hand-off-tp1-to-tp2", LLAMA_8B, decode="tensor_parallel=2"),
    hand_off("hand-off-tp2-to-tp1", LLAMA_8B, "tensor_parallel=2"),
    hand_off("hand-off-tp1-to-pp2", LLAMA_8B, decode="pipeline_parallel=2"),
    hand_off("hand-off-pp2-to-tp1", LLAMA_8B, "pipeline_parallel=2"),
    hand_off("hand-off-fp8", LLAMA_8B_FP8, "kv_cache_dtype=fp8", "kv_cache_dtype=fp8"),
    hand_off("hand-off-16-to-fp8", LLAMA_8B_FP8, decode="kv_cache_dtype=fp8"),
)

FOUR_GPUS = (
    Part("sums", (("benchmarks.engine.sums", "--ranks", "4"),)),
    table_rows("8b-tp4", LLAMA_8B, "--tensor-parallel", "4"),
    table_rows("70b-tp4", LLAMA_70B, "--tensor-parallel", "4"),
    table_rows("70b-tp2-pp2", LLAMA_70B, "--tensor-parallel", "2", "--pipeline-parallel", "2"),
    table_rows("30b-ep4-tp", QWEN, "--tensor-parallel", "4", "--expert-parallel", "true"),
    table_rows("30b-ep4-dp", QWEN, "--data-parallel", "4", "--expert-parallel", "true"),
    hand_off("hand-off-tp4-to-tp2", LLAMA_8B, "tensor_parallel=4", "tensor_parallel=2"),
    hand_off(
        "hand-off-tp4-to-two-tp2", LLAMA_8B, "tensor_parallel=4", "tensor_parallel=2", decodes=2
    ),
    Part(
        "tp4-to-two-tp2",
        (LONG_PROMPTS, clients(8, 80, "8192x32")),
        LLAMA_8B,
        split(
            worker(1, 0.5, tensor_parallel=4, num_kv_blocks=4000),
            worker(2, 0.5, tensor_parallel=2, num_kv_blocks=4000),
        ),
    ),
    hand_off("hand-off-pp2-to-tp4", LLAMA_8B, "pipeline_parallel=2", "tensor_parallel=4"),
    Part("2p-2d", RATES, LLAMA_8B, split(worker(2, 1), worker(2, 1), "auto")),
    Part("1p-3d", RATES, LLAMA_8B, split(worker(1, 1), worker(3, 1), "auto")),
    Part("4-whole", RATES, LLAMA_8B, whole(worker(4, 1))),
)

PARTS = {2: TWO_GPUS, 4: FOUR_GPUS}


def words(part: Part, out: Path, url: str = "URL", commit: str = "") -> Iterator[list[str]]:
    """Yields the part's commands as they are run. `url` is that of its cluster; `commit` is noted
    in the results, which otherwise note git's."""
    file = ["--out", str(out / f"{part.id}.jsonl"), *(["--commit", commit] if commit else [])]
    for command in part.commands:
        if part.cluster:
            yield [*CLI, *command, "--url", url, *file]
        else:
            yield [sys.executable, "-m", *command, *file]


def document(part: Part, scratch: Path, port: int) -> dict[str, Any]:
    """Returns the part's cluster.yaml. Raises ValueError if its configuration is wrong."""
    model = {
        "path": str(servable_folder(SHAPES / part.model, scratch).resolve()),
        "name": part.model,
        "load_format": "dummy",
    }
    args = {"model": model, **part.cluster}
    ClusterConfig.model_validate(args)
    return cluster_yaml(args, port)


def run(part: Part, out: Path, commit: str = "") -> bool:
    """Runs a part. Returns True if all its commands succeeded. Raises ValueError if its cluster
    does not become ready."""
    if not part.cluster:
        return all(run_command(command) for command in words(part, out, commit=commit))
    port = free_port()
    log = out / f"{part.id}.log"
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-several-gpus-") as scratch,
        serving(document(part, Path(scratch), port), port, deadline_s=START_S, log=log) as server,
    ):
        await_workers(server.url, part.num_workers, START_S)
        are_done = [run_command(command) for command in words(part, out, server.url, commit)]
        moved = transfer_metrics(server.url)
        print("\n".join(f"{name} {value}" for name, value in moved.items()), flush=True)
        row = {"benchmark": "several_gpus", "model": part.model, "moved": moved}
        append(out / f"{part.id}.jsonl", row | circumstances(commit or None))
        return all(are_done)


def transfer_metrics(url: str) -> dict[str, float]:
    """Returns the metrics that say what was moved between workers, and in what time."""
    return {
        f"{sample.name} {sample.labels}": sample.value
        for sample in metrics(url, "pdserve_kv_transfer")
        if not sample.name.endswith("_bucket")
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted({part.id for parts in PARTS.values() for part in parts})
    parser.add_argument("--gpus", type=int, choices=sorted(PARTS), required=True)
    parser.add_argument("--only", action="append", choices=names, help="may be repeated")
    parser.add_argument("--out", type=Path, default=Path("several-gpus"), help="of results")
    parser.add_argument("--commit", default="", help="revision noted in results (default: git's)")
    parser.add_argument("--print", action="store_true", dest="is_printed", help="run nothing")
    options = parser.parse_args()
    failed = []
    if not options.is_printed:
        options.out.mkdir(exist_ok=True)
    for part in PARTS[options.gpus]:
        if options.only and part.id not in options.only:
            continue
        if part.missing:
            print(f"{part.id}: left out, no {', '.join(sorted(part.missing))} in this tree")
            continue
        if options.is_printed:
            print(f"# {part.id} {dict(part.cluster) or ''}")
            print("\n".join(shlex.join(command) for command in words(part, options.out)))
            continue
        try:
            is_done = run(part, options.out, options.commit)
        except (ValueError, OSError) as error:
            print(f"{part.id}: {error}", file=sys.stderr)
            is_done = False
        failed += [] if is_done else [part.id]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
