"""Which weights, KV caches and models work together: tries each with a tiny model on CPU.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/combinations.py --out docs/use/combinations.md

Each cell is one prompt: by one engine, by two ranks, handed over from P to D, and with a token
mask. Three minutes. What is refused shows the error's first words.
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
    "Llama, Mistral, Qwen": ("llama3", {"head_dim": 32, **EVEN}),
    "mixtures of experts": ("qwen3-moe", {"head_dim": 32, **EVEN}),
    "DeepSeek": (
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
CACHES = {"16 bits": ("auto", "auto"), "fp8": ("fp8", "fp8"), "P 16 bits, D fp8": ("auto", "fp8")}
HEAD = """# What goes with what

Which models, weights and KV caches work together. `python tests/combinations.py` writes this page.
It tries every line with tiny models on CPU, in four ways:

- by one engine;
- by two ranks of tensor parallelism (TP);
- with a hand-off from a prefill worker (P) to a decode worker (D). The answer is one engine's,
  token for token, where both have one kind of KV cache;
- with a token mask, as grammars make them.

These weights are "all":

{weights}

What is refused is refused before any weights are loaded, by an error that begins as the table says.
The opposite of the last kind of KV cache, P in fp8 and D in 16 bits, is refused by the
configuration of a cluster. Rows are rounded on their way to D, never back. On GPUs fp8, and kernels
that read int4, need compute capability 9.0 (Hopper) or above.

"""


def cells(folder: Path, online: str | None, kv_dtypes: tuple[str, str]) -> list[str]:
    """One for each of COLUMNS; kv_dtypes: of P and of D, which one engine has too."""
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
        return f"refused: {first_words(str(error))}"
    assert len(tokens) == 8 and (want is None or tokens == want)
    return "yes"


def first_words(text: str) -> str:
    return re.split(r"[:;,(] ", text.splitlines()[-1].removeprefix("pdserve: "))[0][:70]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    options = parser.parse_args()
    found: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
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
    page = (
        HEAD.format(weights="\n".join(f"- {name}" for name in WEIGHTS))
        + "\n".join(table(found))
        + "\n"
    )
    print(page)
    if options.out is not None:
        options.out.write_text(page)
    return 0


def table(found: dict[tuple[str, str, tuple[str, ...]], list[str]]) -> list[str]:
    """Lines of kinds of weights that do alike are one."""
    lines = [f"| model | KV cache | weights | {' | '.join(COLUMNS)} |", "|---" * 7 + "|"]
    for (name, kv, row), weights in found.items():
        said = "all" if len(weights) == len(WEIGHTS) else ", ".join(weights)
        lines.append(f"| {name} | {kv} | {said} | {' | '.join(row)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
