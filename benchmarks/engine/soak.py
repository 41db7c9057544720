"""Minutes of mixed requests through one engine: random lengths, choices, sampling, seeds, aborts.
Nothing may go wrong.

    python -m benchmarks.engine.soak --minutes 8 --model benchmarks/shapes/llama-3.1-8b \\
        --load-format dummy
    python -m benchmarks.engine.soak --minutes 0.2    # the demo model on CPU

It keeps the engine full, checks its books often, and ends with all blocks free. It prints
throughput and memory per window. The exit status is 1 if a request got a token too many or too few,
if blocks or memory leak, or if throughput falls. It drives the public Engine.
"""

import argparse
import itertools
import random
import statistics
import sys
import time
from dataclasses import dataclass, field

import psutil
import torch
from tqdm import tqdm

from pdserve.bench.cli import (
    add_model_arguments,
    add_output_arguments,
    engine_fields,
    model_fields,
)
from pdserve.bench.record import Json, append, check_writable, circumstances
from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.events import Delta, PromptScored
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

CHECK_STEPS = 50  # Steps between checks of the engine's books.
WARM_WINDOWS = 2  # First windows that do not count: caches fill and allocators grow.
SLACK_BYTES = 256 << 20  # Growth of host and of device memory that is allowed.
STEADY = 0.8  # Smallest throughput of a window, relative to the median.
STEADY_SECONDS = 10.0  # Shorter windows depend on single prompts, so they are not compared.


@dataclass
class Live:
    """A request in flight."""

    position: dict[int, int]  # next token of each choice that has not ended
    max_tokens: int
    dies_at: int | None  # number of tokens after which it is aborted
    dies_whole: bool  # True: all choices are aborted; False: one choice
    seen: int = 0


@dataclass
class Totals:
    """Counts of one window, or of the whole run."""

    requests: int = 0
    aborted: int = 0
    tokens: int = 0
    faults: list[str] = field(default_factory=list)


