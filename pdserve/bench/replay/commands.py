"""`pdserve bench replay` and `pdserve bench replay-page`: their options and their output.

    pdserve bench replay TRACE --url http://127.0.0.1:8000 --rates 1,1.5,2 --window 0:300 \\
        --duration 80 --max-input 15000 --max-output 600 --out sweep.jsonl --page sweep.html

    pdserve bench replay-page A.jsonl B.jsonl --page both.html

Knows which module does what. Torch-free. Called by bench.cli.
"""

import argparse
import typing
from collections.abc import Sequence
from pathlib import Path

from pdserve.bench.option_values import POSITIVE, SEED, VOCAB_SIZE, integer, shown
from pdserve.bench.record import check_writable
from pdserve.bench.replay.figures import Promises
from pdserve.bench.replay.page import page
from pdserve.bench.replay.send import Target
from pdserve.bench.replay.series import Series, series_of
from pdserve.bench.replay.store import Store
from pdserve.bench.replay.sweep import Sweep, run_sweep
from pdserve.bench.replay.table import show
from pdserve.bench.replay.trace import read_trace
from pdserve.bench.replay.trace_lines import Format
from pdserve.bench.replay.window import Caps, Pace, Span

COMMANDS = ("replay", "replay-page")


def _rates(text: str) -> list[float]:
    """Parses rates. Raises ValueError if the text is no list of positive numbers."""
    try:
        return sorted({POSITIVE(part) for part in text.split(",")})
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"rates must look like 1,1.5,2 (requests/s), not {text!r}") from error


def _share(text: str) -> float:
    value = POSITIVE(text)
    if value > 1:
        raise ValueError(f"a share must be above 0 and at most 1, such as 0.9, not {text!r}")
    return value


RATES = shown(_rates)
SHARE = shown(_share)
SPAN = shown(Span.parse)


