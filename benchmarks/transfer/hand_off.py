"""The hand-off between two real engines, without Ray and HTTP: what splitting a request costs and
gains, and what transfers do to the steps of both engines.

    python -m benchmarks.transfer.hand_off --model benchmarks/shapes/llama-3.1-8b \\
        --load-format dummy                                                  # two GPUs
    python -m benchmarks.transfer.hand_off --device cpu --tokens 256 1024 --context 128 \\
        --chunk 512 --batch 4                                                # CPU
    python -m benchmarks.transfer.hand_off --model benchmarks/shapes/llama-3.1-8b \\
        --load-format dummy --parts requests --num-kv-blocks 4096 \\
        --decode-engine tensor_parallel=2                                    # unlike degrees

P's ranks have the first GPUs, and D's the last ones; further decode engines have those before them.
They share GPUs if there are too few: then --num-kv-blocks must leave room for all.

- requests: The same prompt runs in turn whole on P, whole on D, and split. Rows are pulled while P
computes ("overlapped": P cuts the prompt for it; "announced": it does not, but D does not wait for
the router), or in sequence. Prompts too short for parts are only split in sequence. TPOT includes
the gap from the first to the second token.
- lag: from P's last row written to D's last byte verified, by the clocks of both.
- seen: from P's hand-off to D's Arrived, which D sends after its step, as this process sees them.
- pull: D's own time from the Submit until the rows joined, and the GB/s of what moved in it.

together (only if it is named): GB/s in sum of decode engines that pull the longest --tokens again
and again, --in-flight at once. The first one pulls alone, then the first two, up to --decodes.

decode: Step time of a batch on D with and without transfers. D pulls prompts of the longest
--tokens one after another. They never join the batch, which fills D's slots. Intervals with and
without transfers are neighbours in time, in changing order. An interval counts with its mean time
from token to token. prefill: The same for prompts of --chunk tokens on P, from which D reads.
"""

import argparse
import asyncio
import gc
import os
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from benchmarks.transfer.engine_pair import Answer, Pair, connected
from benchmarks.transfer.engine_processes import EngineProcess, engine_processes
from benchmarks.transfer.hand_off_plan import (
    PARTS,
    TOGETHER,
    Plan,
    batch_tokens,
    greedy,
    summary,
)
from benchmarks.transfer.hand_off_steps import measure_steps
from benchmarks.transfer.hand_off_tables import request_table, step_table, together_table
from benchmarks.transfer.hand_off_together import measure_together
from pdserve.bench.cli import (
    add_model_arguments,
    add_output_arguments,
    engine_fields,
    model_fields,
)
from pdserve.bench.option_values import SEED, integer
from pdserve.bench.record import Json, append, check_writable, circumstances, gpu_name
from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.configs.schema import Role, WorkerConfig
from pdserve.configs.transfer import TransferConfig
from pdserve.protocol.events import Arrived
from pdserve.protocol.sampling_params import SamplingParams

ROLES: tuple[Role, ...] = ("prefill", "decode")
WHOLE_P = "whole on P"
WHOLE_D = "whole on D"
OVERLAPPED = "split, overlapped"
ANNOUNCED = "split, announced"
SEQUENTIAL = "split, sequential"
LEASE_S = 3600.0  # the same ticket is pulled many times


