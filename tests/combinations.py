"""Which weights, KV caches and models work together: tries each with a tiny model on CPU.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/combinations.py --out docs/use/combinations.md

Each cell is one prompt: by one engine, by two ranks, handed over from P to D, and with a token
mask. It takes three minutes. A combination that is refused shows the error's first words.
"""

import argparse
import gc
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.pair import Pair
from support.tiny_models import make_tiny
from tqdm import tqdm

from demo.storing import WAYS, write_quantised
from pdserve.engine.llm import LLM, SamplingParams

EVEN: dict[str, Any] = {
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
}
COLUMNS = ("one engine", "two ranks (TP)", "P to D", "token mask")
PROMPT = [(7 * n) % 250 for n in range(40)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
RULES = {"allowed_token_ids": [1, 2, 3]}
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
tries every kind of weights with every kind of KV cache, on CPU. It does so in four ways:

- **one engine**;
- **two ranks** of tensor parallelism (TP);
- **P to D**: a hand-off. If P and D have the same kind of KV cache, the answer must be that of one
  engine, token for token;
- **token mask**, as grammars make them.

| family | what does not work |
|---|---|
{families}

All other combinations of these families worked in all four ways. What does not work is refused
before any weights are loaded, by an error that begins with the words in the table.

Llama stands for the families that share its layers, such as Mistral and Qwen. Qwen3-MoE stands for
mixtures of experts that are built like it. Other families were not tried here.

## What is refused elsewhere

- **A KV cache in fp8 at P with one in 16 bits at D.** The cluster's configuration refuses it
  (`decode.engine.kv_cache_dtype must be fp8`). Rows are rounded on their way to D, never back.
- **fp8 on a GPU below compute capability 9.0** (Hopper). The engine refuses it when it starts.
- **gpt-oss** in MXFP4, or with fp8 weights ([models.md](models.md#families)).
- **Details of a format**, such as group sizes or 8-bit integers
  ([models.md](models.md#formats-of-weights)).

int4 on a GPU below 9.0 is not refused, and was not tried. The kernels that read int4 need 9.0, so
there matrices are unpacked for each product.
"""


def cells(folder: Path, online: str | None, kv_dtypes: tuple[str, str]) -> list[str]:
    """Returns one cell for each of COLUMNS. `kv_dtypes` are those of P and of D.

    One engine alone has D's.
    """
    common: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 32, "kv_cache_dtype": kv_dtypes[1]}

    def tokens(**more: Any) -> list[int]:
        llm = LLM(str(folder), tokenizer=False, quantization=online, **common, **more)
        try:
            [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
            return list(output.outputs[0].token_ids)
        finally:
            del llm
            gc.collect()

    def split() -> list[int]:
        pair = Pair(
            folder,
            p={**common, "quantization": online, "kv_cache_dtype": kv_dtypes[0]},
            d={**common, "quantization": online},
        )
        try:
            return list(pair.split(PROMPT, GREEDY)[0])
        finally:
            pair.close()

    def with_mask() -> list[int]:
        llm = LLM(str(folder), tokenizer=False, quantization=online, **common)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_rules=RULES)
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
        found = list(output.outputs[0].token_ids)
        assert set(found) <= set(RULES["allowed_token_ids"])
        return found

    want: list[int] = []

    def alone() -> list[int]:
        want.extend(tokens())
        return want

    found = []
    for column, attempt in zip(
        COLUMNS,
        (alone, lambda: tokens(tensor_parallel_size=2), split, with_mask),
        strict=True,
    ):
        is_alike = column == "P to D" and kv_dtypes[0] == kv_dtypes[1]
        found.append(outcome(attempt, want if is_alike else None))
    return found


def outcome(attempt: Callable[[], list[int]], want: list[int] | None) -> str:
    try:
        tokens = attempt()
    except (ValueError, RuntimeError) as error:
        return f"refused with `{first_words(str(error))}`"
    assert len(tokens) == 8 and (want is None or tokens == want)
    return "yes"


def first_words(text: str) -> str:
    return re.split(r"[:;,(] ", text.splitlines()[-1].removeprefix("pdserve: "))[0][:70]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    options = parser.parse_args()
    found: Found = {}
    with tempfile.TemporaryDirectory() as temporary:
        combinations = [(f, kv, w) for f in FAMILIES for kv in CACHES for w in WEIGHTS]
        for number, (name, kv, weights) in enumerate(tqdm(combinations, disable=None)):
            family, sizes = FAMILIES[name]
            folder = make_tiny(family, Path(temporary) / str(number), **sizes)
            way = WEIGHTS[weights]
            if way is not None:
                folder = write_quantised(folder, Path(temporary) / f"{number}q", WAYS[way])
            online = "fp8" if "quantization" in weights else None
            row = cells(folder, online, CACHES[kv])
            found.setdefault((name, kv, tuple(row)), []).append(weights)
            print(json.dumps([name, weights, kv, row]), file=sys.stderr)
    page = page_of(found)
    print(page)
    if options.out is not None:
        options.out.write_text(page)
    return 0


Found = dict[tuple[str, str, tuple[str, ...]], list[str]]
"""The kinds of weights that have the same cells, by family, KV cache and cells."""


def page_of(found: Found) -> str:
    return HEAD.format(
        weights="; ".join(WEIGHTS),
        caches="; ".join(CACHES),
        families="\n".join(f"| {name} | {exceptions(name, found)} |" for name in FAMILIES),
    )


def exceptions(family: str, found: Found) -> str:
    """Returns what does not work for a family; KV caches that do alike are said once."""
    caches: dict[tuple[str, str], list[str]] = {}
    for (name, kv, row), weights in found.items():
        if name == family and set(row) != {"yes"}:
            which = "all weights" if len(weights) == len(WEIGHTS) else ", ".join(weights)
            caches.setdefault((which, said(row)), []).append(kv)
    cells = [
        f"KV cache in {', or in '.join(kv)}; with {which}; {how}"
        for (which, how), kv in caches.items()
    ]
    return "<br>".join(cells) or "nothing: all work"


def said(row: tuple[str, ...]) -> str:
    if len(set(row)) == 1:
        return f"in all four ways; {row[0]}"
    return "; ".join(
        f"{column}: {cell}" for column, cell in zip(COLUMNS, row, strict=True) if cell != "yes"
    )


if __name__ == "__main__":
    sys.exit(main())
