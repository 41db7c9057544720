"""Measures what quantised weights and a KV cache in fp8 cost the demo model: recall, and how far
its next-token distributions move from those in 16 bits.

    python -m demo.quality --out benchmarks/results/quantised-demo.md

KL is the Kullback-Leibler divergence from the model in 16 bits, in nats, as a mean over the tokens
of `pdserve calibrate-kv`'s text. Recall is the number of right greedy answers of 300, through
pdserve's engine. A run takes half an hour on one core. This module is run by hand.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from demo.recall import MAX_ANSWER_TOKENS, recall_prompts
from demo.storing import WAYS, write_quantised
from pdserve.calibration.cli import SAMPLE
from pdserve.calibration.kv_scales import calibrate, divergence
from pdserve.calibration.whole_prompts import WholePrompts
from pdserve.calibration.windows import windows_of
from pdserve.configs.engine import ActivationDtype, OnlineScheme
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.engine.memory.kv_cache import FP8
from pdserve.kernels.ops import ops_for
from pdserve.models.config import ModelSpec, read_spec
from pdserve.models.kv_scales import KvScales, save_scales
from pdserve.models.loader import load_model
from pdserve.models.registry import CausalLM
from pdserve.text.tokenizer import Tokenizer

MODEL_DIR = Path(__file__).parent / "pdserve-demo"
CPU = torch.device("cpu")
OPS = ops_for(CPU)
DTYPE = "float32"  # the dtype in which CPUs compute
LENGTH = 2048
SEED = 1
NUM_PROMPTS = 300
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    weights: str  # a key of WAYS, "16 bits", or "online fp8" (model.quantization)
    kv_dtype: str = "auto"
    activations: ActivationDtype = "auto"  # model.activation_dtype
    has_scales: bool = True  # of a cache in fp8, as `pdserve calibrate-kv` finds them; else 1


ROWS = (
    Row("16 bits"),
    Row("16 bits", "fp8"),
    Row("16 bits", "fp8", has_scales=False),
    Row("online fp8"),
    *(Row(way) for way in WAYS),
    Row("fp8", "fp8"),
    Row("fp8-blocks", "fp8"),
    Row("fp8-blocks", "fp8", has_scales=False),
    Row("awq", "fp8"),
    Row("awq", activations="fp8"),
    Row("awq", "fp8", activations="fp8"),
    Row("gptq", activations="fp8"),
    Row("ct-int4-rows", activations="fp8"),
)


@dataclass(frozen=True)
class Quality:
    """The figures of one row."""

    kl: float  # mean, in nats
    recall: int
    bytes: int  # size of the weights' file


class Measure:
    """Compares models with the one in 16 bits, whose hidden states are computed once. `num_tokens`
    limits the text. None: all of it."""

    def __init__(self, num_tokens: int | None = None, num_prompts: int = NUM_PROMPTS) -> None:
        self._num_prompts = num_prompts
        ids = Tokenizer.load(MODEL_DIR).encode(SAMPLE.read_text())[:num_tokens]
        self._windows = windows_of(ids, LENGTH)
        _, self._plain = loaded(MODEL_DIR)
        exact = WholePrompts(self._plain, OPS, DTYPE, LENGTH, BLOCK_SIZE)
        self._exact = [exact.hidden(window.ids) for window in self._windows]

    def quality(self, row: Row) -> Quality:
        with folder_of(row.weights) as folder:
            online: OnlineScheme | None = "fp8" if row.weights == "online fp8" else None
            spec, model = loaded(folder, online, row.activations)
            scales = None
            if row.kv_dtype == "fp8" and row.has_scales:
                scales = calibrate(model, OPS, DTYPE, self._windows, BLOCK_SIZE).scales
            kl = self._kl(model, row, scales)
            size = (folder / "model.safetensors").stat().st_size
            return Quality(kl, self._recall(folder, row, spec, scales, online), size)

    def _kl(self, model: CausalLM, row: Row, scales: KvScales | None) -> float:
        kv_dtype = FP8 if row.kv_dtype == "fp8" else DTYPE
        prompts = WholePrompts(model, OPS, kv_dtype, LENGTH, BLOCK_SIZE, scales)
        found = [
            # `self._plain` makes logits of both, because the output matrix is the same
            divergence(self._plain, exact[at.first :], prompts.hidden(at.ids)[at.first :])
            for at, exact in zip(self._windows, self._exact, strict=True)
        ]
        return torch.cat(found).mean().item()

    def _recall(
        self,
        folder: Path,
        row: Row,
        spec: ModelSpec,
        scales: KvScales | None,
        online: OnlineScheme | None,
    ) -> int:
        prompts = recall_prompts(SEED, self._num_prompts)
        with tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary) / "scales.json"
            if scales is not None:
                save_scales(file, scales, spec.weights, {})
            llm = LLM(
                str(folder),
                device="cpu",
                quantization=online,
                activation_dtype=row.activations,
                kv_cache_dtype=row.kv_dtype,
                kv_scales=None if scales is None else str(file),
            )
            params = SamplingParams(temperature=0, max_tokens=MAX_ANSWER_TOKENS)
            outputs = llm.generate([p.prompt for p in prompts], params, use_tqdm=False)
        answers = [output.outputs[0].text for output in outputs]
        return sum(answer == p.answer for answer, p in zip(answers, prompts, strict=True))


def loaded(
    folder: Path, online: OnlineScheme | None = None, activations: ActivationDtype = "auto"
) -> tuple[ModelSpec, CausalLM]:
    spec = read_spec(str(folder), quantization=online, activation_dtype=activations)
    return spec, load_model(str(folder), spec, torch.float32, CPU, OPS)


@contextmanager
def folder_of(weights: str) -> Iterator[Path]:
    if weights not in WAYS:
        yield MODEL_DIR
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield write_quantised(MODEL_DIR, Path(temporary) / "model", WAYS[weights])


def line_of(row: Row, found: Quality) -> str:
    kv_dtype = "16 bits" if row.kv_dtype == "auto" else row.kv_dtype
    kv_dtype += "" if row.has_scales else ", all scales 1"
    weights = row.weights
    if row.activations != "auto":
        weights += f", activations in {row.activations}"
    return f"| {weights} | {kv_dtype} | {found.bytes:,} | {found.kl:.2g} | {found.recall} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    options = parser.parse_args()
    measure = Measure()
    lines = [
        f"| weights | KV cache | bytes of weights | mean KL, nats | right of {NUM_PROMPTS} |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for row in tqdm(ROWS, desc="rows", disable=None):
        lines.append(line_of(row, measure.quality(row)))
        print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
