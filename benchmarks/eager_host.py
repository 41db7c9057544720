"""Host time of one eager forward (no CUDA graph) at Llama-3.1-8B shapes: what a step with prefill chunks costs the host
before the device has anything to do, whatever the number of rows.

    python benchmarks/eager_host.py --out benchmarks/results/eager-host.jsonl

Medians over forwards that start on an idle device and are not waited for; launches are counted by torch's profiler.
Weights are left as they were allocated: results are not looked at. Knows model and attention, no engine.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pdserve.engine.attention import AttentionBatch, PagedAttention, StepShape
from pdserve.kernels.ops import Ops, ops_for
from pdserve.models.config import ModelSpec, RopeSpec
from pdserve.models.llama import Llama
from pdserve.parallel.dims import ParallelDims

LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    family="llama",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_position=8192,
    rms_eps=1e-5,
    rope=RopeSpec(theta=500000.0),
    tie_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    dtype="bfloat16",
    eos_token_ids=(),
    weights="none",
)
BLOCK_SIZE, MAX_BLOCKS = 128, 32
CASES = {  # decodes at a context of 1,000, lengths of fresh prompts
    "64 rows": (0, (64,)),
    "512 rows": (0, (512,)),
    "2,048 rows": (0, (2048,)),
    "200 decodes + 2 x 256": (200, (256, 256)),
    "201 decodes + 2 x 255": (201, (255, 255)),
}


@dataclass(frozen=True)
class Result:
    """One JSON line of --out. launches: of kernels and copies."""

    name: str
    host_ms: float
    device_ms: float
    launches_per_layer: float
    device: str
    commit: str


class Step:
    """Forwards of one model over one made-up batch."""

    def __init__(self, spec: ModelSpec, ops: Ops, device: torch.device) -> None:
        self._model = Llama(spec, torch.bfloat16, device, ops, ParallelDims())
        self._ops = ops
        self._device = device
        self._scale = spec.head_dim**-0.5
        shape = (256, spec.num_kv_heads, spec.num_layers, 2, BLOCK_SIZE, spec.head_dim)
        self._layers = torch.zeros(shape, dtype=torch.bfloat16, device=device).unbind(2)

    def forward(self, num_decodes: int, prompts: tuple[int, ...]) -> Callable[[], object]:
        """What the model runner does in an eager step, its inputs being on the device. All write to one block."""

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._device)

        num_rows, num_seqs = num_decodes + sum(prompts), num_decodes + len(prompts)
        zeros = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        starts = [sum(prompts[:i]) for i in range(len(prompts) + 1)]
        batch = AttentionBatch(
            StepShape(num_decodes, 1000 if num_decodes else 0, max(prompts), prompts),
            positions=zeros,
            slots=torch.arange(num_rows, device=self._device) % BLOCK_SIZE,
            block_tables=torch.zeros((num_seqs, MAX_BLOCKS), dtype=torch.int32, device=self._device),
            table_rows=torch.arange(num_seqs, dtype=torch.int32, device=self._device),
            context_lens=ints(*[1000] * num_decodes, *prompts),
            query_starts=ints(*starts),
        )

        def run() -> None:
            self._model.forward(zeros, PagedAttention(self._layers, self._ops, self._scale, batch))

        return run

    def warm_dense_prefill(self, num_rows: int) -> None:
        zeros = torch.zeros(num_rows, dtype=torch.int32, device=self._device)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _rope: object) -> torch.Tensor:
            if layer == 0:
                self._ops.warm_dense_prefill(q, k, v, self._scale)
            return q

        self._model.forward(zeros, attend)


def measure(name: str, run: Callable[[], object], num_layers: int, commit: str) -> Result:
    for _ in range(3):
        run()
    host, device = [], []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        device.append(time.perf_counter() - start)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run()
        torch.cuda.synchronize()
    launches = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in prof.events())
    return Result(
        name,
        round(statistics.median(host) * 1000, 2),
        round(statistics.median(device) * 1000, 2),
        round(launches / num_layers, 2),
        torch.cuda.get_device_name(),
        commit,
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--commit", help="of the code measured (default: git's)")
    args = parser.parse_args()
    commit = args.commit or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    device = torch.device("cuda", torch.cuda.current_device())
    step = Step(LLAMA_8B, ops_for(device), device)
    step.warm_dense_prefill(2048)
    print(f"{'eager forward':28} host ms  until done  launches a layer")
    for name, (num_decodes, prompts) in CASES.items():
        result = measure(name, step.forward(num_decodes, prompts), LLAMA_8B.num_layers, commit)
        print(f"{name:28} {result.host_ms:7.2f} {result.device_ms:11.2f} {result.launches_per_layer:17.2f}")
        if args.out:
            with args.out.open("a") as lines:
                lines.write(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    main()
