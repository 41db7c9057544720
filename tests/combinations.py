"""Which weights, KV caches and models work together: tries each with a tiny model on CPU.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/combinations.py --out docs/use/combinations.md

It takes four minutes. A combination that is refused shows the error's first words.
tests/test_combinations.py holds the page against this module.
"""

import argparse
import gc
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.pair import Pair
from support.rank_pool import RankPool
from support.tiny_models import DEMO, make_tiny
from tqdm import tqdm

from demo.storing import WAYS, write_quantised
from pdserve.engine import ranks as ranks_module
from pdserve.engine.llm import LLM, RequestOutput, SamplingParams
from pdserve.text.grammars.checker import shared_checker

EVEN: dict[str, Any] = {
    "vocab_size": 1792,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama3", {"head_dim": 32, **EVEN}),
    "Qwen3-MoE": ("qwen3-moe", {"head_dim": 32, **EVEN}),
    "DeepSeek V3": (
        "deepseek-v3",
        {
            **EVEN,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "q_lora_rank": 64,
        },
    ),
}
WEIGHTS = {
    "16 bits": None,
    "`model.quantization: fp8`": None,
    "fp8, a scale per tensor": "fp8",
    "fp8, a scale per row": "ct-fp8-rows",
    "fp8, blocks of 128 x 128": "fp8-blocks",
    "AWQ int4": "awq",
    "GPTQ int4": "gptq",
    "compressed-tensors int4": "ct-int4",
    "int4 with fp8 activations": "ct-int4-fp8",
}
# Engines of two ranks or stages. The ranks of the first two share each row's numbers in some
# products, and each rounds its own part to e4m3.
RANKS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel_size": 2},
    "EP2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "DP2": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "PP2": {"pipeline_parallel_size": 2},
}
ROUND_APART = ("TP2", "EP2")
COLUMNS = ("one engine", *RANKS, "P to D", "grammar")
PROMPTS = [[(7 * n + start) % 250 for n in range(40)] for start in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
PLAIN = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oakdale", "Fernhill"]}, "is_far": {"type": "boolean"}},
    "required": ["city", "is_far"],
    "additionalProperties": False,
}
CACHES = {
    "16 bits": ("auto", "auto"),
    "fp8": ("fp8", "fp8"),
    "16 bits at P and fp8 at D": ("auto", "fp8"),
}
HEAD = """# What goes with what

Which models, weights and KV caches work together? Nearly all of them: this page lists the
exceptions.

| what | kinds |
|---|---|
| weights | {weights} |
| KV cache | {caches} |

P is the prefill worker and D the decode worker.

## What was tried

`python tests/combinations.py` writes this page. It takes a tiny model of each of three families and
tries every kind of weights with every kind of KV cache, on CPU. It does so in these ways:

- **one engine**;
- **TP2**: two ranks of tensor parallelism;
- **EP2**: the same with `expert_parallel`, so that each rank holds half of the experts;
- **DP2**: two ranks with attention of their own (`data_parallel`) and half of the experts;
- **PP2**: two stages;
- **P to D**: a hand-off;
- **grammar**: the answer must be JSON of a schema, and it is.

The greedy tokens of three prompts must be those of one engine, with two exceptions:

- **fp8 weights or activations under TP2 and EP2.** Ranks share the columns of some products, and
  each rounds its own part of an activation's row to e4m3. So tokens may differ. The mean distance
  of the prompts' logprobs from those of one engine must be less than that of the same model in 16
  bits.
- **16 bits at P and fp8 at D.** Here P computes prompts with rows that are not rounded, so there is
  no one engine to compare with.

| family | what does not work |
|---|---|
{families}

All other combinations of these families worked in all ways. What does not work is refused before
any weights are loaded, by an error that begins with the words in the table.

Llama stands for the families that share its layers, such as Mistral and Qwen. Qwen3-MoE stands for
mixtures of experts that are built like it. Other families were not tried here.

## What is refused elsewhere

- **A KV cache in fp8 at P with one in 16 bits at D.** The cluster's configuration refuses it
  (`decode.engine.kv_cache_dtype must be fp8`). Rows are rounded on their way to D, never back.
- **fp8 on a GPU below compute capability 9.0** (Hopper), also fp8 activations of int4 weights. The
  engine refuses it when it starts.
- **gpt-oss** in MXFP4, or with fp8 weights ([models.md](models.md#families)).
- **Details of a format**, such as group sizes or 8-bit integers
  ([models.md](models.md#formats-of-weights)).

int4 on a GPU below 9.0 is not refused, and was not tried. The kernels that read int4 need 9.0, so
there matrices are unpacked for each product.
"""