def check(plan: Plan, pair: Pair) -> None:
    """Raises ValueError that names an option that the engines cannot serve."""
    hello = pair.d.hello
    wanted = {"--tokens": max(plan.tokens) + plan.output_len}
    if "decode" in plan.parts:
        wanted["--context with --steps"] = batch_tokens(plan)
    if "prefill" in plan.parts:
        wanted["--chunk"] = plan.chunk + 1
    for option, num_tokens in wanted.items():
        if num_tokens > hello.max_request_tokens:
            raise ValueError(
                f"{option} asks for requests of {num_tokens} tokens, the engine takes "
                f"{hello.max_request_tokens}"
            )
    if "decode" in plan.parts:

        def blocks(num_tokens: int) -> int:
            return -(-num_tokens // hello.block_size)

        needed = plan.batch * blocks(batch_tokens(plan)) + plan.in_flight * blocks(max(plan.tokens))
        if needed > pair.d.snapshot.total_blocks:
            raise ValueError(
                f"--batch {plan.batch} beside {plan.in_flight} transfers needs {needed} blocks of "
                f"{hello.block_size} "
                f"tokens, the engine has {pair.d.snapshot.total_blocks}: ask for less, or give it "
                "more memory"
            )


# --- requests ---


def modes(pair: Pair, num_tokens: int) -> list[str]:
    """Returns the ways to serve a prompt of this length."""
    is_long = 0 < pair.p.hello.parts_from <= num_tokens
    return [WHOLE_P, WHOLE_D, *([OVERLAPPED, ANNOUNCED] if is_long else []), SEQUENTIAL]


async def serve(pair: Pair, mode: str, prompt: tuple[int, ...], sampling: SamplingParams) -> Answer:
    if mode in (WHOLE_P, WHOLE_D):
        return await pair.whole(pair.p if mode == WHOLE_P else pair.d, prompt, sampling)
    return await pair.split(prompt, sampling, mode != SEQUENTIAL, mode == OVERLAPPED)


async def measure_requests(
    plan: Plan, pair: Pair, num_tokens: int, tick: Callable[[], Any]
) -> list[Json]:
    """Returns one row per mode. Raises ValueError if answers differ that must agree."""
    names = modes(pair, num_tokens)
    answers: dict[str, list[Answer]] = {mode: [] for mode in names}
    for repeat in range(-1, plan.repeats):  # the first warms up
        prompt = plan.prompt(num_tokens, pair.p.hello.vocab_size, f"request {repeat}")
        first = repeat % len(names)
        for mode in [*names[first:], *names[:first]]:
            answer = await serve(pair, mode, prompt, greedy(plan.output_len))
            if repeat >= 0:
                answers[mode].append(answer)
        tick()
    expected = [answer.token_ids for answer in answers[WHOLE_P]]
    rows = [request_row(num_tokens, mode, answers[mode], expected) for mode in names]
    for row in rows:
        if row["num_different"] and plan.must_agree:
            raise ValueError(
                f"{row['mode']}, {num_tokens} tokens: {row['num_different']} of {plan.repeats} "
                "answers differ from "
                f"those {WHOLE_P}"
            )
    return rows


def request_row(
    num_tokens: int, mode: str, answers: Sequence[Answer], expected: Sequence[list[int]]
) -> Json:
    pairs = zip(answers, expected, strict=True)
    row: Json = {
        "part": "requests",
        "tokens": num_tokens,
        "mode": mode,
        "repeats": len(answers),
        "output_len": len(answers[0].token_ids),
        "num_different": sum(answer.token_ids != tokens for answer, tokens in pairs),
        "ttft_ms": summary([answer.times[0] - answer.sent for answer in answers]),
        "gap_ms": summary([answer.times[1] - answer.times[0] for answer in answers]),
        "tpot_ms": summary([(a.times[-1] - a.times[0]) / (len(a.times) - 1) for a in answers]),
    }
    handed = [
        (answer.handed, *answer.arrived) for answer in answers if answer.handed and answer.arrived
    ]
    return row | hand_over_figures(handed) if handed else row


def hand_over_figures(handed: Sequence[tuple[float, float, Arrived]]) -> Json:
    """Summarises requests, given by the times of P's hand-off and D's Arrived, and the Arrived."""
    arrived = [event for _, _, event in handed]
    late = [(event, event.num_bytes - event.num_early_bytes) for event in arrived]
    rates = [
        num_bytes / (event.seconds - event.wait_s) / 1e9 for event, num_bytes in late if num_bytes
    ]
    return {
        "lag_ms": summary([event.lag_s for event in arrived]),
        "seen_ms": summary([there - here for here, there, _ in handed]),
        "pull_ms": summary([event.seconds for event in arrived]),
        "bytes": arrived[0].num_bytes,
        "early_share": round(
            statistics.median(event.num_early_bytes / event.num_bytes for event in arrived), 4
        ),
        "descriptors": statistics.median(event.num_descriptors for event in arrived),
        "transport": "/".join(sorted({event.transport for event in arrived})),
        "gb_per_s": round(statistics.median(rates), 2) if rates else None,
    }


# --- the run ---


async def run(
    plan: Plan, processes: Sequence[EngineProcess], record: Callable[[Json], None]
) -> None:
    """Measures what the plan says. Records each row at once, and prints tables."""
    async with connected(processes) as pairs:
        pair = pairs[0]
        check(plan, pair)
        tqdm.write(
            f"self-test of the connection: {pair.status.transport}, "
            f"{pair.status.bytes_per_s / 1e9:.1f} GB/s"
        )
        gc.collect()
        gc.freeze()
        with tqdm(total=plan.num_units, unit="round", leave=False) as bar:
            if "requests" in plan.parts:
                rows = []
                for num_tokens in plan.tokens:
                    for row in await measure_requests(plan, pair, num_tokens, bar.update):
                        record(row)
                        rows.append(row)
                tqdm.write("\n" + request_table(rows))
            if TOGETHER in plan.parts:
                rows = await measure_together(plan, pairs, bar.update)
                for row in rows:
                    record(row)
                tqdm.write("\n" + together_table(rows))
            for part in ("decode", "prefill"):
                if part in plan.parts:
                    row = await measure_steps(plan, pair, part, bar.update)
                    record(row)
                    tqdm.write("\n" + step_table(row))


def find_gpus(device: str, num_ranks: Sequence[int]) -> list[str | None]:
    """Returns the CUDA_VISIBLE_DEVICES of each engine, or None on CPU. P is the first. Raises
    ValueError unless there are two GPUs, and one for each rank of an engine."""
    unset: list[str | None] = [None] * len(num_ranks)
    if device == "cpu":
        return unset
    import torch  # only here: the engines' processes must first choose their device

    count = torch.cuda.device_count()
    if count == 0 and device == "auto":
        return unset
    if count < max(2, *num_ranks):
        raise ValueError(
            f"two engines need two GPUs, and one for each rank of the larger engine, torch sees "
            f"{count}: use --device cpu"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    p_ranks, *others = num_ranks
    found: list[str | None] = [",".join(visible[:p_ranks])]
    end = count
    for d_ranks in others:
        end = end if end >= d_ranks else count
        found.append(",".join(visible[end - d_ranks : end]))
        end -= d_ranks
    return found


def own_fields(options: argparse.Namespace, role: Role) -> Json:
    """Returns the engine options of one engine. Raises a ValueError that names a wrong one."""
    fields = {}
    for word in getattr(options, f"{role}_engine"):
        name, _, text = word.partition("=")
        if name not in EngineConfig.model_fields or not text:
            raise ValueError(
                f"--{role}-engine: {word!r} is no field of EngineConfig, as NAME=VALUE"
            )
        fields[name] = yaml.safe_load(text)
    return fields


def worker_config(options: argparse.Namespace, role: Role) -> WorkerConfig:
    """Makes a worker's config. D has slots only for the batch, so pulled requests never run. The
    engine knows the other's stages, as in a cluster."""
    fields = engine_fields(options)
    if options.engine_max_num_seqs is not None:
        raise ValueError("--max-num-seqs is --batch in this benchmark: leave it out")
    if fields["enable_prefix_caching"]:
        raise ValueError(
            "--enable-prefix-caching: the same prompt is served several times, without a cache"
        )
    [other] = set(ROLES) - {role}
    peer_stages = (fields | own_fields(options, other)).get("pipeline_parallel", 1)
    return WorkerConfig(
        role=role,
        model=ModelConfig(path=options.model, **model_fields(options)),
        engine=EngineConfig(
            **fields
            | {"max_num_seqs": options.batch, "peer_stages": peer_stages}
            | own_fields(options, role)
        ),
        transfer=TransferConfig(lease_s=LEASE_S),
    )


def make_plan(options: argparse.Namespace, must_agree: bool) -> Plan:
    return Plan(
        parts=tuple(options.parts),
        tokens=tuple(options.tokens),
        output_len=options.output_len,
        repeats=options.repeats,
        batch=options.batch,
        context=options.context,
        chunk=options.chunk,
        pairs=options.pairs,
        steps=options.steps,
        in_flight=options.in_flight,
        decodes=options.decodes,
        seed=options.seed,
        must_agree=must_agree,
    )


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, TOGETHER), default=list(PARTS))
    parser.add_argument("--decodes", type=integer(1), default=1, help="decode engines (default 1)")
    parser.add_argument(
        "--tokens",
        type=integer(1),
        nargs="+",
        default=[1024, 8192],
        help="tokens of prompts (default 1024 8192)",
    )
    parser.add_argument(
        "--output-len", type=integer(2), default=32, help="tokens of an answer (default 32)"
    )
    parser.add_argument(
        "--repeats", type=integer(1), default=9, help="prompts of each length (default 9)"
    )
    parser.add_argument(
        "--batch", type=integer(1), default=32, help="sequences that decode (default 32)"
    )
    parser.add_argument(
        "--context", type=integer(1), default=1024, help="tokens of their prompts (default 1024)"
    )
    parser.add_argument(
        "--chunk",
        type=integer(1),
        default=2048,
        help="tokens of prompts that P computes while D reads (default 2048)",
    )
    parser.add_argument("--pairs", type=integer(1), default=20, help="interval pairs (default 20)")
    parser.add_argument(
        "--steps", type=integer(1), default=64, help="decode steps per interval (default 64)"
    )
    parser.add_argument(
        "--in-flight", type=integer(1), default=2, help="transfers at once (default 2)"
    )
    parser.add_argument("--seed", type=SEED, default=0)
    for role in ROLES:
        parser.add_argument(
            f"--{role}-engine",
            nargs="+",
            default=[],
            metavar="NAME=VALUE",
            help=f"engine options of the {role} engine alone",
        )
    add_model_arguments(parser)
    add_output_arguments(parser)
    return parser, parser.parse_args()


def main() -> int:
    parser, options = parse()
    try:
        prefill, decode = (worker_config(options, role) for role in ROLES)
        configs = [prefill, *[decode] * options.decodes]
        gpus = find_gpus(configs[0].engine.device, [c.engine.num_ranks for c in configs])
        check_writable(options.out)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    own = {f"{role}_engine": own_fields(options, role) for role in ROLES}
    must_agree = gpus[0] is None and own["prefill_engine"] == own["decode_engine"]
    plan = make_plan(options, must_agree)
    engine = engine_fields(options) | {"max_num_seqs": options.batch}
    common = {
        "benchmark": "hand_off",
        "model": Path(options.model).name,
        "load_format": options.load_format,
        "device": gpu_name() if gpus[0] is not None else "cpu",
    }

    def record(row: Json) -> None:
        append(options.out, common | row | {"engine": engine} | own | circumstances(options.commit))

    try:
        with engine_processes(configs, gpus) as processes:
            asyncio.run(run(plan, processes, record))
    except ValueError as error:
        print(f"hand_off: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # engines end with it
    sys.exit(main())