class Soak:
    """Keeps `concurrency` requests in flight. Prompts of one kind share a prefix, so that the
    prefix cache is used."""

    def __init__(self, engine: Engine, concurrency: int, longest: int, seed: int) -> None:
        self.engine = engine
        self.totals = Totals()
        self._concurrency = concurrency
        self._longest = min(longest, engine.max_request_tokens // 2)
        self._rng = random.Random(seed)
        self._live: dict[RequestKey, Live] = {}
        self._names = itertools.count()
        vocab = engine.spec.vocab_size
        self._prefixes = [
            [self._rng.randrange(vocab) for _ in range(self._longest)] for _ in range(8)
        ]

    def run(self, seconds: float) -> Totals:
        """Runs for `seconds`. Returns the counts since the last call."""
        ends = time.monotonic() + seconds
        self.totals = Totals()
        step = 0
        while time.monotonic() < ends:
            while len(self._live) < self._concurrency:
                self._submit()
            self._step()
            if step % CHECK_STEPS == 0:
                self.engine.check_integrity()
            step += 1
        return self.totals

    def finish(self) -> None:
        """Ends all requests. Raises AssertionError if blocks are left."""
        for key in self._live:
            self.engine.abort(key)
        self._live.clear()
        while self.engine.has_work:
            self.engine.step()
        self.engine.check_integrity()
        homes = self.engine.homes
        num_lost = homes.num_usable_blocks - homes.num_free_blocks
        assert not num_lost, f"{num_lost} blocks are lost"

    def _submit(self) -> None:
        rng = self._rng
        vocab = self.engine.spec.vocab_size
        length = min(int(rng.lognormvariate(5.5, 1.2)) + 1, self._longest)
        prefix = rng.choice(self._prefixes)[: rng.choice([0, 0, length // 2, length])]
        prompt = (*prefix, *(rng.randrange(vocab) for _ in range(length - len(prefix))))
        max_tokens = rng.randint(1, min(400, self._longest))
        sampling = self._sampling(max_tokens)
        starts = tuple(map(Start, range(sampling.n)))
        key = RequestKey("soak", 0, str(next(self._names)))
        submit = Submit(
            key=key, phase="full", prompt_token_ids=prompt, sampling=sampling, starts=starts
        )
        self.engine.add(self.engine.make_request(submit), starts)
        dies_at = rng.randint(0, sampling.n * max_tokens) if rng.random() < 0.15 else None
        self._live[key] = Live(
            dict.fromkeys(range(sampling.n), 0), max_tokens, dies_at, rng.random() < 0.5
        )
        self.totals.requests += 1

    def _sampling(self, max_tokens: int) -> SamplingParams:
        rng = self._rng
        more: dict[str, object] = {}
        if rng.random() < 0.3:
            more |= {
                "top_p": rng.uniform(0.5, 1.0),
                "top_k": rng.choice([0, 1, 40]),
                "min_p": rng.choice([0.0, 0.05]),
            }
        if rng.random() < 0.2:
            more |= {
                "presence_penalty": 0.3,
                "frequency_penalty": 0.2,
                "repetition_penalty": rng.choice([1.0, 1.1]),
            }
        if rng.random() < 0.1:
            more |= {"logprobs": rng.choice([0, 5]), "logit_bias": {rng.randrange(100): 2.0}}
        if rng.random() < 0.02:
            more |= {"prompt_logprobs": 1}
        return SamplingParams(
            n=rng.choice([1, 1, 1, 1, 2, 4]),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            seed=rng.randrange(1 << 40),
            max_tokens=max_tokens,
            ignore_eos=rng.random() < 0.7,
            **more,  # type: ignore[arg-type]
        )

    def _step(self) -> None:
        for key, event in self.engine.step().events:
            live = self._live.get(key)
            if live is not None and isinstance(event, Delta):
                self._take(key.request_id, live, event)
            elif live is None and not isinstance(event, PromptScored):
                self.totals.faults.append(f"{key.request_id}: an event of a request that is over")
        # only after the step, because its other events were already on their way
        for key, live in list(self._live.items()):
            if live.position and live.dies_at is not None and live.seen >= live.dies_at:
                self._abort(key, live)
            if not live.position:
                del self._live[key]

    def _take(self, name: str, live: Live, delta: Delta) -> None:
        expected = live.position.get(delta.choice)
        if expected != delta.position:
            self.totals.faults.append(
                f"{name}/{delta.choice}: token {delta.position}, not {expected}"
            )
        live.position[delta.choice] = delta.position + len(delta.token_ids)
        live.seen += len(delta.token_ids)
        self.totals.tokens += len(delta.token_ids)
        if delta.finish_reason == "length" and live.position[delta.choice] != live.max_tokens:
            self.totals.faults.append(
                f"{name}/{delta.choice}: {live.position[delta.choice]} tokens"
            )
        if delta.finish_reason:
            del live.position[delta.choice]

    def _abort(self, key: RequestKey, live: Live) -> None:
        live.dies_at = None
        choices = None if live.dies_whole else (next(iter(live.position)),)
        self.engine.abort(key, choices)
        self.totals.aborted += 1
        for choice in list(live.position) if choices is None else choices:
            del live.position[choice]


def window(engine: Engine, seconds: float, totals: Totals) -> Json:
    """Returns one line of the report."""
    on_cuda = engine.device.type == "cuda"
    free, total = torch.cuda.mem_get_info() if on_cuda else (0, 0)
    return {
        "seconds": round(seconds, 1),
        "requests": totals.requests,
        "aborted": totals.aborted,
        "tokens_per_s": round(totals.tokens / seconds),
        "preemptions": engine.scheduler.num_preemptions,
        "host_mib": psutil.Process().memory_info().rss >> 20,
        "device_mib": (total - free) >> 20,
        "faults": len(totals.faults),
    }


def verdict(windows: list[Json]) -> list[str]:
    """Returns the faults of these windows. The first ones only warm up."""
    counted = windows[WARM_WINDOWS:]
    faults = [f"{w['faults']} requests went wrong" for w in windows if w["faults"]]
    if len(counted) < 2:
        return faults
    for name in ("host_mib", "device_mib"):
        growth = counted[-1][name] - counted[0][name]
        if growth << 20 > SLACK_BYTES:
            faults.append(f"{name} grew by {growth}")
    rates = [w["tokens_per_s"] for w in counted if w["seconds"] >= STEADY_SECONDS]
    if rates and min(rates) < STEADY * statistics.median(rates):
        faults.append(
            f"throughput fell to {min(rates)} tok/s from a median of {statistics.median(rates):.0f}"
        )
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--windows", type=int, default=16, help="number of lines of the report")
    parser.add_argument("--concurrency", type=int, default=300, help="requests in flight")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest prompt")
    parser.add_argument("--seed", type=int, default=0)
    add_model_arguments(parser)
    add_output_arguments(parser)
    options = parser.parse_args()
    if (
        options.minutes <= 0
        or options.windows < 1
        or options.concurrency < 1
        or options.longest < 1
    ):
        parser.error("--minutes, --windows, --concurrency and --longest must be above 0")
    try:
        check_writable(options.out)
        config = EngineConfig(**{**engine_fields(options), "enable_prefix_caching": True})
    except (ValueError, OSError) as error:
        parser.error(str(error))
    model = ModelConfig(path=options.model, **model_fields(options))
    engine = build_engine(model, config)
    soak = Soak(engine, options.concurrency, options.longest, options.seed)
    windows: list[Json] = []
    seconds = options.minutes * 60 / options.windows
    for _ in tqdm(range(options.windows), desc="soak", unit="window", leave=False):
        began = time.monotonic()
        totals = soak.run(seconds)
        windows.append(window(engine, time.monotonic() - began, totals))
        tqdm.write("  ".join(f"{name} {value}" for name, value in windows[-1].items()))
        for fault in totals.faults[:5]:
            tqdm.write(fault)
    soak.finish()
    faults = verdict(windows)
    append(
        options.out,
        {"benchmark": "engine_soak", **circumstances(options.commit), "windows": windows},
    )
    print("\n".join(faults) or "no leak, no fault, steady throughput")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
