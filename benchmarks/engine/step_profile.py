"""Shows where a decode step and a prefill spend their time, beside the floor counted by hand.

    python -m benchmarks.engine.step_profile --out benchmarks/results/step-profile-h200.jsonl
    python -m benchmarks.engine.step_profile --decode 64 --context 8192 --prefill
    python -m benchmarks.engine.step_profile --decode --prefill 2048
    python -m benchmarks.engine.step_profile --model benchmarks/shapes/qwen3-30b-a3b --decode 1 64
    python -m benchmarks.engine.step_profile --tensor-parallel 2 --prefill 8192 --mixed 448

Wall times are measured without the profiler. The split into parts comes from torch.profiler's
device activities (CUPTI), over the next steps. Kernels overlap, because the next one starts early
and waits for earlier ones. So the sum of durations ("ms") is too large. "alone ms" is the time that
a part's kernels add after the end of all earlier kernels. Host time is the time that the host needs
for a step without waiting for the device.

With several ranks the profile is that of rank 0, and a floor is that of one rank divided by the
number of ranks.

It drives the public Engine (`add`, `step`), so it does not know how a step is made. It needs a CUDA
device. Ceilings are an H200's; pass those of another card.
"""

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.costs.matrix_bytes import formats_of
from benchmarks.engine.device_trace import (
    Trace,
    added_us,
    busy_us,
    parts_of,
    read_trace,
    span_us,
)
from benchmarks.engine.step_floor import PARTS, Ceilings, Stored, prompt_chunks, step_floor
from benchmarks.support.places import SHAPES
from pdserve.bench.cli import (
    add_model_arguments,
    add_output_arguments,
    engine_fields,
    model_fields,
)
from pdserve.bench.record import Json, append, check_writable, circumstances
from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.configs.kv_layout import DTYPE_BYTES
from pdserve.engine.engine import Engine
from pdserve.engine.ranks import build_with_ranks
from pdserve.plan.costs.step import Chunk
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.events import Delta
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

ROWS = (*PARTS, "between ranks", "copies", "other", "gaps")
MIXED_PROMPT = 1024  # tokens of each prompt beside decodes, if requests may be that long
UNPROFILED_PROMPTS = 3
PROFILED_PROMPTS = 2


@dataclass(frozen=True)
class Measured:
    """One scenario. `trace` has `num_profiled` units (decode steps, or prompts). Floors and wall
    times are those of one unit."""

    name: str
    wall_s: float
    profiled_wall_s: float
    trace: Trace
    num_profiled: int
    floor: dict[str, float]

    def row(self) -> Json:
        """Returns the figures JSON-ready, in milliseconds of one unit."""
        kernels = self.trace.kernels
        parts = parts_of([kernel.name for kernel in kernels])
        spent: defaultdict[str, float] = defaultdict(float)
        alone: defaultdict[str, float] = defaultdict(float)
        launches: Counter[str] = Counter()
        unknown: defaultdict[str, float] = defaultdict(float)
        for kernel, part, added in zip(kernels, parts, added_us(kernels), strict=True):
            spent[part] += kernel.duration
            alone[part] += added
            launches[part] += 1
            if part == "other":
                unknown[kernel.name[:80]] += kernel.duration
        spent["gaps"] = alone["gaps"] = span_us(kernels) - busy_us(kernels)

        slowest = sorted(unknown.items(), key=lambda item: -item[1])[:5]

        def ms(microseconds: float) -> float:
            return round(microseconds / 1e3 / self.num_profiled, 4)

        return {
            "benchmark": "step_profile",
            "scenario": self.name,
            "wall_ms": round(self.wall_s * 1e3, 4),
            "device_ms": ms(span_us(kernels)),
            "host_ms": ms(self.profiled_wall_s * 1e6 - self.trace.waiting_us),
            "floor_ms": round(sum(self.floor.values()) * 1e3, 4),
            "parts": {
                part: {
                    "ms": ms(spent[part]),
                    "alone_ms": ms(alone[part]),
                    "floor_ms": round(self.floor.get(part, 0.0) * 1e3, 4),
                    "kernels": launches[part] / self.num_profiled,
                }
                for part in ROWS
            },
            "other_kernels": {name: ms(microseconds) for name, microseconds in slowest},
        }


