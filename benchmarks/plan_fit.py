"""Fits a profile of an H200 to rows that were measured before `pdserve profile` existed.

    python -m benchmarks.plan_fit

Each point names its row. The first shipped profile was made so. Today's was measured by `pdserve
profile` (docs/design/planner.md); a run of this script overwrites it.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.support.places import RESULTS, SHAPES
from pdserve.models.config import read_spec
from pdserve.plan.profile.profile import (
    DEFAULT,
    DecodePoint,
    Profile,
    PromptPoint,
    write_profile,
)

MODEL = "llama-3.1-8b"
HTTP_S = 2.4e-3  # time that HTTP, routers and messages add to a first token: log.md
# Memory that the engine uses: 0.9 of 139.8 GiB, minus 2 GiB for a step (plan/costs/rates.py).
MEMORY_BYTES = (0.9 * 139.8 - 2) * 2**30
SOURCES = (
    "no run of `pdserve profile` yet: fitted by benchmarks/plan_fit.py from benchmarks/results",
    "targets-h200.jsonl, 6594b50: decode-1, batch-256, batch-512-out (less their prompts), http-1",
    "step-profile-h200.jsonl, newest of each: decode 1, 64, 256 x 1024, prefill 2048, 8192, 16000",
    "hand-off-h200.jsonl, ce33093: whole on P, 1024",
    "kv-transfer-h200.jsonl, d05d49d: 295 GB/s and 0.35 ms",
    "no step of prompts beside decodes was measured: mixed is empty",
)


def _rows(name: str) -> Iterator[dict[str, Any]]:
    for line in (RESULTS / name).read_text().splitlines():
        yield json.loads(line)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    targets = {
        row["row"]: row["figures"]
        for row in _rows("targets-h200.jsonl")
        if row["model"] == MODEL and row["commit"] == "6594b50"
    }
    steps = {row["scenario"]: row["wall_ms"] / 1e3 for row in _rows("step-profile-h200.jsonl")}
    [whole] = [
        row["ttft_ms"]["p50"] / 1e3
        for row in _rows("hand-off-h200.jsonl")
        if row.get("mode") == "whole on P" and row["tokens"] == 1024
    ]
    full = statistics.median(
        [steps["prefill 8192"], targets["prefill-8k"]["prefill_ms"]["median"] / 1e3]
    )
    sixteen = targets["prefill-16x1k"]["prefill_ms"]["median"] / 1e3 / 2  # for 8 x 1,024 tokens

    def decodes_of(row: str, num_prompt_steps: int, num_steps: int) -> float:
        seconds: float = targets[row]["seconds"]["median"]
        return (seconds - num_prompt_steps * sixteen) / num_steps

    profile = Profile(
        device="NVIDIA H200",
        model=MODEL,
        dtype="bfloat16",
        spec=read_spec(str(SHAPES / MODEL), "dummy").model_dump(mode="json"),
        source=SOURCES,
        decodes=(
            DecodePoint(1, 256, targets["decode-1"]["decode_ms_per_token"]["median"] / 1e3),
            DecodePoint(1, 1024, steps["decode 1 x 1024"]),
            DecodePoint(64, 1024, steps["decode 64 x 1024"]),
            DecodePoint(256, 256, decodes_of("batch-256", 4, 255)),
            DecodePoint(256, 1024, steps["decode 256 x 1024"]),
            DecodePoint(512, 512, decodes_of("batch-512-out", 16, 511)),
        ),
        prompts=(
            PromptPoint(128, 0, targets["decode-1"]["prefill_ms"]["median"] / 1e3),
            PromptPoint(512, 0, targets["http-1"]["ttft_ms"]["p50"] / 1e3 - HTTP_S),
            PromptPoint(1024, 0, whole),
            PromptPoint(2048, 0, steps["prefill 2048"]),
            PromptPoint(8192, 0, full),
            PromptPoint(7808, 8192, steps["prefill 16000"] - steps["prefill 8192"]),
        ),
        memory_bytes=MEMORY_BYTES,
    )
    write_profile(DEFAULT, profile)


if __name__ == "__main__":
    main()