@dataclass(frozen=True)
class Trial:
    """A model in one kind of weights. plain: the same model in 16 bits."""

    folder: Path
    plain: Path
    online: str | None
    rounds_activations: bool

    def rows(self) -> dict[str, list[str]]:
        """Returns the cells of COLUMNS by the name of the KV caches."""
        found: dict[str, list[str]] = {}
        engines: dict[str, tuple[list[str], list[RequestOutput]]] = {}
        for name, (p_dtype, d_dtype) in CACHES.items():
            if d_dtype not in engines:
                engines[d_dtype] = self._engines(d_dtype)
            cells, one = engines[d_dtype]
            want = one if p_dtype == d_dtype else []
            handed = outcome(partial(self._check_split, p_dtype, d_dtype, want))
            found[name] = [*cells[:-1], handed, cells[-1]]
        return found

    def _engines(self, kv_dtype: str) -> tuple[list[str], list[RequestOutput]]:
        """Returns the cells of all columns but "P to D", and what one engine answers."""
        one: list[RequestOutput] = []
        cells = [outcome(lambda: one.extend(self._generate(kv_dtype)))]
        cells += [outcome(partial(self._check_ranks, way, kv_dtype, one)) for way in RANKS]
        return [*cells, outcome(lambda: self._check_grammar(kv_dtype))], one

    def _check_ranks(self, way: str, kv_dtype: str, one: Sequence[RequestOutput]) -> None:
        found = self._generate(kv_dtype, **RANKS[way])
        if self.rounds_activations and way in ROUND_APART:
            plain = answers(self.plain, kv_dtype)
            assert gap(found, one) < gap(plain, one), "other logprobs than one engine's"
        else:
            assert tokens_of(found) == tokens_of(one), "other tokens than one engine's"

    def _check_split(self, p_dtype: str, d_dtype: str, one: Sequence[RequestOutput]) -> None:
        """Checks that a hand-off gives the tokens of one engine, if there is one."""
        common = {"device": "cpu", "num_kv_blocks": 32, "quantization": self.online}
        pair = Pair(
            self.folder,
            p={**common, "kv_cache_dtype": p_dtype},
            d={**common, "kv_cache_dtype": d_dtype},
        )
        try:
            found = [list(pair.split(prompt, PLAIN)[0]) for prompt in PROMPTS]
        finally:
            pair.close()
        assert not one or found == tokens_of(one), "other tokens than one engine's"
        assert all(len(tokens) == 8 for tokens in found), "too few tokens"

    def _check_grammar(self, kv_dtype: str) -> None:
        with engine(self.folder, kv_dtype, self.online, tokenizer=True) as llm:
            params = SamplingParams(temperature=0, max_tokens=64)
            # without a bound, random weights write little but whitespace
            asked = {"json": SCHEMA, "whitespace_pattern": " ?"}
            [found] = llm.generate(PROMPTS[:1], params, use_tqdm=False, structured_outputs=asked)
        text = found.outputs[0].text
        assert set(json.loads(text)) == {"city", "is_far"}, "other JSON than the schema's"

    def _generate(self, kv_dtype: str, **ranks: Any) -> list[RequestOutput]:
        return answers(self.folder, kv_dtype, self.online, **ranks)


@contextmanager
def engine(folder: Path, kv_dtype: str, online: str | None = None, **more: Any) -> Iterator[LLM]:
    llm = LLM(
        str(folder),
        device="cpu",
        num_kv_blocks=64,
        kv_cache_dtype=kv_dtype,
        quantization=online,
        **{"tokenizer": False, **more},
    )
    try:
        yield llm
    finally:
        del llm
        gc.collect()


def answers(folder: Path, kv_dtype: str, online: str | None = None, **more: Any) -> Any:
    with engine(folder, kv_dtype, online, **more) as llm:
        return llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def tokens_of(found: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in found]


