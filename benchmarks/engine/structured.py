"""Measures what grammars cost an engine's steps: rows that decode with and without a grammar, and
rows that decode while grammars are built.

    python -m benchmarks.engine.structured benchmarks/shapes/llama-3.1-8b --load-format dummy \\
        --out structured.jsonl

One engine runs in this process, with a closed loop of clients that send short prompts. The weights
are random, so answers are random tokens that the grammar allows. The vocabulary is a byte-level BPE
trained on generated JSON and code. The figure is the time between the ends of two steps that decode
all rows and compute no prompt.

- plain: No grammar.
- simple: One schema of four properties, and an array of it.
- mixed: 200 generated schemas of 3 to 60 properties, two to five levels deep.
- building: No grammar, while other threads build grammars that take about a second each.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher
from tqdm import tqdm

from benchmarks.support.wide_tokenizer import write_tokenizer
from pdserve.bench.record import append, check_writable, circumstances, gpu_name
from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine
from pdserve.engine.grammars.builder import GrammarBuilder, GrammarLate
from pdserve.engine.grammars.make import grammar_builder
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.events import Delta
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

PROMPT_TOKENS = 64
WARM_S = 1.0
CASES = ("plain", "simple", "mixed", "building")


def simple_schema() -> dict[str, Any]:
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "email": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "email", "tags"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": person, "minItems": 50}


def drawn_schema(draw: random.Random) -> dict[str, Any]:
    """Draws a schema. It is an array of objects, so that an answer is long enough to measure."""
    left = draw.randint(3, 60)
    most_levels = draw.randint(2, 5)

    def value(level: int) -> dict[str, Any]:
        nonlocal left
        kind = draw.randrange(7 if level < most_levels and left > 0 else 5)
        if kind == 0:
            return {"type": "integer", "minimum": 0, "maximum": draw.randint(10, 10**6)}
        if kind == 1:
            return {"enum": [f"value-{draw.randrange(10**6)}" for _ in range(draw.randint(2, 30))]}
        if kind == 2:
            return {"type": "string", "maxLength": draw.randint(10, 200)}
        if kind == 3:
            return {"type": ["number", "null"]}
        if kind == 4:
            return {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,6}$"}
        if kind == 5:
            return {"type": "array", "items": value(level + 1), "maxItems": draw.randint(2, 20)}
        return table(level + 1)

    def table(level: int) -> dict[str, Any]:
        nonlocal left
        names = [f"field_{draw.randrange(10**5)}" for _ in range(draw.randint(2, 12))]
        left -= len(names)
        properties = {name: value(level) for name in names}
        required = [name for name in properties if draw.random() < 0.7]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return {"type": "array", "items": table(1), "minItems": 20}


def hard_schema(number: int) -> dict[str, Any]:
    """Makes a schema that takes about a second to build."""
    return {
        "type": "object",
        "properties": {f"p{number}_{i}": {"type": "string"} for i in range(2500)},
    }


class Clients:
    """A closed loop of `num_rows` clients. They ask for the grammars in `texts` in turn, or for
    none if that is None."""

    def __init__(
        self, engine: Engine, builder: GrammarBuilder, num_rows: int, texts: Sequence[str] | None
    ) -> None:
        self._engine = engine
        self._builder = builder
        self._num_rows = num_rows
        self._texts = texts
        self._draw = random.Random(0)
        self._num_sent = 0
        self.num_tokens = 0

    def run(self, seconds: float, meanwhile: Callable[[], None]) -> np.ndarray:
        """Returns the milliseconds between the ends of steps that only decoded all rows."""
        for _ in range(self._num_rows):
            self._send()
        gaps: list[float] = []
        before, was_full = time.perf_counter(), False
        began = before
        with tqdm(total=round(seconds), mininterval=2) as bar:
            while before - began < seconds + WARM_S:
                result = self._engine.step()
                now = time.perf_counter()
                is_full = result.num_rows == result.num_sequences == self._num_rows
                if is_full and was_full and now - began > WARM_S:
                    gaps.append(1e3 * (now - before))
                before, was_full = now, is_full
                for _, event in result.events:
                    if isinstance(event, Delta):
                        self.num_tokens += len(event.token_ids)
                        if event.finish_reason is not None:
                            self._send()
                meanwhile()
                bar.update(min(bar.total, round(now - began)) - bar.n)
        if not gaps:
            raise SystemExit("--seconds is too short: no two steps decoded all rows")
        return np.array(gaps)

    def _send(self) -> None:
        self._num_sent += 1
        vocab = self._engine.spec.vocab_size
        rules = None
        text = None
        if self._texts is not None:
            text = self._texts[self._num_sent % len(self._texts)]
            rules = {"grammar": text}
        submit = Submit(
            key=RequestKey("bench", 0, str(self._num_sent)),
            phase="full",
            prompt_token_ids=tuple(self._draw.choices(range(vocab), k=PROMPT_TOKENS)),
            sampling=SamplingParams(
                temperature=1.0,
                seed=self._num_sent,
                max_tokens=400,
                ignore_eos=rules is None,
                logit_rules=rules,
            ),
            starts=(Start(0),),
        )
        grammar = self._builder.build(text) if text is not None else None
        self._engine.add(self._engine.make_request(submit, grammar), submit.starts)


def _nothing() -> None: ...


def _builds(builder: GrammarBuilder) -> Iterator[None]:
    """Keeps two builds in progress, one per thread."""
    number = 0
    orders: list[Any] = []
    while True:
        orders = [order for order in orders if not builder.is_due(order)]
        while len(orders) < 2:
            number += 1
            orders.append(builder.order(_text(hard_schema(number))))
        yield


def _text(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def _usable(builder: GrammarBuilder, count: int) -> list[str]:
    """Draws `count` schemas that llguidance can build."""
    draw = random.Random(1)
    texts: list[str] = []
    while len(texts) < count:
        text = _text(drawn_schema(draw))
        try:
            builder.build(text)
        except (ValueError, GrammarLate):
            continue
        texts.append(text)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder with a model's configuration")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds per case")
    parser.add_argument("--schemas", type=int, default=200, help="schemas of the mixed case")
    parser.add_argument("--vocab", type=int, default=128_256, help="size of the vocabulary")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    options = parser.parse_args()
    check_writable(options.out)
    where = circumstances()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / options.model.name
        shutil.copytree(options.model, folder)
        if not (folder / "tokenizer.json").exists():
            write_tokenizer(folder, options.vocab)
        config = ModelConfig.model_validate(
            {"path": str(folder), "load_format": options.load_format}
        )
        engine_config = EngineConfig.model_validate(
            {"device": options.device, "max_model_len": 1024, "grammar_build_s": 30}
        )
        engine = build_engine(config, engine_config)
        where["device"] = gpu_name() if engine.device.type == "cuda" else "cpu"
        builder = grammar_builder(config, engine_config)
        builder.begin()
        for case in options.cases:
            texts = None
            if case == "simple":
                texts = [_text(simple_schema())]
            elif case == "mixed":
                texts = _usable(builder, options.schemas)
            clients = Clients(engine, builder, options.rows, texts)
            building = _builds(builder) if case == "building" else None
            began = builder.totals.num_built
            meanwhile = partial(next, building) if building else _nothing
            gaps = clients.run(options.seconds, meanwhile)
            engine.reset()
            figures = {
                "case": case,
                "rows": options.rows,
                "steps": len(gaps),
                "mean_ms": round(float(gaps.mean()), 4),
                **{f"p{p}_ms": round(float(np.percentile(gaps, p)), 4) for p in (50, 90, 99)},
                "grammars_built": builder.totals.num_built - began,
                "mask_us": round(
                    1e6 * engine.mask_totals.seconds / max(1, engine.mask_totals.num_masks), 2
                ),
                "masks": engine.mask_totals.num_masks,
            }
            print(figures, flush=True)
            append(options.out, figures | where)
        engine.close()
        builder.close()


if __name__ == "__main__":
    main()
