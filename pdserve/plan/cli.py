"""`pdserve plan` and `pdserve profile`: their options, progress, and the files that they write.

    pdserve profile --model DIR --out h200.json
    pdserve plan --model DIR --trace FILE --gpus 2..64 --slo ttft=1000,tpot=10
    pdserve plan --model DIR --poisson 10,2048,128 --gpus 2 --slo ttft=200,tpot=7 --out plan/

This module knows no Ray. cluster.cli calls it.
"""

import argparse
import re
import threading
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve.bench.option_values import POSITIVE, integer, shown
from pdserve.bench.record import check_writable
from pdserve.bench.replay.trace import read_trace
from pdserve.bench.replay.trace_lines import Format
from pdserve.bench.replay.window import Caps, Span
from pdserve.configs.engine import ModelConfig
from pdserve.models.config import ModelSpec, read_spec
from pdserve.plan.layouts.candidates import Candidate, candidates, gpu_numbers
from pdserve.plan.layouts.cluster_yaml import cluster_yaml
from pdserve.plan.layouts.layout import Slo
from pdserve.plan.loads import Load, Poisson, Recorded
from pdserve.plan.profile.profile import DEFAULT, Profile, read_profile, write_profile
from pdserve.plan.report import Plan, Planned, page, ranked, show
from pdserve.plan.search.goodput import (
    CLOSE,
    ROUGH,
    GoodputSearch,
    distinct,
    near_best,
    searches_of,
)
from pdserve.plan.search.simulators import SimulationFailed, Simulators
from pdserve.plan.simulation.jobs import Job, Outcome

COMMANDS = ("plan", "profile")
MOST_GPUS = 1024


def _gpus(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip(), re.ASCII)
    low = int(match[1]) if match else 0
    high = int(match[2] or low) if match else 0
    if not 1 <= low <= high <= MOST_GPUS:
        raise ValueError(
            f"must be a number of GPUs or a range of them, as in 8 or 2..64, at most {MOST_GPUS}, "
            f"not {text!r}"
        )
    return low, high


def _slo(text: str) -> tuple[float, float]:
    match = re.fullmatch(r"ttft=(\d+(?:\.\d+)?),tpot=(\d+(?:\.\d+)?)", text.strip(), re.ASCII)
    if match is None or not float(match[1]) or not float(match[2]):
        raise ValueError(
            f"must name both promises in milliseconds, as in ttft=1000,tpot=10, not {text!r}"
        )
    return float(match[1]), float(match[2])


def add_plan_arguments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    plan = commands.add_parser(
        "plan", help="predict the load that layouts can serve, and write the best one's YAML"
    )
    plan.add_argument("--model", required=True, help="folder with a config.json, or Hub id")
    load = plan.add_mutually_exclusive_group(required=True)
    load.add_argument(
        "--trace", type=Path, help="file of recorded requests, as for `pdserve bench replay`"
    )
    load.add_argument(
        "--poisson",
        type=shown(Poisson.parse),
        metavar="RATE,IN,OUT",
        help="load of random arrivals: requests per second, tokens in and tokens out",
    )
    plan.add_argument(
        "--gpus", type=shown(_gpus), required=True, help="number of GPUs, or a range such as 2..64"
    )
    plan.add_argument(
        "--slo",
        type=shown(_slo),
        required=True,
        metavar="ttft=MS,tpot=MS",
        help="latency promises that the share --attainment of the requests must keep",
    )
    plan.add_argument(
        "--attainment",
        type=POSITIVE,
        default=0.9,
        help="share of requests that keep the promises (default 0.9)",
    )
    plan.add_argument(
        "--profile", type=Path, help="file that `pdserve profile` wrote (default: an H200's)"
    )
    plan.add_argument(
        "--format",
        choices=typing.get_args(Format),
        help="format of --trace (default: recognised by its first line)",
    )
    plan.add_argument(
        "--window",
        type=shown(Span.parse),
        help="part of the trace, as START:SECONDS (default: all of it)",
    )
    plan.add_argument("--max-input", type=integer(1), help="tokens that longer prompts are cut to")
    plan.add_argument("--max-output", type=integer(1), help="tokens that longer answers are cut to")
    plan.add_argument(
        "--seconds",
        type=POSITIVE,
        default=40.0,
        help="seconds of arrivals that are simulated at each rate (default 40)",
    )
    plan.add_argument(
        "--processes",
        type=integer(1, 64),
        default=2,
        help="number of simulations that run at the same time (default 2)",
    )
    plan.add_argument("--out", type=Path, help="folder for plan.html and cluster.yaml")
    profile = commands.add_parser(
        "profile", help="measure an engine on this machine for `pdserve plan`"
    )
    profile.add_argument("--model", required=True, help="folder or Hub id")
    profile.add_argument("--out", type=Path, required=True, help="file to write the profile to")
    profile.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    profile.add_argument(
        "--load-format", choices=["auto", "dummy"], default="auto", help="dummy: random weights"
    )
    profile.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])


def run_plan_command(options: argparse.Namespace) -> int:
    """Runs either command. Raises ValueError or OSError that names the wrong parameter and the
    cure."""
    return _profile(options) if options.command == "profile" else _plan(options)


