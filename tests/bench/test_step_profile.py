"""Kernels told apart in traces of several kinds of engine and model, and scenarios that become
rows and tables."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.engine.device_trace import (
    Kernel,
    Trace,
    added_us,
    busy_us,
    parts_of,
    read_trace,
    span_us,
)
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
ROW = "row_product_kernel"
NORM = ("rms_norm_kernel", "norm")
DRAW = [("draw_kernel", "sampling"), ("best_of_splits_kernel", "sampling")]
ROUTER = [("router_product_kernel", "router"), ("choose_kernel", "router")]
FEW = [("few_gated_kernel", "experts"), ("few_down_kernel", "experts")]
MANY = [("expert_product_kernel", "experts")] * 2 + [("combine_kernel", "experts")]
# one row: few experts; many rows: cuBLAS, and all experts; a prompt: cuDNN
MIXTURE_HEAD = [
    NORM,
    (ROW, "qkv"),
    NORM,
    NORM,
    ("rope_write_kv_kernel", "rope + KV write"),
    ("decode_kernel", "attention"),
    ("merge_kernel", "attention"),
    (ROW, "o"),
    NORM,
]
FEW_MIXTURE = [*MIXTURE_HEAD, *ROUTER, *FEW]
MANY_MIXTURE = [(GEMM if name == ROW else name, part) for name, part in MIXTURE_HEAD]
MANY_MIXTURE += [*ROUTER, *MANY]
CUDNN = ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention")
PROMPT_MIXTURE = [*MANY_MIXTURE[:5], CUDNN, ("Memset (Device)", "copies"), *MANY_MIXTURE[7:]]
LAST_ROW = ("void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFl>", "inputs")
ADDED = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFl>>"
# Qwen2-MoE's: a shared expert whose gate is a product of its own
GATED_SHARED = [
    *MIXTURE_HEAD,
    *ROUTER,
    (ROW, "gate-up"),
    ("gate_kernel", "activation"),
    (ROW, "down"),
    (ROW, "router"),
    ("void at::native::vectorized_elementwise_kernel<4, sigmoid_kernel_cuda>", "router"),
    (ELEMENTWISE, "router"),
    *FEW,
    (ADDED, "experts"),
]
COPIED = ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "latents")


def over_latents(
    product: str, num_qkv: int = 1, num_parts: int = 2, is_copied: bool = False
) -> list[tuple[str, str]]:
    """Up to the norm before the MLP. num_parts: of the keys of a decode."""
    merge = [("latent_merge_kernel", "attention")] if num_parts > 1 else []
    queries = [(product, "qkv"), NORM] if num_qkv > 1 else []
    return [
        NORM,
        *queries,
        (product, "qkv"),
        ("rope_write_latent_kernel", "rope + KV write"),
        (GEMM, "latents"),
        ("latent_kernel", "attention"),
        *merge,
        (GEMM, "latents"),
        *([COPIED] if is_copied else []),
        (product, "o"),
        NORM,
    ]


# The first layer's MLP is dense: for one row with the activation inside a product.
FEW_DENSE = [(ROW, "gate-up"), (ROW, "down")]
MANY_DENSE = [(GEMM, "gate-up"), ("gate_kernel", "activation"), (GEMM, "down")]
FEW_LATENT = [*over_latents(ROW), *FEW_DENSE]
FEW_LATENT += [*over_latents(ROW), *ROUTER, *FEW] * 2
MANY_OVER_LATENTS = over_latents(GEMM, num_parts=1, is_copied=True)
MANY_LATENT = [*MANY_OVER_LATENTS, *MANY_DENSE]
MANY_LATENT += [*MANY_OVER_LATENTS, *ROUTER, *MANY] * 2
# queries with latents of their own, as in DeepSeek-V3
V3 = [*over_latents(ROW, num_qkv=2), *FEW_DENSE]
V3 += [*over_latents(ROW, num_qkv=2), *ROUTER, *FEW] * 2
# a prompt whose latents are made keys and values of its own
OWN_KEYS = [
    ("lay_out_kernel", "latents"),
    (GEMM, "latents"),
    (GEMM, "latents"),
    CUDNN,
    ("take_back_kernel", "latents"),
]
EXPANDED = [*over_latents(GEMM)[:3], *OWN_KEYS, (GEMM, "o"), NORM, *ROUTER, *MANY]
# decodes beside it
EXPANDED_MIXED = [
    *over_latents(GEMM)[:4],
    *OWN_KEYS,
    COPIED,
    ("latent_kernel", "attention"),
    (GEMM, "latents"),
    COPIED,
    (GEMM, "o"),
    NORM,
    *ROUTER,
    *MANY,
]
HEAD_1 = [NORM, (ROW, "head"), *DRAW]
FEW_ROWS = ("few_rows_kernel", "between ranks")
MANY_ROWS = [("send_rows_kernel", "between ranks"), ("sum_rows_kernel", "between ranks")]
PULLED_ROWS = ("pull_rows_kernel", "between ranks")
RANKS_LAYER = [*LAYER[1:6], FEW_ROWS, *LAYER[7:10]]
PULLED_LAYER = [*LAYER[1:6], PULLED_ROWS, *LAYER[7:10]]
RANKS_MIXTURE = [
    *LAYER[1:3],
    CUDNN,
    (GEMM, "o"),
    *MANY_ROWS,
    *ROUTER,
    ("place_kernel", "router"),
    *MANY,
    ("send_partial_kernel", "between ranks"),
    ("add_rows_kernel", "between ranks"),
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
        # pieces of a prompt after its first chunk
        [*INPUTS, *LAYER[:3], ("gather_kv_kernel", "attention"), CUDNN, *LAYER[5:], *HEAD] * 2,
        [*INPUTS, *FEW_MIXTURE, *FEW_MIXTURE, *HEAD_1] * 3,
        [*INPUTS, *MANY_MIXTURE, *MANY_MIXTURE, *HEAD_1] * 3,
        [*INPUTS, *PROMPT_MIXTURE, *PROMPT_MIXTURE, LAST_ROW, *HEAD_1] * 2,
        [*INPUTS, *PROMPT_MIXTURE, *PROMPT_MIXTURE, NORM] * 2,
        [*INPUTS, *FEW_MIXTURE, *FEW_MIXTURE, *HEAD, (ELEMENTWISE, "sampling")] * 2,
        [*INPUTS, *GATED_SHARED, *GATED_SHARED, *HEAD_1] * 2,
        [*INPUTS, *FEW_LATENT, *HEAD_1] * 3,
        [*INPUTS, *MANY_LATENT, *HEAD_1] * 3,
        [*INPUTS, *MANY_LATENT, NORM] * 2,
        [*INPUTS, *V3, *HEAD_1] * 3,
        [*INPUTS, *MANY_LATENT, *EXPANDED, *EXPANDED, *HEAD_1] * 2,
        [*INPUTS, *MANY_LATENT, *EXPANDED_MIXED, *EXPANDED_MIXED, *HEAD_1] * 2,
        [*INPUTS, NORM, *RANKS_LAYER, FEW_ROWS, *RANKS_LAYER, FEW_ROWS, *HEAD_1[1:]] * 2,
        [*INPUTS, NORM, *PULLED_LAYER, PULLED_ROWS, *PULLED_LAYER, PULLED_ROWS, *HEAD_1[1:]] * 2,
        [*INPUTS, NORM, *RANKS_MIXTURE, *RANKS_MIXTURE, *HEAD_1[1:]] * 2,
    ],
    ids=[
        "separate",
        "unsampled",
        "fused",
        "split-k",
        "mixed",
        "unknown",
        "pieces",
        "mixture, few rows",
        "mixture, many rows",
        "mixture, prompt",
        "mixture, unsampled",
        "mixture, unknown sampling",
        "mixture, gated shared expert",
        "latents, few rows",
        "latents, many rows",
        "latents, unsampled",
        "latents of queries",
        "expanded latents",
        "expanded and not",
        "ranks",
        "ranks, rows that are read",
        "ranks, experts",
    ],
)
def test_kernels_find_their_part(sequence: list[tuple[str, str]]) -> None:
    assert parts_of([name for name, _ in sequence]) == [part for _, part in sequence]


def test_products_that_cannot_be_told_apart_are_not_guessed() -> None:
    names = [name for name, _ in LAYER] + [GEMM, GEMM, GEMM] + [name for name, _ in LAYER]
    assert parts_of(names).count("other") == 5


@pytest.mark.parametrize("layer", [FEW_MIXTURE, MANY_MIXTURE, FEW_LATENT, MANY_LATENT])
def test_unknown_kernels_stay_unknown_wherever_they_stand(layer: list[tuple[str, str]]) -> None:
    """Kernels of torch right after unknown ones are unknown, too. All others keep their parts."""
    for at in range(len(layer)):
        for name in ("mystery_kernel", "some_rows_kernel"):
            rest = [*layer[at:], *layer, *HEAD_1]
            if rest[0] == (ADDED, "experts"):
                rest[0] = (ADDED, "other")
            whole = [*INPUTS, *layer[:at], (name, "other"), *rest]
            assert parts_of([name for name, _ in whole]) == [part for _, part in whole]


def test_products_around_a_router_that_cannot_be_told_apart_are_not_guessed() -> None:
    names = [name for name, _ in [*FEW_MIXTURE, *HEAD_1]]
    for landmark, takes in (("router_product_kernel", "o"), ("few_gated_kernel", None)):
        at = names.index(landmark)
        parts = parts_of([*names[:at], GEMM, *names[at:]])
        assert parts[at] == "other" and takes not in parts
        assert parts[at + 1 :] == parts_of(names)[at:]


def test_busy_time_counts_overlap_once() -> None:
    kernels = [Kernel("a", 0, 10), Kernel("b", 5, 10), Kernel("c", 6, 2), Kernel("d", 20, 5)]
    assert busy_us(kernels) == 20 and span_us(kernels) == 25
    assert busy_us([]) == span_us([]) == 0
    assert added_us(kernels) == [10, 5, 0, 5], "without the gap before d"


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
    norm = {"ms": 0.045, "alone_ms": 0.045, "floor_ms": 0.001, "kernels": 3.0}
    assert row["parts"]["norm"] == norm
    assert sum(part["ms"] for part in row["parts"].values()) == pytest.approx(
        row["device_ms"], abs=1e-3
    )
    assert json.loads(json.dumps(row)) == row
    text = table(row)
    assert "decode 1 x 8: wall 0.300 ms" in text and "gate-up" in text and "other" not in text


def test_of_kernels_that_overlap_the_time_alone_adds_up() -> None:
    """Each starts while the one before runs, and the second ends within the first."""
    names = ["gather_inputs_kernel", "rms_norm_kernel", ROW, "router_product_kernel"]
    times = ((0, 30), (5, 10), (8, 42), (60, 15))
    kernels = [Kernel(name, *time) for name, time in zip(names, times, strict=True)]
    floor = dict.fromkeys(PARTS, 0.0)
    row = Measured("decode 1 x 8", 8e-5, 9e-5, Trace(kernels, 0.0), 1, floor).row()
    spent = {name: (part["ms"], part["alone_ms"]) for name, part in row["parts"].items()}
    assert spent["inputs"] == (0.03, 0.03) and spent["norm"] == (0.01, 0.0)
    assert spent["other"] == (0.042, 0.02) and spent["router"] == (0.015, 0.015)
    assert spent["gaps"] == (0.01, 0.01)
    assert sum(alone for _, alone in spent.values()) == pytest.approx(row["device_ms"]) == 0.075
    head, *lines = table(row).splitlines()[1:]
    assert head.split()[:3] == ["part", "ms", "alone"]
    assert lines[0].split() == ["inputs", "0.030", "0.030", "40.0%", "1.0"]
    assert lines[1].split() == ["norm", "0.010", "0.000", "0.0%", "1.0"]


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
    measured = [profiler.prefill(100), profiler.mixed(4, 40), *profiler.decode([1, 4], 40)]
    rows = [each.row() for each in measured]
    names = ["prefill 100", "mixed 4 x 40 + 60", "decode 4 x 40", "decode 1 x 40"]
    assert [row["scenario"] for row in rows] == names
    assert all(row["wall_ms"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert not engine.has_work
    engine.check_integrity()
    assert engine.stats.generation_tokens >= 4 * 9 + 9
