"""`pdserve bench latency|throughput|serve|replay`: options, printed lines, and JSON lines of
`--out`.

    pdserve bench latency --model MODEL --batch-size 1 8 --input-len 128 --output-len 256

    pdserve bench throughput --model MODEL --shape 64x1024x256 --shape 200x128-2048x64-256

    pdserve bench serve --url http://127.0.0.1:8000 --clients 32 --num-requests 128 \\
        --input-len 1024 --output-len 128

Options also have vllm bench's names where it has them. The options of `replay` are in its room.
Knows no Ray. `serve` and `replay` never import torch. Called by cluster.cli; benchmarks/ shares the
options.
"""

import argparse
import itertools
import json
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from tqdm import tqdm

from pdserve.bench.load import BUSY_CLIENT, LATE_MS, LoadConfig, LoadResult, run_load
from pdserve.bench.option_values import POSITIVE, SEED, VOCAB_SIZE, integer, shown
from pdserve.bench.record import Json, append, check_writable, circumstances
from pdserve.bench.replay.commands import COMMANDS as REPLAY_COMMANDS
from pdserve.bench.replay.commands import add_replay_arguments, run_replay
from pdserve.bench.workload import Lengths, Shape
from pdserve.configs.engine import ActivationDtype, EngineConfig, ModelConfig, OnlineScheme

DEFAULT_MODEL = "demo/pdserve-demo"


def fixed_length(text: str) -> Lengths:
    """Parses a length. Raises ValueError for a range: the times of one batch belong to one
    length."""
    lengths = Lengths.parse(text)
    if lengths.low != lengths.high:
        raise ValueError(
            f"latency needs fixed lengths, not {text!r}: give several, or use bench throughput"
        )
    return lengths


SHAPE = shown(Shape.parse)
LENGTHS = shown(Lengths.parse)
FIXED_LENGTH = shown(fixed_length)


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench", required=True)
    latency = commands.add_parser(
        "latency", help="measure one batch on one engine: prefill ms and decode ms per token"
    )
    latency.add_argument(
        "--batch-size",
        type=integer(1),
        nargs="+",
        default=[1],
        help="sequences per batch (default 1)",
    )
    latency.add_argument(
        "--input-len", type=FIXED_LENGTH, nargs="+", default=[Lengths(128, 128)], help="default 128"
    )
    latency.add_argument(
        "--output-len",
        type=FIXED_LENGTH,
        nargs="+",
        default=[Lengths(128, 128)],
        help="default 128",
    )
    throughput = commands.add_parser(
        "throughput", help="measure many prompts on one engine: tokens per second"
    )
    throughput.add_argument(
        "--shape",
        type=SHAPE,
        action="append",
        required=True,
        help="PROMPTSxINxOUT; lengths may be ranges",
    )
    for command in (latency, throughput):
        add_model_arguments(command)
        command.add_argument(
            "--repeats", "--num-iters", type=integer(1), default=3, help="timed runs per shape"
        )
    _add_serve_arguments(commands.add_parser("serve", help="put HTTP load on a running server"))
    for command in commands.choices.values():
        command.add_argument("--seed", type=SEED, default=0)
        add_output_arguments(command)
    add_replay_arguments(commands)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --model and one option for each field of EngineConfig."""
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"folder or Hub id (default {DEFAULT_MODEL})"
    )
    parser.add_argument(
        "--load-format", choices=["auto", "dummy"], default="auto", help="dummy: random weights"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=typing.get_args(ModelConfig.model_fields["dtype"].annotation),
    )
    parser.add_argument(
        "--quantization",
        choices=typing.get_args(OnlineScheme),
        help="quantise 16-bit weights while they are loaded",
    )
    parser.add_argument(
        "--activation-dtype",
        default="auto",
        choices=typing.get_args(ActivationDtype),
        help="what int4 weights are multiplied by (default auto)",
    )
    group = parser.add_argument_group(
        "engine", "fields of EngineConfig; prefix caching is off by default here"
    )
    for name, field in EngineConfig.model_fields.items():
        default = False if name == "enable_prefix_caching" else field.get_default()
        group.add_argument(
            f"--{name.replace('_', '-')}",
            dest=f"engine_{name}",
            metavar="X",
            help=f"default {default}",
        )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    parser.add_argument("--commit", help="revision noted in --out (default: git's)")


def model_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of ModelConfig that the options name, without the path."""
    names = ("load_format", "dtype", "quantization", "activation_dtype")
    return {name: getattr(options, name) for name in names}