def add_replay_arguments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds both commands with their options."""
    replay = commands.add_parser("replay", help="send recorded traffic to a running server")
    replay.add_argument("trace", type=Path, metavar="TRACE", help="file, plain or .xz or .gz")
    replay.add_argument(
        "--format",
        choices=typing.get_args(Format),
        help="format of TRACE (default: recognised by its first line)",
    )
    replay.add_argument(
        "--url", "--base-url", default="http://127.0.0.1:8000", help="default http://127.0.0.1:8000"
    )
    replay.add_argument("--model", help="model's name at the server (default: its only one)")
    _add_pace(replay)
    replay.add_argument(
        "--max-input", type=integer(1), help="cut the end off prompts longer than this many tokens"
    )
    replay.add_argument("--max-output", type=integer(1), help="end answers after this many tokens")
    replay.add_argument(
        "--clients", type=integer(1), help="limit of requests in flight; others are sent late"
    )
    replay.add_argument(
        "--vocab-size",
        type=VOCAB_SIZE,
        default=1000,
        help="prompts hold token ids below this (default 1000)",
    )
    replay.add_argument("--seed", type=SEED, default=0)
    replay.add_argument(
        "--salt", default="", help="any text; another text gives other tokens, so caches are cold"
    )
    replay.add_argument(
        "--warmups",
        type=integer(0),
        default=1,
        help="times to send the longest request, with other tokens, before the first window "
        "(default 1)",
    )
    replay.add_argument(
        "--timeout", type=POSITIVE, default=600.0, help="seconds a request may take (default 600)"
    )
    replay.add_argument(
        "--ttft-ms", type=POSITIVE, default=1000.0, help="promised TTFT (default 1000)"
    )
    replay.add_argument("--tpot-ms", type=POSITIVE, default=10.0, help="promised TPOT (default 10)")
    replay.add_argument(
        "--out",
        type=Path,
        help="file of JSON lines, one per request and window; windows in it are not sent again",
    )
    replay.add_argument("--label", default="", help="name in table and page (default: --out's)")
    replay.add_argument("--commit", help="revision noted in --out (default: git's)")
    replay.add_argument("--page", type=Path, help="HTML file to write plots to")
    shown_again = commands.add_parser(
        "replay-page", help="show results of several replays on one page"
    )
    shown_again.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="the --out of a bench replay"
    )
    shown_again.add_argument("--page", type=Path, required=True, help="HTML file to write")
    for promise in ("--ttft-ms", "--tpot-ms"):
        shown_again.add_argument(promise, type=POSITIVE, help="default: the promise in each file")
    for command in (replay, shown_again):
        command.add_argument(
            "--attainment",
            type=SHARE,
            default=0.9,
            help="share of requests that must keep both promises (default 0.9)",
        )


def _add_pace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--window",
        type=SPAN,
        default=Span(),
        help="part of the trace as START:SECONDS after its first request (default: all)",
    )
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--speed", type=POSITIVE, help="factor on the recorded times (default 1)")
    pace.add_argument("--rate", type=POSITIVE, help="mean requests/s over the window")
    pace.add_argument("--rates", type=RATES, help="several rates such as 1,1.5,2: a window at each")
    parser.add_argument(
        "--duration",
        type=POSITIVE,
        help="with a rate: send only this many seconds from the window's start (default: all)",
    )


def run_replay(options: argparse.Namespace) -> int:
    """Runs a command and returns the exit status: 1 if requests failed.

    ValueError and OSError say what is wrong with the options or the trace, before anything is sent.
    """
    return _page(options) if options.bench == "replay-page" else _replay(options)


def _replay(options: argparse.Namespace) -> int:
    trace = read_trace(options.trace, options.format)
    _check_files(options, options.trace)
    sweep = Sweep(
        trace=trace,
        span=options.window,
        paces=_paces(options),
        caps=Caps(options.max_input, options.max_output),
        target=Target(
            options.url,
            options.model,
            options.timeout,
            options.clients,
            options.seed,
            options.vocab_size,
        ),
        promises=Promises(options.ttft_ms, options.tpot_ms),
        label=options.label,
        salt=options.salt,
        num_warmups=options.warmups,
        commit=options.commit,
    )
    sweep.windows()  # raises what cannot be sent before a file is begun
    store = Store(options.out)
    check_writable(options.page)
    runs = run_sweep(sweep, store)
    series = series_of(runs, _name(options.out))
    _show(series, options)
    return 1 if any(run.result.num_failed for run in runs) else 0


def _paces(options: argparse.Namespace) -> list[Pace]:
    if options.rates is not None:
        return [Pace(rate=rate, duration_s=options.duration) for rate in options.rates]
    if options.rate is not None:
        return [Pace(rate=options.rate, duration_s=options.duration)]
    return [Pace(speed=options.speed or 1.0, duration_s=options.duration)]


def _page(options: argparse.Namespace) -> int:
    _check_files(options, *options.files)
    series = []
    for path in options.files:
        if not path.is_file():
            raise ValueError(f"FILE {path} does not exist: name the --out of a bench replay")
        series += [_judged(one, options) for one in series_of(Store(path, True).runs, _name(path))]
    check_writable(options.page)
    _show(series, options)
    return 0


def _check_files(options: argparse.Namespace, *inputs: Path) -> None:
    """Raises ValueError if a file to write is one to read, or if both to write are the same."""
    read = {path.resolve() for path in inputs}
    for name in ("out", "page"):
        path = getattr(options, name, None)
        if path is None:
            continue
        if path.resolve() in read:
            raise ValueError(
                f"--{name} {path} is also a file that is read or written: name another one"
            )
        read.add(path.resolve())


def _judged(series: Series, options: argparse.Namespace) -> Series:
    kept = series.runs[0].result.promises
    return series.judged(Promises(options.ttft_ms or kept.ttft_ms, options.tpot_ms or kept.tpot_ms))


def _show(series: Sequence[Series], options: argparse.Namespace) -> None:
    show(series, options.attainment)
    if options.page is not None:
        options.page.write_text(page(series, options.attainment), encoding="utf-8")
        print(f"page: {options.page}")


def _name(path: Path | None) -> str:
    return path.stem if path is not None else "replay"
