"""Measures a profile: steps of one engine on this machine, in about a minute on a GPU.

- decodes: Sequences join with contexts that were never computed, and run a few steps.
- prompts: One prompt per step, without a prefix or after a cached prefix that was never computed.
- mixed: Prompts beside running decodes.

KV rows that were never computed are random on a GPU: attention over zeros takes less power, so the
device would be faster than in use. Times of a GPU are the device's, including its waits for
launches. On CPU they are measured between the ends of two steps. Hand-offs need two engines, so
they are not measured: the defaults of `Profile` are used. This module drives an engine in this
process. `plan.cli` calls it.
"""

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.configs.kv_layout import DTYPE_BYTES, KVLayout
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.engine.stepping.executor import padded_rows
from pdserve.models.config import ModelSpec
from pdserve.plan.costs.rates import H200
from pdserve.plan.costs.step import ITEM, CostModel
from pdserve.plan.profile.profile import CPU, DecodePoint, MixedPoint, Profile, PromptPoint
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.request_key import Phase, RequestKey
from pdserve.protocol.sampling_params import SamplingParams

STEPS = 12  # decode steps per point, of which the first WARM do not count
WARM = 4
REPEATS = 5  # repetitions of a prompt
SHARE = 0.9  # share of the KV cache that a point may fill
FILLED_BLOCKS = 256  # blocks that are filled with random rows at once


@dataclass(frozen=True)
class Grid:
    """The points to measure if they fit. Of each kind, small points are measured first, and no
    point begins after `seconds`. A pair of `starts` is (rows of a prompt, cached rows before
    them)."""

    batches: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, 512)
    contexts: tuple[int, ...] = (256, 1024, 4096, 16384)
    rows: tuple[int, ...] = (
        *(64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896),
        *(1024, 2048, 4096, 8192),
    )
    starts: tuple[tuple[int, int], ...] = (
        *((128, 4032), (512, 4032), (1024, 6016)),
        *((64, 12032), (128, 12032), (256, 12032), (512, 12032), (2048, 12032)),
        *((2048, 8192), (6784, 8192), (8192, 8192), (2048, 32768)),
    )
    mixed_batches: tuple[int, ...] = (8, 32, 128)
    mixed_rows: tuple[int, ...] = (64, 256, 1024, 2048, 4096)
    mixed_context: int = 1024
    seconds: float = 20.0


def measure_profile(
    model: str, device: str, load_format: str, dtype: str, grid: Grid | None = None
) -> Profile:
    """Measures a profile. Raises ValueError that names the wrong parameter."""
    config = ModelConfig.model_validate({"path": model, "load_format": load_format, "dtype": dtype})
    engine = build_engine(config, EngineConfig.model_validate({"device": device}))
    if engine.device.type == "cpu":
        torch.set_num_threads(1)  # as in a worker
    else:
        _fill(engine.kv_cache)
    try:
        return _Measuring(engine, grid or Grid()).profile(config.served_name)
    finally:
        engine.close()