def _plan(options: argparse.Namespace) -> int:
    if options.attainment >= 1:
        raise ValueError(
            f"--attainment must be below 1, not {options.attainment:g}: in a finite run a single "
            "miss may be chance; use 0.99 at most"
        )
    profile = read_profile(options.profile or DEFAULT)
    spec = read_spec(ModelConfig(path=options.model).resolved_path, "dummy")
    load = _load(options)
    ttft_ms, tpot_ms = options.slo
    slo = Slo(ttft_ms, tpot_ms, options.attainment)
    if load.longest >= spec.max_position:
        option, cure = (
            ("--poisson", "lower its IN or OUT")
            if options.poisson is not None
            else ("--trace", "cut them by --max-input and --max-output")
        )
        raise ValueError(
            f"{option} asks for {load.longest:,} tokens, but --model takes "
            f"{spec.max_position:,}: {cure}"
        )
    found = candidates(profile, spec, load, slo, gpu_numbers(*options.gpus))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        for name in ("plan.html", "cluster.yaml"):
            check_writable(options.out / name)
    planned = _search(found.chosen, load, slo, options)
    plan = Plan(
        ranked(planned, load.rate),
        load,
        slo,
        options.model,
        profile.device,
        _notes(profile, spec, planned, found.num_left_out, found.refused),
    )
    show(plan)
    best = plan.best
    if options.out is not None:
        (options.out / "plan.html").write_text(page(plan), encoding="utf-8")
        says = (
            f"{best.layout}: predicted {best.goodput.rate:.3g} requests/s within the slo "
            f"({load.name})"
        )
        text = cluster_yaml(best.layout, options.model, slo, load.longest + 1, says, profile.is_cpu)
        (options.out / "cluster.yaml").write_text(text, encoding="utf-8")
        print(f"wrote {options.out / 'plan.html'} and {options.out / 'cluster.yaml'}")
    if best.goodput.rate < load.rate:
        print(
            f"no layout serves {load.rate:.3g} requests/s within the slo: the best one serves "
            f"{best.goodput.rate:.3g}; raise --gpus, or allow more milliseconds in --slo"
        )
        return 1
    return 0


def _load(options: argparse.Namespace) -> Load:
    if options.poisson is not None:
        of_traces = ("format", "window", "max_input", "max_output")
        named = [name for name in of_traces if getattr(options, name)]
        if named:
            raise ValueError(
                f"--{named[0].replace('_', '-')} belongs to --trace: leave it out of --poisson"
            )
        poisson: Load = options.poisson
        return poisson
    caps = Caps(options.max_input, options.max_output)
    return Recorded(read_trace(options.trace, options.format), options.window or Span(), caps)


def _search(
    chosen: list[Candidate], load: Load, slo: Slo, options: argparse.Namespace
) -> list[Planned]:
    """Searches all layouts roughly. Then searches those exactly that may be the best one of their
    number of GPUs, and finds out of the others whether they serve the load's own rate."""
    count = min(options.processes, len(chosen))
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        transient=True,
    )
    lock = threading.Lock()
    with Simulators(count) as simulators, progress, ThreadPoolExecutor(count) as threads:
        task = progress.add_task("layouts", total=None)
        num_points = 0

        def run(job: Job) -> Outcome:
            nonlocal num_points
            outcome = simulators.run(job)
            with lock:
                num_points += 1
                progress.update(task, description=f"layouts ({num_points} simulations)")
            return outcome

        searched = searches_of(chosen, load, slo, run, options.seconds)
        searches = distinct(searched)
        progress.update(task, total=len(searches))

        def close_in(search: GoodputSearch, close: float) -> None:
            search.close_in(close)
            progress.advance(task)

        try:
            list(threads.map(lambda each: close_in(each, ROUGH), searches))
            rivals = near_best(searched)
            progress.update(task, total=len(searches) + len(rivals))
            list(threads.map(lambda each: close_in(each, CLOSE), rivals))
            for each in searched:  # several may share a search, so one after the other
                each.settle(load.rate)
        except SimulationFailed as error:
            raise ValueError(f"--model {options.model}: {error}") from error
        except KeyboardInterrupt:
            simulators.stop()  # the threads then end at once
            raise
    return [Planned(each.layout, each.goodput) for each in searched]


def _notes(
    profile: Profile,
    spec: ModelSpec,
    planned: list[Planned],
    num_left_out: int,
    refused: dict[str, str],
) -> list[str]:
    notes = [f"Step times of {profile.model} ({profile.dtype}): " + "; ".join(profile.source) + "."]
    if not all(one.layout.is_measured for one in planned):
        notes.append(
            "scaled: the profile has no such degrees or model; the cost model converts its times."
        )
    parts = {one.layout.divisor for one in planned if one.layout.divisor > 1}
    if parts:
        notes.append(
            "Large clusters were simulated as an even part of themselves; whole ones queue less."
        )
    if num_left_out:
        notes.append(f"{num_left_out} layouts were left out, because their bounds are lower.")
    notes += [f"{name} is left out: {why}." for name, why in refused.items()]
    return notes


def _profile(options: argparse.Namespace) -> int:
    from pdserve.plan.profile.measure import measure_profile  # imports torch's kernels

    check_writable(options.out)
    profile = measure_profile(options.model, options.device, options.load_format, options.dtype)
    write_profile(options.out, profile)
    print(
        f"wrote {options.out}: {len(profile.decodes)} points of decodes, "
        f"{len(profile.prompts)} of prompts, {len(profile.mixed)} mixed, on {profile.device}"
    )
    return 0
