"""Measures what a decode step's sampling costs the host: arrays that are made and sent, with and
without edits of single logits.

    python -m benchmarks.engine.sampling_host [--rows 64] [--ids 1024]

It runs steps of `RowStaging`, which touches no device, over rows that advance by one token. It
prints the milliseconds of a later step and the bytes that it sends to the device (medians of many).
Beside it stands the first step, in which all rows join. There are greedy rows without edits, rows
with `logit_bias`, and rows with stop tokens masked by min_tokens.
"""

import argparse
import statistics
import time

import torch

from pdserve.engine.sampling.row_staging import RowStaging
from pdserve.engine.sampling.rules.registry import logit_rules
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.kernels.ops import TORCH
from pdserve.protocol.sampling_params import SamplingParams

VOCAB = 128256
STEPS = 200


def rows_of(params: SamplingParams, num_rows: int) -> list[SampleRow]:
    stops = frozenset(params.stop_token_ids)
    return [SampleRow(params, i, i + 1, [1] * 8, 8, stops) for i in range(num_rows)]


def measure(params: SamplingParams, num_rows: int) -> tuple[list[float], list[int]]:
    """Measures milliseconds and bytes of each step, including the first."""
    rules = logit_rules(TORCH, VOCAB, num_rows, 0, torch.device("cpu"))
    staging = RowStaging(rules, VOCAB, num_rows)
    rows = rows_of(params, num_rows)
    times = []
    sizes = []
    for step in range(STEPS):
        began = time.perf_counter()
        if step == 0:
            for row in rows:
                staging.join(row)
        staged = staging.stage(rows, [step] * num_rows)
        times.append(1000 * (time.perf_counter() - began))
        arrays = [staged.draws, *staged.rules.values()]
        sizes.append(sum(array.nbytes for named in arrays for array in named.values()))
    return times, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--ids", type=int, default=1024)
    args = parser.parse_args()
    ids = range(100, 100 + args.ids)
    cases = {
        "greedy": SamplingParams(temperature=0),
        f"logit_bias of {args.ids}": SamplingParams(
            temperature=0, logit_bias=dict.fromkeys(ids, 1.0)
        ),
        f"{args.ids} stop tokens masked": SamplingParams(
            temperature=0, stop_token_ids=list(ids), min_tokens=2 * STEPS, max_tokens=None
        ),
    }
    print(f"{args.rows} rows{'':20}  first ms      step ms   step bytes")
    for name, params in cases.items():
        times, sizes = measure(params, args.rows)
        step_ms = statistics.median(times[1:])
        step_bytes = statistics.median(sizes[1:])
        print(f"{name:28} {times[0]:9.3f} {step_ms:12.3f} {step_bytes:12,.0f}")


if __name__ == "__main__":
    main()
