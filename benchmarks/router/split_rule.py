"""What the rule of the conditional split would do: one P, one D, Poisson arrivals, on paper, with
its own constants.

The hardware is three numbers (prefill tokens a second, a decode step's milliseconds, its growth
with rows), the router knows all state at once, and the hand-off takes a constant time; so this
compares rules, and predicts no server.

    python -m benchmarks.router.split_rule --rate 15 --prompt 2048 --tokens 128
"""

import argparse
import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from pdserve.router.choosing.split_rule import HANDOFF_MS, STALL_WEIGHT
from pdserve.router.fleet.stall_budget import StallBudget

PREFILL_TOKENS_PER_MS = 39.5  # H200, Llama-3.1-8B in bf16
STEP_MS = 4.1
ROW_MS = 0.056  # a row of 2,300 tokens
BYTES_PER_TOKEN = 131_072
LINK_BYTES_PER_MS = 233e6


@dataclass
class Request:
    arrived: float
    left: int
    first: float = 0.0
    last: float = 0.0


@dataclass
class Cluster:
    """mode: "auto", "split", "whole", or "unbounded" (auto without the budget). Times are
    milliseconds."""

    mode: str
    num_prompt_tokens: int
    p_free: float = 0.0
    num_whole: int = 0
    queue: deque[Request] = field(default_factory=deque)  # whole prompts at D
    under_way: list[tuple[float, int, Request]] = field(default_factory=list)  # hand-offs
    decoding: list[Request] = field(default_factory=list)
    budget: StallBudget = field(default_factory=StallBudget)
    prompt_ends: float = 0.0  # D computes a prompt until then

    @property
    def compute_ms(self) -> float:
        return self.num_prompt_tokens / PREFILL_TOKENS_PER_MS

    @property
    def move_ms(self) -> float:
        return self.num_prompt_tokens * BYTES_PER_TOKEN / LINK_BYTES_PER_MS + HANDOFF_MS

    def place(self, request: Request) -> None:
        if self._splits(request.arrived):
            self.p_free = request.first = max(self.p_free, request.arrived) + self.compute_ms
            heapq.heappush(self.under_way, (self.p_free + self.move_ms, id(request), request))
            return
        self.num_whole += 1
        self.queue.append(request)
        if self.decoding:
            self.budget.spend(self.compute_ms, request.arrived / 1000)

    def _splits(self, now: float) -> bool:
        if self.mode in ("split", "whole"):
            return self.mode == "split"
        queue = len(self.queue) * self.compute_ms + max(0.0, self.prompt_ends - now)
        split = max(0.0, self.p_free - now) + self.compute_ms + self.move_ms + queue
        whole = queue + self.compute_ms * (1 + STALL_WEIGHT * len(self.decoding))
        if split <= whole:
            return True
        is_free = self.mode == "unbounded" or not self.decoding
        return not (is_free or self.budget.allows(self.compute_ms, now / 1000))

    def step_ms(self) -> float:
        """Of D's next step, without a prompt in it."""
        return (
            STEP_MS + ROW_MS * len(self.decoding) * self.num_prompt_tokens / 2300
            if self.decoding
            else 0.0
        )


def simulate(
    mode: str, rate: float, num_prompt_tokens: int, num_tokens: int, count: int, seed: int
) -> dict[str, float]:
    """rate: requests a second. Percentiles in milliseconds."""
    draw = random.Random(seed)
    now = 0.0
    requests: list[Request] = []
    for _ in range(count):
        now += 1000 * draw.expovariate(rate)
        requests.append(Request(now, num_tokens - 1))
    cluster = Cluster(mode, num_prompt_tokens)
    coming = deque(requests)
    now = 0.0
    num_done = 0
    while num_done < count:
        while coming and coming[0].arrived <= now:
            cluster.place(coming.popleft())
        while cluster.under_way and cluster.under_way[0][0] <= now:
            cluster.decoding.append(heapq.heappop(cluster.under_way)[2])
        if not cluster.decoding and not cluster.queue:
            events = [r.arrived for r in list(coming)[:1]] + [
                ready for ready, _, _ in cluster.under_way[:1]
            ]
            now = min(events)
            continue
        prompt = cluster.queue.popleft() if cluster.queue else None
        ends = now + cluster.step_ms() + (cluster.compute_ms if prompt is not None else 0.0)
        cluster.prompt_ends = ends if prompt is not None else 0.0
        while coming and coming[0].arrived <= ends:
            cluster.place(coming.popleft())
        now = ends
        num_done += _finish_step(cluster, prompt, now)
    ttft = sorted(r.first - r.arrived for r in requests)
    tpot = sorted((r.last - r.first) / (num_tokens - 1) for r in requests)
    return {
        "ttft_p50": ttft[count // 2],
        "ttft_p99": ttft[count * 99 // 100],
        "tpot_p50": tpot[count // 2],
        "tpot_p99": tpot[count * 99 // 100],
        "whole": cluster.num_whole / count,
    }


def _finish_step(cluster: Cluster, prompt: Request | None, now: float) -> int:
    """How many requests ended."""
    before = len(cluster.decoding)
    for request in cluster.decoding:
        request.left = request.left - 1
        request.last = now
    cluster.decoding = [request for request in cluster.decoding if request.left > 0]
    num_ended = before - len(cluster.decoding)
    if prompt is not None:
        prompt.first = now
        cluster.decoding.append(prompt)
    return num_ended


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=15.0, help="requests a second")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="generated, at least 2")
    parser.add_argument("--count", type=int, default=1200, help="requests")
    parser.add_argument("--seeds", type=int, default=5, help="runs; medians are shown")
    options = parser.parse_args()
    for mode in ("split", "whole", "unbounded", "auto"):
        runs = [
            simulate(mode, options.rate, options.prompt, options.tokens, options.count, s)
            for s in range(options.seeds)
        ]
        middle = {name: sorted(run[name] for run in runs)[len(runs) // 2] for name in runs[0]}
        print(f"{mode:10}" + "".join(f"  {name} {value:8.2f}" for name, value in middle.items()))


if __name__ == "__main__":
    main()
