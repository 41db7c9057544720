"""Measures what a decode step costs the host of a follower, which is every rank but rank 0.

    python -m benchmarks.engine.followers --out benchmarks/results/followers.jsonl
    python -m benchmarks.engine.followers --model benchmarks/shapes/llama-3.1-8b \\
        --load-format dummy --num-kv-blocks 8192                                 # on two GPUs

Two ranks run as an `LLM` starts them. Rank 1 notes each step of --rows decodes. `host ms` is from
the message until it is ready for the next one: it decodes the message, prepares the arrays, and
starts the model and the exchange of tokens. `cpu ms` is the CPU time of that thread, and includes
reading the message from the ring.

On CPU both ranks have graphs that compute nothing in place of CUDA graphs, so that what remains is
the host's part. There `host ms` also has rank 1's wait for the tokens of rank 0, so `cpu ms` is the
figure. On GPUs the model is real. The device's work is queued and nobody waits for it, so `host ms`
is the figure. Figures are medians, and 99th percentiles.
"""

import argparse
import contextlib
import gc
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar
from unittest import mock

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.support.markdown import table
from benchmarks.support.places import DEMO
from pdserve.bench.cli import (
    add_model_arguments,
    add_output_arguments,
    engine_fields,
    model_fields,
)
from pdserve.bench.option_values import integer
from pdserve.bench.record import Json, append, check_writable, circumstances, gpu_name
from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine
from pdserve.engine.execution import model_runner
from pdserve.engine.execution.cuda_graphs import DecodeStep
from pdserve.engine.execution.group_executor import GroupExecutor
from pdserve.engine.execution.model_runner import ModelRunner
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.engine.ranks import RankProcesses, RankTask
from pdserve.engine.stepping.packing import blank, unpack
from pdserve.engine.stepping.wire import decode_work
from pdserve.engine.stepping.work import ForwardWork
from pdserve.parallel.hang_up import end_with
from pdserve.parallel.step_channel import StepReceiver
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.protocol.start_progress import Report

PROMPT = 8  # tokens
WARM_STEPS = 20


class Noted(msgspec.Struct, frozen=True):
    """One message of a follower."""

    num_decodes: int  # 0: it was no step of decodes alone
    host_s: float
    cpu_s: float


class Clock:
    """Receives in place of StepReceiver, and times what its caller does between two messages."""

    def __init__(self) -> None:
        self._times: list[tuple[bytes, float, float]] = []
        self._message = b""
        self._began = self._cpu = 0.0

    def receive(self, receive: Callable[[], bytes]) -> bytes:
        if self._message:
            host_s = time.perf_counter() - self._began
            self._times.append((self._message, host_s, time.thread_time() - self._cpu))
        self._cpu = time.thread_time()
        self._message = receive()
        self._began = time.perf_counter()
        return self._message

    def noted(self) -> list[Noted]:
        return [Noted(decodes_of(message), *times) for message, *times in self._times]


def decodes_of(message: bytes) -> int:
    """Returns the number of sequences of a step of decodes alone, of any other message 0."""
    work = decode_work(message)
    if not isinstance(work, ForwardWork):
        return 0
    is_decode = all(not home.shape.chunks for home in work.homes)
    return work.num_samples if is_decode else 0