def gap(found: Sequence[RequestOutput], want: Sequence[RequestOutput]) -> float:
    """Returns the mean distance of logprobs of the prompts' tokens."""
    one, two = (
        [token.logprob for each in side for token in each.prompt_logprobs or [] if token]
        for side in (found, want)
    )
    return sum(abs(a - b) for a, b in zip(one, two, strict=True)) / len(one)


def outcome(attempt: Callable[[], object]) -> str:
    """Returns the cell: "yes", or what went wrong."""
    try:
        attempt()
    except AssertionError as error:
        return str(error)
    except (ValueError, RuntimeError) as error:
        return f"refused with `{first_words(str(error))}`"
    return "yes"


def first_words(text: str) -> str:
    return re.split(r"[:;,(] ", text.splitlines()[-1].removeprefix("pdserve: "))[0][:70]


Found = Mapping[str, Mapping[tuple[str, str], Sequence[str]]]
"""The cells of COLUMNS, by family, and by KV cache and weights."""


def try_all(folder: Path) -> Found:
    """Tries all combinations, with models in this folder."""
    found: dict[str, dict[tuple[str, str], Sequence[str]]] = {}
    pool = RankPool()
    try:
        for name, weights in tqdm([(f, w) for f in FAMILIES for w in WEIGHTS], disable=None):
            trial = trial_of(folder, name, weights)
            with patch.object(ranks_module, "RankProcesses", pool.ranks_of):
                rows = trial.rows()
            for kv, row in rows.items():
                found.setdefault(name, {})[kv, weights] = row
                print(json.dumps([name, weights, kv, row]), file=sys.stderr)
    finally:
        gc.collect()  # engines that were refused hold ranks of the pool
        pool.close()
        shared_checker().close()
    return found


def trial_of(folder: Path, name: str, weights: str) -> Trial:
    family, sizes = FAMILIES[name]
    plain = folder / family
    if not plain.exists():
        make_tiny(family, plain, **sizes)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / file, plain)
    way = WEIGHTS[weights]
    stored = plain
    if way is not None:
        stored = write_quantised(plain, folder / f"{family}-{way}", WAYS[way])
    online = "fp8" if "quantization" in weights else None
    return Trial(stored, plain, online, "fp8" in weights)


def page_of(families: Sequence[str]) -> str:
    """Returns the page with these rows of the table of families."""
    return HEAD.format(
        weights="; ".join(WEIGHTS), caches="; ".join(CACHES), families="\n".join(families)
    )


def family_rows(found: Found) -> list[str]:
    return [f"| {name} | {exceptions(found[name])} |" for name in FAMILIES]


def exceptions(rows: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """Returns what does not work. Columns, KV caches and weights that do alike are said once."""
    weights_of: dict[tuple[str, str, str], list[str]] = {}  # by cell, column and KV cache
    for (kv, kind), row in rows.items():
        for column, cell in zip(COLUMNS, row, strict=True):
            if cell != "yes":
                weights_of.setdefault((cell, column, kv), []).append(kind)
    caches_of: dict[tuple[str, str, str], list[str]] = {}  # by cell, column and weights
    for (cell, column, kv), weights in weights_of.items():
        caches_of.setdefault((cell, column, which_of(weights)), []).append(kv)
    columns_of: dict[tuple[str, str, str], list[str]] = {}  # by cell, weights and KV caches
    for (cell, column, which), caches in caches_of.items():
        kv = "all KV caches" if len(caches) == len(CACHES) else f"KV cache in {' or '.join(caches)}"
        columns_of.setdefault((cell, which, kv), []).append(column)
    said = [
        f"{'all ways' if len(columns) == len(COLUMNS) else ', '.join(columns)}, with {which} and "
        f"{kv}: {cell}"
        for (cell, which, kv), columns in columns_of.items()
    ]
    return "<br>".join(said) or "nothing: all work"


def which_of(weights: Sequence[str]) -> str:
    others = [each for each in WEIGHTS if each not in weights]
    if len(others) > 1:
        return " or ".join(weights)
    return f"all weights but {others[0]}" if others else "all weights"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the page to this file, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = page_of(family_rows(try_all(Path(folder))))
    print(page)
    if options.out is not None:
        options.out.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
