"""Measures the recall of the demo model through a server: greedy answers over HTTP to 300 new
prompts of up to 1,500 tokens.

A wrong byte of KV anywhere between prefill and decode shows up here as a wrong answer. This
benchmark only uses OpenAI's completions call, so it can measure any server of the model. Run it by
hand from the repository: `python -m benchmarks.cluster.recall`. The exit code is 1 below 97 %.
demo/evaluate.py measures the same prompts without a server.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tqdm import tqdm

from demo.data import RecallPrompt
from demo.recall import (
    MAX_ANSWER_TOKENS,
    MAX_PROMPT_TOKENS,
    THRESHOLD,
    length_bucket,
    recall_prompts,
    shares,
)


class Outcome(NamedTuple):
    """One answered prompt. `num_tokens` is the prompt's length as the server counts it."""

    match: bool
    num_tokens: int
    text: str


def ask(url: str, model: str, prompt: str, timeout_s: float) -> tuple[str, int]:
    """Returns the greedy completion and the number of prompt tokens. Raises RuntimeError with the
    server's message if it refuses."""
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": MAX_ANSWER_TOKENS}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise RuntimeError(
            f"{url} answered {error.code}: {error.read().decode(errors='replace')[:500]}"
        ) from error
    except OSError as error:
        raise RuntimeError(
            f"no answer from {url} ({error}): is the server up? `make serve` starts one"
        ) from error
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]


def measure(
    url: str, model: str, prompts: list[RecallPrompt], concurrency: int, timeout_s: float
) -> list[Outcome]:
    """Sends every prompt, `concurrency` at a time. Returns outcomes in the prompts' order. The
    first failed call ends the measurement."""

    def outcome(p: RecallPrompt) -> Outcome:
        text, num_tokens = ask(url, model, p.prompt, timeout_s)
        return Outcome(text == p.answer, num_tokens, text)

    pool = ThreadPoolExecutor(concurrency)
    try:
        return list(
            tqdm(pool.map(outcome, prompts), total=len(prompts), desc="recall", file=sys.stderr)
        )
    finally:
        pool.shutdown(cancel_futures=True)


def report(prompts: list[RecallPrompt], outcomes: list[Outcome]) -> float:
    """Prints the first misses and the accuracy by kind, by length and overall. Returns the overall
    accuracy."""
    misses = [(p, o) for p, o in zip(prompts, outcomes, strict=True) if not o.match]
    for p, o in misses[:5]:
        print(
            f"miss: {p.prompt.splitlines()[-2]!r} is {p.answer!r}, answered {o.text!r} "
            f"({o.num_tokens} tokens)"
        )
    matches = [o.match for o in outcomes]
    print("by kind:  ", shares([p.kind for p in prompts], matches))
    print("by tokens:", shares([length_bucket(o.num_tokens) for o in outcomes], matches))
    return sum(matches) / len(matches)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="measure the demo model's recall through an OpenAI-compatible server"
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="pdserve-demo", help="the model's name at the server")
    parser.add_argument("--num", type=int, default=300, help="number of prompts")
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument(
        "--max-tokens-target", type=int, default=MAX_PROMPT_TOKENS, help="longest prompt in tokens"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds to wait for one answer"
    )
    args = parser.parse_args()
    if args.num < 1 or args.concurrency < 1:
        parser.error(
            f"--num ({args.num}) and --concurrency ({args.concurrency}) must be at least 1"
        )
    prompts = recall_prompts(args.seed, args.num, args.max_tokens_target)
    try:
        outcomes = measure(
            args.url.rstrip("/"), args.model, prompts, args.concurrency, args.timeout
        )
    except RuntimeError as error:
        print(f"recall: {error}", file=sys.stderr)
        return 1
    accuracy = report(prompts, outcomes)
    num_right = sum(o.match for o in outcomes)
    print(
        f"recall: {num_right} of {args.num} = {accuracy:.4f} (seed {args.seed}, threshold "
        f"{THRESHOLD})"
    )
    return 0 if accuracy >= THRESHOLD else 1


if __name__ == "__main__":
    sys.exit(main())
