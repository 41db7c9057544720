"""Whole requests at one engine, with and without pacing: what do the promises cost, and what do
prompts beside decodes cost the streams?

One engine runs in this process. Requests are Poisson arrivals in an open loop, and prompts share no
prefix. If there are several lengths, each request draws one for the prompt and one for the answer.
Without pacing, the budget is fixed at max_num_batched_tokens, first come first served. Run on a
GPU:

    python -m benchmarks.engine.paced_steps benchmarks/shapes/llama-3.1-8b --load-format dummy \\
        --rates 5 7.5 --prompt 2048 --tokens 128 --ttft-ms 200 --tpot-ms 7 --out paced.jsonl

--steps FILE also writes a line for each step with prompts and decodes: its rows, its decodes and
their context, and its predicted and measured duration.
"""

import argparse
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from pdserve.bench.record import append, check_writable, circumstances
from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.configs.router import SloConfig
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine
from pdserve.engine.pacing.pace import Pace
from pdserve.engine.pacing.step_model import StepLoad
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.events import Delta
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

PERCENTILES = (50, 90, 99)


@dataclass
class _Answer:
    """The times of one request, in seconds of one clock."""

    due: float  # when it should be sent
    first: float = 0.0  # first token
    last: float = 0.0  # last token
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.first - self.due)

    @property
    def tpot_ms(self) -> float:
        return 1000 * (self.last - self.first) / max(1, self.num_tokens - 1)


def serve(
    engine: Engine,
    rate: float,
    seconds: float,
    lengths: Sequence[int],
    answer_lengths: Sequence[int],
    seed: int,
) -> list[_Answer]:
    """Sends requests for `seconds`, and waits for all answers."""
    draw = random.Random(seed)
    due = 0.0
    times: list[float] = []
    while (due := due + draw.expovariate(rate)) < seconds:
        times.append(due)
    vocab = engine.spec.vocab_size
    prompts = [tuple(draw.choices(range(vocab), k=draw.choice(lengths))) for _ in times]
    tokens = [draw.choice(answer_lengths) for _ in times]
    began = time.monotonic()
    answers = {str(number): _Answer(began + at) for number, at in enumerate(times)}
    coming = list(answers)
    num_open = len(answers)
    with tqdm(total=num_open, desc=f"{rate:g} requests/s", mininterval=2) as bar:
        while num_open:
            while coming and answers[coming[0]].due <= time.monotonic():
                name = coming.pop(0)
                number = int(name)
                _add(engine, name, prompts[number], tokens[number], answers[name].due)
            if not engine.has_work:
                time.sleep(max(0.0, answers[coming[0]].due - time.monotonic()))
                continue
            for key, event in engine.step().events:
                if isinstance(event, Delta):
                    num_ended = _took(answers[key.request_id], event)
                    num_open -= num_ended
                    bar.update(num_ended)
    return list(answers.values())


def _add(engine: Engine, name: str, prompt: tuple[int, ...], tokens: int, due: float) -> None:
    submit = Submit(
        key=RequestKey("bench", 0, name),
        phase="full",
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0, seed=0, max_tokens=tokens, ignore_eos=True),
        starts=(Start(0),),
        waited_ms=1000 * (time.monotonic() - due),
    )
    engine.add(engine.make_request(submit), submit.starts)


def _took(answer: _Answer, delta: Delta) -> int:
    """Records the tokens of a delta. Returns 1 if the answer has ended, and otherwise 0."""
    now = time.monotonic()
    if answer.num_tokens:
        answer.gaps.append(now - answer.last)
    else:
        answer.first = now
    answer.last = now
    answer.num_tokens += len(delta.token_ids)
    return int(delta.finish_reason is not None)


def watch(pace: Pace, path: Path) -> None:
    """Writes a line for each step with prompts and decodes from now on."""
    planned, collected = pace.planned, pace.collected
    waiting: deque[tuple[StepLoad, float] | None] = deque()

    def plan(load: StepLoad | None, is_scored: bool, waits: bool) -> None:
        is_mixed = load is not None and load.num_prompt_rows > 0 and load.num_decodes > 0
        waiting.append((load, pace.model.seconds(load)) if load and is_mixed else None)
        planned(load, is_scored, waits)

    def collect(device_seconds: float = 0.0) -> None:
        collected(device_seconds)
        ended = time.monotonic()
        began, times[0] = times[0], ended
        if (told := waiting.popleft()) is None:
            return
        load, predicted_s = told
        line: dict[str, float] = {"rows": load.num_prompt_rows, "decodes": load.num_decodes}
        line |= {"context": load.context_tokens, "attended": load.attended}
        seconds = {"predicted": predicted_s, "between": ended - began, "device": device_seconds}
        append(path, line | {f"{name}_ms": round(1e3 * each, 3) for name, each in seconds.items()})

    times = [time.monotonic()]  # when the last step ended
    pace.planned, pace.collected = plan, collect  # type: ignore[method-assign]


def judge(answers: list[_Answer], ttft_ms: float, tpot_ms: float) -> dict[str, float]:
    """Returns times in milliseconds, and `kept`, the share of answers that keep both promises."""
    ttft = [answer.ttft_ms for answer in answers]
    tpot = [answer.tpot_ms for answer in answers]
    gaps = [1000 * gap for answer in answers for gap in answer.gaps]
    kept = [a <= ttft_ms and b <= tpot_ms for a, b in zip(ttft, tpot, strict=True)]
    figures = {"kept": sum(kept) / len(kept), "requests": float(len(kept))}
    for name, values in (("ttft", ttft), ("tpot", tpot), ("gap", gaps)):
        for percent in PERCENTILES:
            figures[f"{name}_p{percent}"] = float(np.percentile(values, percent))
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder with a model, or with only its configuration")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rates", type=float, nargs="+", default=[5.0], help="requests per second")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="seconds of arrivals at each rate"
    )
    parser.add_argument("--prompt", type=int, nargs="+", default=[2048], help="tokens")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[128], help="tokens of an answer, at least 2"
    )
    parser.add_argument("--ttft-ms", type=float, default=200.0)
    parser.add_argument("--tpot-ms", type=float, default=7.0)
    parser.add_argument("--unpaced", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=Path, help="file to append a line of each such step to")
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    options = parser.parse_args()
    config = ModelConfig.model_validate({"path": options.model, "load_format": options.load_format})
    check_writable(options.out)
    where = circumstances()
    slo = SloConfig(ttft_ms=options.ttft_ms, tpot_ms=options.tpot_ms)
    engine_config = EngineConfig.model_validate({"device": options.device})
    engine = build_engine(config, engine_config, slo=None if options.unpaced else slo)
    if options.steps and engine.pace:
        check_writable(options.steps)
        watch(engine.pace, options.steps)
    for rate in options.rates:
        answers = serve(engine, rate, options.seconds, options.prompt, options.tokens, options.seed)
        figures = judge(answers, options.ttft_ms, options.tpot_ms)
        print(f"{rate:g}/s", figures, flush=True)
        load = {"rate": rate, "prompt": options.prompt, "tokens": options.tokens}
        append(options.out, {**load, "is_paced": not options.unpaced, **figures, **where})
    engine.close()


if __name__ == "__main__":
    main()