def engine_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the engine options that were given. Raises a ValueError that names a wrong one."""
    fields: dict[str, Any] = {"enable_prefix_caching": False}
    for name in EngineConfig.model_fields:
        text = getattr(options, f"engine_{name}")
        if text is not None:
            try:
                fields[name] = yaml.safe_load(text)
            except yaml.YAMLError:
                raise ValueError(
                    f"--{name.replace('_', '-')}: not a value in YAML: {text!r}"
                ) from None
    try:
        EngineConfig(**fields)
    except ValidationError as error:
        flags = (
            "--" + "-".join(map(str, e["loc"])).replace("_", "-") + f": {e['msg']}"
            for e in error.errors()
        )
        raise ValueError("; ".join(flags)) from error
    return fields


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", "--base-url", default="http://127.0.0.1:8000", help="default http://127.0.0.1:8000"
    )
    parser.add_argument("--model", help="model's name at the server (default: its only one)")
    loop = parser.add_mutually_exclusive_group(required=True)
    loop.add_argument(
        "--clients",
        "--max-concurrency",
        type=integer(1),
        help="closed loop: number of requests in flight",
    )
    loop.add_argument(
        "--rate", "--request-rate", type=POSITIVE, help="open loop: Poisson arrivals per second"
    )
    parser.add_argument(
        "--num-requests", "--num-prompts", type=integer(1), default=100, help="default 100"
    )
    parser.add_argument(
        "--input-len", "--random-input-len", type=LENGTHS, default=Lengths(1024, 1024)
    )
    parser.add_argument(
        "--output-len", "--random-output-len", type=LENGTHS, default=Lengths(128, 128)
    )
    parser.add_argument(
        "--vocab-size",
        type=VOCAB_SIZE,
        default=1000,
        help="prompts hold token ids below this (default 1000)",
    )
    parser.add_argument(
        "--warmups",
        "--num-warmups",
        type=integer(0),
        default=2,
        help="untimed requests before the load (default 2)",
    )
    parser.add_argument(
        "--timeout", type=POSITIVE, default=600.0, help="seconds a request may take (default 600)"
    )
    parser.add_argument(
        "--no-ignore-eos", action="store_true", help="let the model end its answers"
    )
    parser.add_argument(
        "--extra-body", default="{}", help="JSON to add to each request; null removes a field"
    )


def run_bench(options: argparse.Namespace) -> int:
    """Runs a command and returns the exit status: 1 if requests failed.

    ValueError and OSError say what is wrong with the options.
    """
    if options.bench in REPLAY_COMMANDS:
        return run_replay(options)
    check_writable(options.out)
    if options.bench == "serve":
        return _serve(options)
    return _offline(options)


def _offline(options: argparse.Namespace) -> int:
    from pdserve.bench.offline import Bench, OfflineConfig  # this imports torch

    config = OfflineConfig(
        options.model,
        model_fields(options),
        engine_fields(options),
        options.repeats,
        options.seed,
    )
    shapes = options.shape if options.bench == "throughput" else _latency_shapes(options)
    bench = Bench(config)
    print(f"{bench.device}: {options.model} ready, first token after {bench.start_s:.1f} s")
    measure = bench.throughput if options.bench == "throughput" else bench.latency
    for shape, figures in measure(shapes):
        tqdm.write(f"{shape!s:>20}  {offline_line(figures)}")
        row = {
            "benchmark": options.bench,
            "model": Path(options.model).name,
            **config.model,
            "device": bench.device,
            "shape": str(shape),
            **figures,
            "start_s": round(bench.start_s, 2),
            "repeats": options.repeats,
            "engine": config.engine,
        }
        append(options.out, row | circumstances(options.commit))
    return 0


def _latency_shapes(options: argparse.Namespace) -> list[Shape]:
    return [
        Shape(*parts)
        for parts in itertools.product(options.batch_size, options.input_len, options.output_len)
    ]


def offline_line(figures: Json) -> str:
    """Returns the medians, and the spread of the repeats, of one shape."""
    names = {
        "prefill_ms": "prefill ms",
        "decode_ms_per_token": "decode ms/token",
        "seconds": "s",
        "tokens_per_s": "tok/s in+out",
        "output_tokens_per_s": "tok/s out",
    }
    shown = [(figures[key], name) for key, name in names.items() if figures.get(key) is not None]
    return "   ".join(
        f"{value['median']:,.2f} (±{value['spread'] / 2:,.2f}) {name}" for value, name in shown
    )


def _serve(options: argparse.Namespace) -> int:
    config = LoadConfig(
        url=options.url,
        shape=Shape(options.num_requests, options.input_len, options.output_len),
        clients=options.clients,
        rate=options.rate,
        model=options.model,
        vocab_size=options.vocab_size,
        num_warmups=options.warmups,
        seed=options.seed,
        timeout_s=options.timeout,
        ignore_eos=not options.no_ignore_eos,
        extra_body=_json_object("--extra-body", options.extra_body),
    )
    result = run_load(config)
    print(serve_report(config, result))
    append(options.out, serve_row(config, result) | circumstances(options.commit))
    return 1 if result.errors else 0


def _json_object(option: str, text: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} is not JSON ({error}): {text!r}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object, not {text!r}")
    return value


def serve_row(config: LoadConfig, result: LoadResult) -> Json:
    """Returns the load and its figures as one JSON line."""
    load = {"clients": config.clients} if config.clients is not None else {"rate": config.rate}
    return {
        "benchmark": "serve",
        "model": result.model,
        "url": config.url,
        **load,
        "shape": str(config.shape),
        **result.figures(),
    }


def serve_report(config: LoadConfig, result: LoadResult) -> str:
    """Returns the figures of a load as text for a person."""
    figures = result.figures()
    lines = [
        f"{config.label}, {config.shape} (requests x in x out), model {result.model}",
        f"  {figures['num_finished']} finished, {figures['num_failed']} failed in "
        f"{figures['seconds']:.2f} s: "
        f"{figures['requests_per_s']:.2f} req/s, {figures['output_tokens_per_s']:,.0f} tok/s out",
    ]
    for key, name in (
        ("ttft_ms", "TTFT"),
        ("gap_ms", "gap"),
        ("tpot_ms", "TPOT"),
        ("itl_ms", "ITL"),
    ):
        value = figures[key]
        if value["p50"] is not None:
            lines.append(
                f"  {name}  p50 {value['p50']:9.2f}   p99 {value['p99']:9.2f}   mean "
                f"{value['mean']:9.2f} ms"
            )
    late = figures["client_late_ms"]["p99"]
    sent_late = "" if late is None else f", requests sent late by p99 {late:.2f} ms"
    lines.append(f"  client: {result.cpu_share:.0%} of a core{sent_late}")
    if result.cpu_share > BUSY_CLIENT:
        lines.append("  the client was busy and may have limited the result: use several clients")
    if late is not None and late > LATE_MS:
        lines.append("  requests were sent late: the arrivals were not those that were asked for")
    lines += [f"  failed {count} x: {message}" for message, count in result.errors.most_common(10)]
    return "\n".join(lines)
