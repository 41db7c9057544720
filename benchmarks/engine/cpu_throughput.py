"""Tokens per second on CPU: `LLM.generate` and the HTTP endpoint against transformers `generate`,
one prompt after the other.

There are sixteen prompts of 128 tokens with 64 tokens out each, greedy, end-of-sequence ignored.
The sides run in interleaved rounds, so a busy machine slows all of them. The figure is the median
of the rounds' ratios. Token ids must agree between all sides. After that, a bare uvicorn shows how
fast the machine is now.

    python -m benchmarks.engine.cpu_throughput                     # LLM against transformers
    python -m benchmarks.engine.cpu_throughput --url http://127.0.0.1:8000   # `make serve`
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from benchmarks.support.yardstick import bare_us_per_token, beside
from pdserve.bench.record import append, git_commit
from pdserve.engine.llm import LLM, SamplingParams

NUM_PROMPTS = 16
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
Side = Callable[[list[list[int]]], list[list[int]]]


def prompts_of(round_number: int, vocab_size: int) -> list[list[int]]:
    """Draws new prompts for a round, so that a prefix cache does not help."""
    rng = random.Random(round_number)
    return [
        [rng.randrange(8, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)
    ]


def transformers_side(path: str) -> Side:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(prompts: list[list[int]]) -> list[list[int]]:
        outputs = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=OUTPUT_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            outputs.append(out[0, PROMPT_TOKENS:].tolist())
        return outputs

    return run


def llm_side(path: str) -> Side:
    llm = LLM(path, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    def run(prompts: list[list[int]]) -> list[list[int]]:
        return [
            output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)
        ]

    return run


def http_side(url: str, model: str, stream: bool) -> Side:
    """Sends all prompts at once over one client, for whole answers or server-sent events."""
    body = {
        "model": model,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    async def whole(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        answer = await client.post(f"{url}/v1/completions", json={**body, "prompt": prompt})
        answer.raise_for_status()
        return answer.json()["choices"][0]["token_ids"]

    async def streamed(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        request = {**body, "prompt": prompt, "stream": True}
        async with client.stream("POST", f"{url}/v1/completions", json=request) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += choice.get("token_ids") or []
        return tokens

    async def all_at_once(prompts: list[list[int]]) -> list[list[int]]:
        async with httpx.AsyncClient(timeout=120) as client:
            one = streamed if stream else whole
            return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))

    return lambda prompts: asyncio.run(all_at_once(prompts))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo/pdserve-demo", help="folder of the served model")
    parser.add_argument("--url", help="also measure this endpoint")
    parser.add_argument("--served-name", default="pdserve-demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file to append a JSON line to")
    args = parser.parse_args()
    sides = {"transformers": transformers_side(args.model), "LLM.generate": llm_side(args.model)}
    if args.url:
        sides["HTTP"] = http_side(args.url, args.served_name, stream=False)
        sides["HTTP streamed"] = http_side(args.url, args.served_name, stream=True)
    vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in tqdm(range(-1, args.rounds), desc="rounds", unit="round"):  # round -1 warms up
        prompts = prompts_of(number, vocab_size)
        answers = {}
        for name, side in sides.items():
            began = time.perf_counter()
            answers[name] = side(prompts)
            if number >= 0:
                rates[name].append(NUM_PROMPTS * OUTPUT_TOKENS / (time.perf_counter() - began))
        for name, answer in answers.items():
            assert answer == answers["transformers"], f"{name} gave other tokens than transformers"
    report(rates, args)


def report(rates: dict[str, list[float]], args: argparse.Namespace) -> None:
    bare = bare_us_per_token()
    row: dict[str, object] = {
        "benchmark": "cpu_throughput",
        "shape": f"{NUM_PROMPTS} x ({PROMPT_TOKENS} in, {OUTPUT_TOKENS} out)",
        "rounds": args.rounds,
        "machine": platform.machine(),
        "threads": f"{torch.get_num_threads()} for transformers and LLM, 1 an engine behind HTTP",
        "commit": git_commit(),
        "bare_us_per_token": bare,
    }
    for name, values in rates.items():
        ratios = [value / base for value, base in zip(values, rates["transformers"], strict=True)]
        row[name] = {
            "tokens_per_s": round(statistics.median(values), 1),
            "ratio": round(statistics.median(ratios), 2),
        }
        print(
            f"{name:14} {statistics.median(values):8.0f} tok/s   {statistics.median(ratios):5.2f} "
            "x transformers"
        )
    print(beside(bare))
    append(args.out, row)


if __name__ == "__main__":
    main()
