"""Offline throughput of one engine: N prompts of random token ids through `LLM.generate`, greedy, end-of-sequence
ignored.

    python benchmarks/offline.py --shape 64x512x128 --shape 1x128x256        # Llama-3.1-8B shape, random weights
Prints one line a shape and appends JSON lines to --out. Prefix caching is off; the first shape runs once untimed.
"""

import argparse
import json
import random
import statistics
import subprocess
import time
from pathlib import Path

import torch

from pdserve.engine.llm import LLM, SamplingParams

DEFAULT_MODEL = str(Path(__file__).parent / "shapes" / "llama-3.1-8b")


def shape_of(text: str) -> tuple[int, int, int]:
    """`PROMPTSxINxOUT` -> three numbers."""
    try:
        prompts, tokens_in, tokens_out = (int(part) for part in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"--shape must look like 64x512x128 (prompts x in x out), not {text!r}"
        ) from None
    return prompts, tokens_in, tokens_out


def run_once(llm: LLM, shape: tuple[int, int, int], seed: int) -> float:
    """Seconds for one batch of fresh random prompts."""
    num_prompts, tokens_in, tokens_out = shape
    rng = random.Random(seed)
    vocab = llm.engine.spec.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(tokens_in)] for _ in range(num_prompts)]
    params = SamplingParams(temperature=0, max_tokens=tokens_out, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert all(len(output.outputs[0].token_ids) == tokens_out for output in outputs)
    return seconds


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="folder; only its config.json is read")
    parser.add_argument("--shape", type=shape_of, action="append", help="PROMPTSxINxOUT; may be given several times")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=_commit(), help="recorded; needed where there is no git checkout")
    args = parser.parse_args()
    shapes = args.shape or [(64, 512, 128)]
    began = time.perf_counter()
    llm = LLM(
        args.model,
        load_format="dummy",
        tokenizer=False,
        block_size=args.block_size,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=False,
    )
    run_once(llm, (1, 16, 1), 0)
    started = time.perf_counter() - began
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{device}: start to first token {started:.1f} s, {llm.engine.blocks.num_usable} blocks of {args.block_size}")
    run_once(llm, shapes[0], 1)
    for shape in shapes:
        times = [run_once(llm, shape, 2 + repeat) for repeat in range(args.repeats)]
        seconds = statistics.median(times)
        tokens = shape[0] * (shape[1] + shape[2])
        row = {
            "benchmark": "offline",
            "model": Path(args.model).name,
            "device": device,
            "shape": "x".join(map(str, shape)),
            "seconds": round(seconds, 4),
            "spread_s": round(max(times) - min(times), 4),
            "tokens_per_s": round(tokens / seconds),
            "start_s": round(started, 1),
            "block_size": args.block_size,
            "commit": args.commit,
        }
        print(f"{row['shape']:>14}: {seconds:8.3f} s   {row['tokens_per_s']:>8} tok/s in+out")
        if args.out:
            with args.out.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