class Profiler:
    """Runs scenarios on an engine."""

    def __init__(self, engine: Engine, ceilings: Ceilings, num_steps: int) -> None:
        self.engine = engine
        self.ceilings = ceilings
        self.num_steps = num_steps
        self._stored = stored_by(engine)
        self._rng = random.Random(0)
        self._names = itertools.count()
        self._num_generated: Counter[RequestKey] = Counter()

    def decode(self, batch_sizes: Sequence[int], context: int) -> Iterator[Measured]:
        """Measures steady decode steps of each batch size, the largest first. Prompts are computed
        once, and then sequences leave."""
        running: list[RequestKey] = []
        for batch in sorted(batch_sizes, reverse=True):
            if not running:
                running = self._decoding(batch, context)
            while len(running) > batch:
                self.engine.abort(running.pop())
            self._steps(self.num_steps)  # older steps end, and graphs and kernels are warmed
            wall = self._timed(lambda: self._steps(self.num_steps)) / self.num_steps
            profiled, trace = self._profiled(lambda: self._steps(self.num_steps))
            now = [context + self._num_generated[key] - self.num_steps // 2 for key in running]
            floor = self._floor([Chunk(tokens, 1) for tokens in now])
            yield Measured(
                f"decode {batch} x {context}", wall, profiled, trace, self.num_steps, floor
            )
        self._abort(running)

    def mixed(self, batch: int, context: int) -> Measured:
        """Measures steps with `batch` decodes whose other tokens are prompts of MIXED_PROMPT
        tokens."""
        running = self._decoding(batch, context)
        num_prompt_rows = self.engine.config.max_num_batched_tokens - batch
        num_steps = 2 * self.num_steps + 4  # some to warm up, and what is still queued at the end
        length = min(MIXED_PROMPT, self.engine.max_request_tokens - 1)
        num_prompts = -(-num_steps * num_prompt_rows // length)
        running += [self._add(length, 1) for _ in range(num_prompts)]
        self._steps(2)
        wall = self._timed(lambda: self._steps(self.num_steps)) / self.num_steps
        profiled, trace = self._profiled(lambda: self._steps(self.num_steps))
        now = context + self._num_generated[running[0]] - self.num_steps // 2
        prompts, rest = divmod(num_prompt_rows, length)
        lengths = [length] * prompts + [rest] * bool(rest)
        chunks = [Chunk(now, 1)] * batch + [Chunk(rows, rows) for rows in lengths]
        self._abort(running)
        name = f"mixed {batch} x {context} + {num_prompt_rows}"
        return Measured(name, wall, profiled, trace, self.num_steps, self._floor(chunks))

    def _decoding(self, batch: int, context: int) -> list[RequestKey]:
        """Computes prompts, whose sequences then decode for as long as may be."""
        room = self.engine.max_request_tokens - context
        keys = [self._add(context, room) for _ in range(batch)]
        self._step_until_all_run(set(keys))
        return keys

    def _abort(self, keys: Sequence[RequestKey]) -> None:
        for key in keys:
            self.engine.abort(key)
        self._drain()

    def prefill(self, num_tokens: int) -> Measured:
        """Measures one prompt from its arrival to its first token."""

        def prompts(count: int) -> None:
            for _ in range(count):
                self._step_until_all_run({self._add(num_tokens, 1)})

        prompts(1)
        wall = statistics.median(self._timed(lambda: prompts(1)) for _ in range(UNPROFILED_PROMPTS))
        profiled, trace = self._profiled(lambda: prompts(PROFILED_PROMPTS))
        steps = prompt_chunks(num_tokens, self.engine.config.max_num_batched_tokens)
        floors = [self._floor([chunk]) for chunk in steps]
        floor = {part: sum(floor[part] for floor in floors) for part in PARTS}
        return Measured(f"prefill {num_tokens}", wall, profiled, trace, PROFILED_PROMPTS, floor)

    def _floor(self, chunks: list[Chunk]) -> dict[str, float]:
        floor = step_floor(self.engine.spec, self._stored, self.ceilings, chunks)
        return {part: seconds / self.engine.config.num_ranks for part, seconds in floor.items()}

    def _add(self, num_prompt: int, num_output: int) -> RequestKey:
        vocab = range(self.engine.spec.vocab_size)
        submit = Submit(
            key=RequestKey("profile", 0, str(next(self._names))),
            phase="full",
            prompt_token_ids=tuple(self._rng.choices(vocab, k=num_prompt)),
            sampling=SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, seed=0),
            starts=(Start(0),),
        )
        self.engine.add(self.engine.make_request(submit), submit.starts)
        return submit.key

    def _step_until_all_run(self, waiting: set[RequestKey]) -> None:
        """Runs steps until each of these requests has a token."""
        while waiting:
            self._steps(1)
            waiting = {key for key in waiting if not self._num_generated[key]}

    def _steps(self, count: int) -> None:
        results = [self.engine.step() for _ in range(count)]
        for result in results:
            self._num_generated.update(
                key for key, event in result.events if isinstance(event, Delta)
            )

    def _drain(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def _timed(self, work: Callable[[], None]) -> float:
        """Measures the seconds of work. The device is idle before and after."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def _profiled(self, work: Callable[[], None]) -> tuple[float, Trace]:
        with tempfile.TemporaryDirectory() as folder:
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                seconds = self._timed(work)
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return seconds, read_trace(path)


def stored_by(engine: Engine) -> Stored:
    """Returns the bytes of the engine's numbers, and the formats of its weights."""
    cached = engine.layout.groups[0].dtype
    # rows that the cache does not round have the dtype of the activations
    item = next(iter(engine.unrounded.values()), cached)
    return Stored(DTYPE_BYTES[item], DTYPE_BYTES[cached], formats_of(engine.spec))


def table(row: Json) -> str:
    """Returns one scenario as text. "of device" is a share of "alone ms", so the shares add up to
    100 %."""
    lines = [
        f"{row['scenario']}: wall {row['wall_ms']:.3f} ms, device {row['device_ms']:.3f}, "
        f"host {row['host_ms']:.3f}, floor {row['floor_ms']:.3f} "
        f"({row['floor_ms'] / row['wall_ms']:.0%} of wall)",
        f"    {'part':<16}{'ms':>10}{'alone ms':>10}{'of device':>11}{'floor ms':>10}"
        f"{'of floor':>10}{'kernels':>9}",
    ]
    for part, spent in row["parts"].items():
        if spent["ms"] or spent["floor_ms"]:
            reached = (
                f"{spent['floor_ms'] / spent['ms']:.0%}"
                if spent["ms"] and spent["floor_ms"]
                else ""
            )
            share = spent["alone_ms"] / row["device_ms"]
            floor = f"{spent['floor_ms']:.3f}" if spent["floor_ms"] else ""
            lines.append(
                f"    {part:<16}{spent['ms']:>10.3f}{spent['alone_ms']:>10.3f}{share:>11.1%}"
                f"{floor:>10}{reached:>10}{spent['kernels']:>9.1f}"
            )
    lines += [f"    other: {ms:.3f} ms {name}" for name, ms in row["other_kernels"].items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--decode", type=int, nargs="*", default=[1, 64, 256], help="batch sizes (default 1 64 256)"
    )
    parser.add_argument(
        "--context", type=int, default=1024, help="tokens per decoding sequence (default 1024)"
    )
    parser.add_argument(
        "--prefill", type=int, nargs="*", default=[2048, 8192, 16000], help="prompt lengths"
    )
    parser.add_argument(
        "--mixed", type=int, nargs="*", default=[], help="decodes of steps with prompts, too"
    )
    parser.add_argument(
        "--steps", type=int, default=16, help="decode steps to time and to profile (default 16)"
    )
    parser.add_argument("--read-ceiling", type=float, default=4.45, help="TB/s")
    parser.add_argument("--flop-ceiling", type=float, default=696.0, help="TFLOP/s of products")
    add_model_arguments(parser)
    parser.set_defaults(model=str(SHAPES / "llama-3.1-8b"), load_format="dummy")
    parser.set_defaults(engine_max_num_batched_tokens="8192", engine_max_num_seqs="512")
    add_output_arguments(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("step_profile: needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    try:
        run(options)
    except (ValueError, OSError) as error:
        print(f"step_profile: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    """Runs every scenario of the options, prints it and appends it to --out."""
    check_writable(options.out)
    sizes = [*options.decode, *options.mixed]
    if min([*sizes, *options.prefill, options.context, options.steps]) < 1:
        raise ValueError("--decode, --mixed, --context, --prefill and --steps must be at least 1")
    model = ModelConfig(path=options.model, **model_fields(options))
    engine, run_work = build_with_ranks(model, EngineConfig(**engine_fields(options)))
    if max(sizes, default=0) > engine.config.max_num_seqs:
        raise ValueError(
            f"--decode or --mixed {max(sizes)} is more than --max-num-seqs "
            f"{engine.config.max_num_seqs}"
        )
    ceilings = Ceilings(options.read_ceiling * 1e12, options.flop_ceiling * 1e12)
    profiler = Profiler(engine, ceilings, options.steps)
    run_work(lambda _: measure(profiler, options))


def measure(profiler: Profiler, options: argparse.Namespace) -> None:
    scenarios = itertools.chain(
        (profiler.prefill(num_tokens) for num_tokens in options.prefill),
        (profiler.mixed(batch, options.context) for batch in options.mixed),
        profiler.decode(options.decode, options.context),
    )
    for measured in scenarios:
        row = measured.row()
        print(table(row), flush=True)
        facts = {
            "model": Path(options.model).name,
            "device": torch.cuda.get_device_name(profiler.engine.device),
        }
        append(
            options.out,
            row | facts | {"engine": engine_fields(options)} | circumstances(options.commit),
        )


if __name__ == "__main__":
    sys.exit(main())