class NoGraphs:
    """Stands for DecodeGraphs on CPU: it computes a step once, and a replay takes the step's arrays
    and computes nothing."""

    def __init__(self, step: DecodeStep, device: torch.device, memory: object) -> None:
        self._step = step
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def capture(self, sizes: Sequence[int], report: Report) -> None:
        for size in sizes:
            lengths = [size, size, size, size, size, 1]
            packed = torch.from_numpy(blank(lengths))
            arrays = unpack(packed, lengths)
            self._kept[size] = (packed, *self._step(arrays), arrays.slots)

    def size_for(self, num_seqs: int) -> int:
        return min((size for size in self._kept if size >= num_seqs), default=0)

    def replay(self, size: int, packed: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        place, *results = self._kept[size]
        place.copy_(torch.from_numpy(packed))
        hidden, logits, slots = results
        return hidden, logits, slots


@contextlib.contextmanager
def without_device() -> Iterator[None]:
    """Gives NoGraphs to runners on CPU that get their KV cache now."""
    use_kv_cache = ModelRunner.use_kv_cache

    def use(runner: ModelRunner, kv_cache: KVCache) -> None:
        use_kv_cache(runner, kv_cache)
        if runner.device.type == "cpu":
            no_capture = mock.patch.object(model_runner, "capturing", contextlib.nullcontext)
            with no_capture, mock.patch.object(model_runner, "DecodeGraphs", NoGraphs):
                runner.capture_graphs([len(runner.tables) - 1], [], lambda *_: None)

    with mock.patch.object(ModelRunner, "use_kv_cache", use):
        yield


class ClockedRanks(RankProcesses):
    """Ranks whose processes note their steps in `notes`."""

    notes: ClassVar[Path]

    def command(self) -> list[str]:
        return [sys.executable, "-m", "benchmarks.engine.followers", "--follow", str(self.notes)]


def follow(notes: Path) -> None:
    """Runs as rank 1: reads its RankTask from standard input, and writes notes at its end."""
    task = msgspec.json.decode(sys.stdin.readline(), type=RankTask)
    end_with(task.parent, sys.stdin.fileno())
    torch.set_num_threads(task.num_threads)
    with without_device():
        following = task.start()
    gc.collect()
    gc.freeze()
    clock, receive = Clock(), StepReceiver.receive
    with mock.patch.object(
        StepReceiver, "receive", lambda end: clock.receive(lambda: receive(end))
    ):
        following.run()
    notes.write_bytes(msgspec.json.encode(clock.noted()))


def measure(model: ModelConfig, config: EngineConfig, num_rows: int, num_steps: int) -> Json:
    """Runs num_steps steps of num_rows decodes, and returns the figures of rank 1."""
    with tempfile.TemporaryDirectory() as folder:
        ClockedRanks.notes = Path(folder) / "notes.json"
        ranks = ClockedRanks(model, config)
        try:
            with without_device():
                engine = build_engine(model, config, group=ranks.group)
            assert isinstance(engine.executor, GroupExecutor)
            run(engine, num_rows, num_steps)
            engine.executor.close()
        finally:
            ranks.close()
        noted = msgspec.json.decode(ClockedRanks.notes.read_bytes(), type=list[Noted])
    steps = [each for each in noted if each.num_decodes == num_rows][-num_steps:]
    if len(steps) < num_steps:
        raise ValueError(f"{len(steps)} steps of {num_rows} decodes: {num_steps} were expected")
    found = {"host_ms": [1e3 * s.host_s for s in steps], "cpu_ms": [1e3 * s.cpu_s for s in steps]}
    return {
        "benchmark": "followers",
        "rows": num_rows,
        "steps": num_steps,
        "device": gpu_name(),
        "load": round(os.getloadavg()[0], 1),  # processes that ran on the machine meanwhile
        **{
            name: {
                "median": round(statistics.median(times), 4),
                "p99": round(statistics.quantiles(times, n=100)[98], 4),
            }
            for name, times in found.items()
        },
    }


def run(engine: Engine, num_rows: int, num_steps: int) -> None:
    chance = random.Random(0)
    for number in range(num_rows):
        submit = Submit(
            key=RequestKey("followers", 0, str(number)),
            phase="full",
            prompt_token_ids=tuple(chance.choices(range(engine.spec.vocab_size), k=PROMPT)),
            sampling=SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
            starts=(Start(0),),
        )
        engine.add(engine.make_request(submit), submit.starts)
    for _ in range(WARM_STEPS + num_steps):
        engine.step()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=integer(1), default=256, help="decodes (default 256)")
    parser.add_argument("--steps", type=integer(2), default=200, help="steps (default 200)")
    parser.add_argument("--follow", type=Path, help=argparse.SUPPRESS)
    add_model_arguments(parser)
    parser.set_defaults(model=str(DEMO), engine_tensor_parallel="2", engine_max_num_seqs="256")
    add_output_arguments(parser)
    options = parser.parse_args()
    if options.follow is not None:
        follow(options.follow)
        return 0
    try:
        check_writable(options.out)
        fields = engine_fields(options)
        model = ModelConfig(path=options.model, **model_fields(options))
        row = measure(model, EngineConfig(**fields), options.rows, options.steps)
    except (ValueError, OSError) as error:
        print(f"followers: {error}", file=sys.stderr)
        return 2
    figures = [[name, row[name]["median"], row[name]["p99"]] for name in ("host_ms", "cpu_ms")]
    print(table(["", "median", "p99"], [list(map(str, line)) for line in figures]))
    facts = {"model": Path(options.model).name, "engine": fields}
    append(options.out, row | facts | circumstances(options.commit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
