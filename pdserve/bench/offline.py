"""Measures the speed of one engine in this process through `LLM.generate`: latency of one batch,
and throughput of many prompts.

Prompts are fresh random token ids in every run, sampling is greedy, and end-of-sequence is ignored.
So caches and early ends play no part. Prefill is the time of a run with one output token. Decode is
the time of the tokens after it, one step each. Called by bench.cli and
benchmarks/targets/measure.py.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from pdserve.bench.record import Json, repeated
from pdserve.bench.workload import Lengths, Shape, draw_work
from pdserve.engine.llm import LLM, SamplingParams

# A warm-up run has enough tokens to use every kernel, and few enough to be quick.
WARMUP_INPUT = 64
WARMUP_OUTPUT = 16


@dataclass(frozen=True)
class OfflineConfig:
    """Says what to measure.

    `path` is a folder or Hub id, `model` holds other fields of ModelConfig and `engine` fields of
    EngineConfig, and `repeats` is the number of timed runs per shape.
    """

    path: str
    model: dict[str, Any]
    engine: dict[str, Any]
    repeats: int = 3
    seed: int = 0


class Bench:
    """Measures one engine.

    `start_s` is the time from nothing to the first token, without imports.
    """

    def __init__(self, config: OfflineConfig) -> None:
        self.config = config
        began = time.perf_counter()
        self.llm = LLM(
            config.path,
            seed=config.seed,
            tokenizer=False,
            **config.model,
            **config.engine,
        )
        self._num_runs = 0
        self._run(Shape(1, Lengths(16, 16), Lengths(1, 1)))
        self.start_s = time.perf_counter() - began

    @property
    def device(self) -> str:
        device = self.llm.engine.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

    def latency(self, shapes: list[Shape], progress: bool = True) -> Iterator[tuple[Shape, Json]]:
        """Measures a batch of each shape: prefill ms, decode ms per token, and seconds of the
        whole.

        The lengths of a shape must be fixed.
        """
        for shape in shapes:
            if (
                shape.input_len.low != shape.input_len.high
                or shape.output_len.low != shape.output_len.high
            ):
                raise ValueError(f"latency needs fixed lengths, not {shape}")
        self._check(shapes)
        for shape, runs in self._repeats(shapes, self._prefill_and_whole, progress):
            prefill, whole = zip(*runs, strict=True)
            steps = shape.output_len.high - 1
            decode = [(b - a) / steps * 1e3 for a, b in runs] if steps else []
            yield (
                shape,
                {
                    "prefill_ms": repeated([seconds * 1e3 for seconds in prefill]),
                    "decode_ms_per_token": repeated(decode) if decode else None,
                    "seconds": repeated(whole),
                },
            )

    def throughput(
        self, shapes: list[Shape], progress: bool = True
    ) -> Iterator[tuple[Shape, Json]]:
        """Gives the engine all prompts of a shape at once: seconds, and tokens per second in and
        out."""
        self._check(shapes)
        for shape, runs in self._repeats(shapes, self._run, progress):
            yield (
                shape,
                {
                    "seconds": repeated([seconds for seconds, _, _ in runs]),
                    "tokens_per_s": repeated(
                        [(num_in + num_out) / seconds for seconds, num_in, num_out in runs]
                    ),
                    "output_tokens_per_s": repeated(
                        [num_out / seconds for seconds, _, num_out in runs]
                    ),
                },
            )

    def _check(self, shapes: list[Shape]) -> None:
        """Raises ValueError for shapes that are too long, before anything is measured."""
        limit = self.llm.engine.max_request_tokens
        for shape in shapes:
            if shape.max_tokens > limit:
                raise ValueError(
                    f"shape {shape} has requests of {shape.max_tokens} tokens, but the engine "
                    f"takes {limit} (max_model_len, or what the KV cache holds)"
                )

    def _repeats(
        self, shapes: list[Shape], run: Any, progress: bool
    ) -> Iterator[tuple[Shape, list[Any]]]:
        repeats = self.config.repeats
        with tqdm(total=len(shapes) * repeats, unit="run", disable=not progress) as bar:
            for shape in shapes:
                bar.set_description(str(shape))
                self._warm_up(shape)
                runs = []
                for _ in range(repeats):
                    runs.append(run(shape))
                    bar.update()
                yield shape, runs

    def _warm_up(self, shape: Shape) -> None:
        """Runs one prompt at full length, and all prompts short; this is not timed."""
        num_out = min(WARMUP_OUTPUT, shape.output_len.high)
        short = min(WARMUP_INPUT, shape.input_len.high)
        self._run(
            Shape(1, Lengths(shape.input_len.high, shape.input_len.high), Lengths(num_out, num_out))
        )
        self._run(Shape(shape.num_prompts, Lengths(short, short), Lengths(num_out, num_out)))

    def _prefill_and_whole(self, shape: Shape) -> tuple[float, float]:
        """Returns the seconds to the last sequence's first token and to the end, from two runs."""
        prefill = self._run(Shape(shape.num_prompts, shape.input_len, Lengths(1, 1)))[0]
        return prefill, self._run(shape)[0] if shape.output_len.high > 1 else prefill

    def _run(self, shape: Shape) -> tuple[float, int, int]:
        """Returns seconds, tokens in, and tokens out of one run over fresh prompts."""
        self._num_runs += 1
        works = draw_work(
            shape, self.llm.engine.spec.vocab_size, f"{self.config.seed}/{self._num_runs}"
        )
        prompts = [work.prompt_token_ids for work in works]
        params = [
            SamplingParams(temperature=0, max_tokens=work.output_len, ignore_eos=True)
            for work in works
        ]
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        num_out = [len(output.outputs[0].token_ids) for output in outputs]
        assert num_out == [work.output_len for work in works], "the engine ended a request early"
        return seconds, sum(map(len, prompts)), sum(num_out)
