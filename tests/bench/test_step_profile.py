"""Kernels told apart in traces of several kinds of engine, and scenarios that become rows and
tables."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.engine.device_trace import Kernel, Trace, busy_us, parts_of, read_trace, span_us
from benchmarks.engine.step_floor import PARTS, Ceilings
from benchmarks.engine.step_profile import Measured, Profiler, table
from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine.build import build_engine

H200 = Ceilings(4.45e12, 696e12)
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"
SPLIT = [
    "sm90_xmma_gemm_bf16bf16_bf16f32_splitK",
    "void cublasLt::splitKreduce_kernel<32, 16, int>",
]
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4>"

LAYER = [
    ("rms_norm_kernel", "norm"),
    (GEMM, "qkv"),
    ("rope_write_kv_kernel", "rope + KV write"),
    ("decode_kernel", "attention"),
    ("merge_kernel", "attention"),
    (GEMM, "o"),
    ("rms_norm_kernel", "norm"),
    (GEMM, "gate-up"),
    ("silu_mul_kernel", "activation"),
    (GEMM, "down"),
]
HEAD = [("rms_norm_kernel", "norm"), (GEMM, "head")]
SAMPLING = [
    (ELEMENTWISE, "sampling"),
    ("void at::native::reduce_kernel<ArgMaxOps>", "sampling"),
    ("merge_kernel", "sampling"),
]
INPUTS = [("Memcpy HtoD (Pinned -> Device)", "copies"), ("gather_inputs_kernel", "inputs")]
# norms inside the products, and the activation inside gate-up's
FUSED = [
    ("norm_linear_kernel", "qkv"),
    ("rope_write_kv_kernel", "rope + KV write"),
    ("decode_kernel", "attention"),
    ("linear_kernel", "o"),
    ("norm_linear_silu_mul_kernel", "gate-up"),
    ("linear_kernel", "down"),
]
# some products in two launches, attention by cuDNN
SPLIT_LAYER = [
    ("rms_norm_kernel", "norm"),
    *((name, "qkv") for name in SPLIT),
    ("rope_write_kv_kernel", "rope + KV write"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
    *((name, "o") for name in SPLIT),
    ("rms_norm_kernel", "norm"),
    (GEMM, "gate-up"),
    ("silu_mul_kernel", "activation"),
    *((name, "down") for name in SPLIT),
]


@pytest.mark.parametrize(
    "sequence",
    [
        [*INPUTS, *LAYER, *LAYER, *HEAD, *SAMPLING] * 3,
        [*INPUTS, *LAYER, *LAYER, ("rms_norm_kernel", "norm")] * 2,  # chunks that sample nothing
        [*INPUTS, *FUSED, *FUSED, *HEAD, *SAMPLING] * 2,
        [*INPUTS, *SPLIT_LAYER, *SPLIT_LAYER, *HEAD] * 2,
        # decodes and a prompt
        [*INPUTS, *LAYER[:4], ("prefill_kernel", "attention"), *LAYER[5:], *HEAD] * 2,
        [*LAYER, ("mystery_kernel", "other"), *LAYER, *HEAD],
    ],
    ids=["separate", "unsampled", "fused", "split-k", "mixed", "unknown"],
)
def test_kernels_find_their_part(sequence: list[tuple[str, str]]) -> None:
    assert parts_of([name for name, _ in sequence]) == [part for _, part in sequence]


def test_products_that_cannot_be_told_apart_are_not_guessed() -> None:
    names = [name for name, _ in LAYER] + [GEMM, GEMM, GEMM] + [name for name, _ in LAYER]
    assert parts_of(names).count("other") == 5


def test_busy_time_counts_overlap_once() -> None:
    kernels = [Kernel("a", 0, 10), Kernel("b", 5, 10), Kernel("c", 6, 2), Kernel("d", 20, 5)]
    assert busy_us(kernels) == 20 and span_us(kernels) == 25
    assert busy_us([]) == span_us([]) == 0


def test_a_trace_is_read_in_order_with_the_hosts_waiting(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "b", "ts": 20.0, "dur": 3.0},
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 10.0, "dur": 5.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 5.0, "dur": 1.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaEventSynchronize", "ts": 1.0, "dur": 7.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "ts": 1.0, "dur": 900.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "ts": 1.0, "dur": 4.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1.0, "dur": 400.0},
        {"ph": "M", "name": "process_name"},
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    trace = read_trace(tmp_path / "t.json")
    assert [kernel.name for kernel in trace.kernels] == ["Memcpy HtoD", "a", "b"]
    assert trace.waiting_us == 907.0


def test_a_scenario_becomes_a_row_and_a_table() -> None:
    sequence = [*INPUTS, *LAYER, *HEAD, *SAMPLING] * 2
    kernels = [Kernel(name, 20.0 * i, 15.0) for i, (name, _) in enumerate(sequence)]
    floor = dict.fromkeys(PARTS, 1e-6)
    row = Measured("decode 1 x 8", 3e-4, 9e-4, Trace(kernels, 300.0), 2, floor).row()
    assert row["wall_ms"] == 0.3 and row["host_ms"] == 0.3
    span = 20.0 * (len(sequence) - 1) + 15
    assert row["device_ms"] == pytest.approx(span / 2e3, abs=1e-4)
    assert row["parts"]["gaps"]["ms"] == pytest.approx(5 * (len(sequence) - 1) / 2e3, abs=1e-4)
    assert row["parts"]["norm"] == {"ms": 0.045, "floor_ms": 0.001, "kernels": 3.0}
    assert sum(part["ms"] for part in row["parts"].values()) == pytest.approx(
        row["device_ms"], abs=1e-3
    )
    assert json.loads(json.dumps(row)) == row
    text = table(row)
    assert "decode 1 x 8: wall 0.300 ms" in text and "gate-up" in text and "other" not in text


class WithoutDevice(Profiler):
    """The scenarios on CPU: what drives the engine is the same, the trace is empty."""

    def _timed(self, work: Callable[[], None]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def _profiled(self, work: Callable[[], None]) -> tuple[float, Trace]:
        return self._timed(work), Trace([], 0.0)


def test_scenarios_drive_the_engine(tiny_llama: Path) -> None:
    engine = build_engine(
        ModelConfig(path=str(tiny_llama)), EngineConfig(device="cpu", max_num_batched_tokens=64)
    )
    profiler = WithoutDevice(engine, H200, num_steps=3)
    rows = [measured.row() for measured in [profiler.prefill(100), *profiler.decode([1, 4], 40)]]
    assert [row["scenario"] for row in rows] == ["prefill 100", "decode 4 x 40", "decode 1 x 40"]
    assert all(row["wall_ms"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert not engine.has_work
    engine.check_integrity()
    assert engine.stats.generation_tokens >= 4 * 9 + 9