class _Measuring:
    def __init__(self, engine: Engine, grid: Grid) -> None:
        self._engine = engine
        self._grid = grid
        self._size = engine.config.block_size
        self._room = int(SHARE * engine.blocks.num_usable) * self._size
        self._names = itertools.count()
        self._draw = random.Random(0)

    def profile(self, name: str) -> Profile:
        engine = self._engine
        on_cuda = engine.device.type == "cuda"
        decodes = list(self._decodes())
        prompts = list(self._prompts())
        mixed = list(self._mixed())
        host_s = self._host_s()
        num_kv_tokens = engine.blocks.num_usable * self._size
        return Profile(
            device=torch.cuda.get_device_name(engine.device) if on_cuda else CPU,
            model=name,
            dtype=engine.layout.groups[0].dtype,
            spec=engine.spec.model_dump(mode="json"),
            source=(
                f"pdserve profile, torch {torch.__version__}, "
                f"{time.strftime('%Y-%m-%d', time.gmtime())}",
                "hand-offs: kv-transfer-h200.jsonl, d05d49d (not measured by pdserve profile)",
            ),
            decodes=tuple(decodes),
            prompts=tuple(prompts),
            mixed=tuple(mixed),
            graph_rows=self._graph_rows(),
            host_s=host_s,
            launch_s=engine.steps.launch_s if on_cuda else 0.0,
            memory_bytes=_memory_bytes(engine.spec, num_kv_tokens, engine.layout),
            num_kv_tokens=num_kv_tokens,
        )

    def _graph_rows(self) -> tuple[int, ...]:
        """Numbers of rows of the graphs to which the engine pads smaller steps with prompts."""
        engine = self._engine
        if engine.device.type != "cuda":
            return ()
        return padded_rows(engine.executor, engine.scheduler.max_num_batched_tokens)

    # --- points ---

    def _decodes(self) -> Iterator[DecodePoint]:
        points = [
            (batch, context)
            for context in self._grid.contexts
            for batch in self._grid.batches
            if batch <= self._engine.config.max_num_seqs and self._fits(batch, context)
        ]
        points.sort(key=lambda point: point[0] * (point[1] + 1000))
        for batch, context in self._in_time(points, "decodes"):
            keys = [self._join(context) for _ in range(batch)]
            seconds = [dt for dt, rows in self._steps(STEPS) if rows == batch]
            self._end(keys)
            if len(seconds) > WARM:
                yield DecodePoint(batch, context, statistics.median(seconds[WARM:]))

    def _prompts(self) -> Iterator[PromptPoint]:
        engine = self._engine
        most = engine.scheduler.max_num_batched_tokens
        longest = engine.max_request_tokens - 2
        points = [*((rows, 0) for rows in self._grid.rows), *self._grid.starts]
        for rows, start in self._in_time(points, "prompts"):
            if rows > most or start + rows > longest or not self._fits(1, start + rows):
                continue
            # only one prompt per step, though several are waiting
            engine.scheduler.max_num_batched_tokens = rows
            repeats = min(REPEATS, max(1, self._room // (start + rows + self._size)))
            for _ in range(repeats):
                self._add(start, rows)
            seconds = [dt for dt, count in self._steps() if count == rows]
            engine.scheduler.max_num_batched_tokens = most
            # the first of several prompts fills the pipeline, so it does not count
            yield PromptPoint(rows, start, statistics.median(seconds[1:] or seconds))

    def _mixed(self) -> Iterator[MixedPoint]:
        longest = self._engine.max_request_tokens - 2
        context = self._grid.mixed_context
        points = [
            (rows, batch)
            for batch in self._grid.mixed_batches
            for rows in self._grid.mixed_rows
            if rows <= min(longest, self._engine.scheduler.max_num_batched_tokens - batch)
            and batch < self._engine.config.max_num_seqs
            and self._fits(batch, context + rows)
        ]
        for rows, batch in self._in_time(points, "mixed"):
            keys = [self._join(context, 10 * REPEATS) for _ in range(batch)]
            seconds: list[float] = []
            for _ in range(REPEATS):
                list(self._steps(2))
                self._add(0, rows)
                seconds += [dt for dt, count in self._steps(4) if count == batch + rows]
            self._end(keys)
            if seconds:
                yield MixedPoint(rows, batch, context, statistics.median(seconds))

    def _host_s(self) -> float:
        """Returns the seconds until an idle device begins a step."""
        found = []
        for _ in range(REPEATS):
            key = self._join(min(256, self._engine.max_request_tokens - STEPS - 2))
            times = [dt for dt, _ in self._steps(STEPS)]
            self._end([key])
            if len(times) > WARM:
                found.append(times[0] - statistics.median(times[WARM:]))
        return max(1e-4, statistics.median(found)) if found else 1e-3

    def _in_time(self, points: Sequence[tuple[int, int]], name: str) -> Iterator[tuple[int, int]]:
        until = time.perf_counter() + self._grid.seconds
        for point in tqdm(points, name):
            if time.perf_counter() < until:
                yield point

    # --- the engine ---

    def _fits(self, batch: int, context: int) -> bool:
        tokens = -(-(context + 2 * STEPS) // self._size) * self._size
        longest = self._engine.max_request_tokens - 2 * STEPS
        return batch * tokens <= self._room and context <= longest

    def _request(self, num_tokens: int, num_out: int, phase: Phase) -> Submit:
        vocab = self._engine.spec.vocab_size
        prompt = tuple(self._draw.choices(range(vocab), k=num_tokens))
        forced = (self._draw.randrange(vocab),) if phase == "decode" else ()
        return Submit(
            key=RequestKey("profile", 0, str(next(self._names))),
            phase=phase,
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True, seed=0),
            starts=(Start(0, forced),),
        )

    def _join(self, context: int, num_out: int = 2 * STEPS) -> RequestKey:
        """Adds a decoding sequence of `context` tokens as if its rows were computed already."""
        submit = self._request(context, num_out, "decode")
        engine = self._engine
        request = engine.make_request(submit)
        request.prompt_reported = True
        reservation = engine.reserve(request, submit.starts)
        assert reservation is not None, "a point that does not fit the KV cache"
        engine.join(reservation)
        return submit.key

    def _add(self, start: int, rows: int) -> None:
        """Adds a prompt as if its first `start` tokens were cached."""
        submit = self._request(start + rows, 1, "full")
        engine = self._engine
        request = engine.make_request(submit)
        if start:
            reservation = engine.reserve(request, submit.starts, start // self._size)
            assert reservation is not None, "a point that does not fit the KV cache"
            engine.cancel_reservation(reservation, True, len(reservation.destination))
        engine.add(request, submit.starts)

    def _steps(self, most: int = 1 << 30) -> Iterator[tuple[float, int]]:
        """Runs steps until there is nothing to do. Yields the seconds and rows of each. The seconds
        are the device's, or those since the end of the previous step."""
        before = time.perf_counter()
        for _ in range(most):
            if not self._engine.has_work:
                return
            result = self._engine.step()
            now = time.perf_counter()
            # If a step is launched slowly, the end of the previous step is noticed late.
            yield result.device_seconds or now - before, result.num_rows
            before = now

    def _end(self, keys: Sequence[RequestKey]) -> None:
        for key in keys:
            self._engine.abort(key)
        for _ in self._steps():
            pass


def _fill(cache: KVCache) -> None:
    """Fills all blocks but the null block with random rows."""
    for group in cache.groups:
        for blocks in group[1:].split(FILLED_BLOCKS):
            if group.dtype.itemsize > 1:
                blocks.normal_()
            else:  # codes, which cannot be drawn in place
                blocks.copy_(torch.randn(blocks.shape, device=group.device))


def _memory_bytes(spec: ModelSpec, num_kv_tokens: int, layout: KVLayout) -> float:
    """Returns the bytes that weights and KV cache take on the device. The weights are counted as in
    the cost model."""
    share = DTYPE_BYTES[layout.groups[0].dtype] / ITEM
    weights = H200.memory_bytes - CostModel(spec).room() * layout.token_bytes / share
    return share * weights + num_kv_tokens * layout.token_bytes
