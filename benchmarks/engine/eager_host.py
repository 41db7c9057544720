"""Host time of one eager forward (no CUDA graph) at Llama-3.1-8B shapes. This is the cost of a step
with prefill chunks for the host, before the device has anything to do, whatever the number of rows.

    python -m benchmarks.engine.eager_host --out benchmarks/results/eager-host.jsonl
    python -m benchmarks.engine.eager_host --rows 1920 2048 2084 2176 --decodes 0 36

Figures are medians over forwards that start on an idle device and are not awaited. torch's profiler
counts the launches. With --rows, the time until the device is done is measured over the rows of a
step, where the tiles of cuBLAS's products make stairs. Weights stay uninitialised, because results
are not read. A bare uvicorn shows how fast the host is. This module knows model and attention, but
no engine. benchmarks/engine/launches.py uses its `Step`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.support.places import SHAPES
from benchmarks.support.yardstick import bare_us_per_token, beside
from pdserve.bench.record import Json, append, git_commit
from pdserve.engine.execution.attention import AttentionBatch, PagedAttention
from pdserve.engine.memory.kv_cache import layout_of
from pdserve.engine.memory.kv_cache_size import allocate_kv_cache
from pdserve.engine.stepping.work import StepShape
from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.experts.placement import Placements
from pdserve.kernels.ops import Ops, ops_for
from pdserve.models.config import ModelSpec, read_spec
from pdserve.models.registry import builder_of
from pdserve.models.step_context import Attend, AttendLatent, StepContext, no_latents
from pdserve.parallel.dims import ParallelDims

SHAPE = SHAPES / "llama-3.1-8b"
LLAMA_8B = read_spec(str(SHAPE), "dummy").model_copy(update={"max_position": 8192})
BLOCK_SIZE = 128
MAX_BLOCKS = 32
CONTEXT = 1000  # tokens of a decode's context
ROUNDS = 41  # rounds over a staircase
Case = tuple[int, tuple[int, ...]]  # number of decodes, lengths of fresh prompts
CASES: dict[str, Case] = {
    "64 rows": (0, (64,)),
    "512 rows": (0, (512,)),
    "2,048 rows": (0, (2048,)),
    "200 decodes + 2 x 256": (200, (256, 256)),
    "201 decodes + 2 x 255": (201, (255, 255)),
}


@dataclass(frozen=True)
class Result:
    """The figures of one case, which become a JSON line of --out. Launches are those of kernels and
    copies."""

    name: str
    host_ms: float
    device_ms: float
    launches_per_layer: float
    device: str
    commit: str


@dataclass(frozen=True)
class Stair:
    """The figures of one case of --rows, which become a JSON line of --out. The step has
    `num_decodes` decodes beside a prompt chunk of num_rows - num_decodes rows."""

    num_rows: int
    num_decodes: int
    host_ms: float
    device_ms: float
    us_per_row: float
    rounds: int
    device: str
    commit: str


class Step:
    """Runs forwards of one model, or of one rank's part of it, over a made-up batch."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        device: torch.device,
        dims: ParallelDims | None = None,
        placements: Placements | None = None,
    ) -> None:
        build = builder_of(spec)
        dims = dims or ParallelDims()
        self._model = build(spec, torch.bfloat16, device, ops, dims, placements)
        self._model.weights.finish()
        self._ops = ops
        self._device = device
        layout = layout_of(self._model.attention, BLOCK_SIZE, "bfloat16")
        self._kv_cache = allocate_kv_cache(layout, 256, device)

    def forward(self, num_decodes: int, prompts: tuple[int, ...]) -> Callable[[], object]:
        """Returns a call that does what the model runner does in an eager step, once its inputs are
        on the device. All rows are written to one block."""

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._device)

        num_rows = num_decodes + sum(prompts)
        num_seqs = num_decodes + len(prompts)
        num_blocks = max(MAX_BLOCKS, -(-max(prompts) // BLOCK_SIZE))
        zeros = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        starts = [sum(prompts[:i]) for i in range(len(prompts) + 1)]
        batch = AttentionBatch(
            StepShape(num_decodes, CONTEXT if num_decodes else 0, tuple((0, n) for n in prompts)),
            positions=zeros,
            slot_mapping=torch.arange(num_rows, device=self._device) % BLOCK_SIZE,
            block_tables=torch.zeros(
                (num_seqs, num_blocks), dtype=torch.int32, device=self._device
            ),
            table_rows=torch.arange(num_seqs, dtype=torch.int32, device=self._device),
            context_lens=ints(*[CONTEXT] * num_decodes, *prompts),
            query_starts=ints(*starts),
        )

        def run() -> None:
            attention = PagedAttention(self._kv_cache, self._ops, batch)
            self._forward(zeros, attention, attention.latent)

        return run

    def _forward(
        self, ids: torch.Tensor, attend: Attend, attend_latent: AttendLatent = no_latents
    ) -> None:
        step = StepContext(attend, ids, attend_latent=attend_latent)
        self._model.hidden(self._model.forward(self._model.embed(ids, step), step))

    def warm_dense_prefill(self, num_rows: int) -> None:
        zeros = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        tables = torch.zeros((1, MAX_BLOCKS), dtype=torch.int32, device=self._device)

        def attend(
            layer: int,
            spec: AttentionSpec,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            _rope: object,
            _norms: object,
            _sinks: object,
        ) -> torch.Tensor:
            if layer == 0:
                self._ops.attention.warm_prefill(q, k, v, self._kv_cache.layers[0], tables, spec)
            return q

        self._forward(zeros, attend)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds until the host is done with one forward, and until the device is."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return host, time.perf_counter() - start


def medians_ms(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the medians of results of `timed`."""
    host, device = (statistics.median(seconds) * 1000 for seconds in zip(*times, strict=True))
    return host, device


def measure(name: str, run: Callable[[], object], num_layers: int, commit: str) -> Result:
    for _ in range(3):
        run()
    host, device = medians_ms([timed(run) for _ in range(15)])
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run()
        torch.cuda.synchronize()
    launches = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in prof.events())
    return Result(
        name,
        round(host, 2),
        round(device, 2),
        round(launches / num_layers, 2),
        torch.cuda.get_device_name(),
        commit,
    )


def measure_stairs(step: Step, cases: Iterable[Case], commit: str) -> list[Stair]:
    """Measures in rounds over all cases, so that clocks that fall as the device warms do not look
    like a stair between two cases."""
    cases = list(cases)
    runs = [step.forward(*case) for case in cases]
    for run in runs * 3:
        run()
    rounds = [[timed(run) for run in runs] for _ in range(ROUNDS)]
    device = torch.cuda.get_device_name()
    return [
        stair(case, times, device, commit)
        for case, times in zip(cases, zip(*rounds, strict=True), strict=True)
    ]


def stair(case: Case, times: Sequence[tuple[float, float]], device: str, commit: str) -> Stair:
    num_decodes, prompts = case
    num_rows = num_decodes + sum(prompts)
    host_ms, device_ms = medians_ms(times)
    us_per_row = round(device_ms * 1000 / num_rows, 3)
    return Stair(
        num_rows,
        num_decodes,
        round(host_ms, 3),
        round(device_ms, 3),
        us_per_row,
        len(times),
        device,
        commit,
    )


def mixed_cases(rows: Sequence[int], decodes: Sequence[int]) -> list[Case]:
    """Returns cases with one prompt chunk beside decodes, for every number of decodes and every
    number of rows. Raises ValueError for a chunk that the engine or the model cannot have."""
    cases: list[Case] = []
    for num_decodes in decodes:
        for num_rows in rows:
            chunk = num_rows - num_decodes
            if num_decodes < 0 or not 2 <= chunk <= LLAMA_8B.max_position:
                raise ValueError(
                    f"{num_rows} rows with {num_decodes} decodes leave a chunk of {chunk}: "
                    f"--rows must be 2 to {LLAMA_8B.max_position} above --decodes, which must not "
                    "be negative"
                )
            cases.append((num_decodes, (chunk,)))
    return cases


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[Case]]:
    """Returns the arguments, and the cases of --rows and --decodes. Exits if one is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    parser.add_argument("--commit", help="commit of the measured code (default: git's)")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        metavar="N",
        help="measure steps of N rows instead of the fixed cases",
    )
    parser.add_argument(
        "--decodes", type=int, nargs="+", metavar="D", help="decodes among these rows (default: 0)"
    )
    args = parser.parse_args(arguments)
    if args.decodes and not args.rows:
        parser.error("--decodes needs --rows: the fixed cases have their own")
    try:
        return args, mixed_cases(args.rows or (), args.decodes or (0,))
    except ValueError as error:
        parser.error(str(error))


@torch.inference_mode()
def main() -> None:
    args, mixed = parse()
    if not torch.cuda.is_available():
        sys.exit("eager_host: needs a CUDA device, and torch sees none")
    commit = args.commit or git_commit()
    device = torch.device("cuda", torch.cuda.current_device())
    step = Step(LLAMA_8B, ops_for(device), device)
    step.warm_dense_prefill(max(sum(prompts) for _, prompts in mixed or CASES.values()))
    bare = bare_us_per_token()
    print(beside(bare))
    if mixed:
        print_stairs(measure_stairs(step, mixed, commit), bare, args.out)
    else:
        print_cases(step, commit, bare, args.out)


def print_cases(step: Step, commit: str, bare: Json, out: Path | None) -> None:
    """Measures the fixed cases one after the other."""
    print(f"{'eager forward':28} host ms  until done  launches a layer")
    for name, case in CASES.items():
        result = measure(name, step.forward(*case), LLAMA_8B.num_layers, commit)
        print(
            f"{name:28} {result.host_ms:7.2f} {result.device_ms:11.2f} "
            f"{result.launches_per_layer:17.2f}"
        )
        append(out, asdict(result) | {"bare_us_per_token": bare})


def print_stairs(stairs: Iterable[Stair], bare: Json, out: Path | None) -> None:
    print("  rows  decodes  until done ms  us a row  host ms")
    for s in stairs:
        print(
            f"{s.num_rows:6,} {s.num_decodes:8,} {s.device_ms:14.3f} {s.us_per_row:9.3f} "
            f"{s.host_ms:8.3f}"
        )
        append(out, asdict(s) | {"bare_us_per_token": bare})


if __name__ == "__main__":
    main()
