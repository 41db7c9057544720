"""The kernels of a KV cache in e4m3, compiled for a GPU that need not be there. They load codes in
pieces of 16 bytes, cast them by instructions, and keep nothing in local memory."""

from typing import Any

import pytest
from compiled import ptx

pytestmark = pytest.mark.processes

ROWS = ["q", "k", "v", "out", "gathered"]
FLOATS = ["cos", "sin", "k_scale", "v_scale", "partial", "max", "sum", "sink"]
KINDS = (
    {f"{name}_ptr": "*bf16" for name in ROWS}
    | {f"{name}_ptr": "*fp32" for name in FLOATS}
    | {"kv_ptr": "*fp8e4nv", "slot_mapping_ptr": "*i64", "q_eps": "fp32", "k_eps": "fp32"}
    | {"scale_log2": "fp32", "cap": "fp32"}
)
STRIDES = [f"stride_{x}_{of}" for x in "qkv" for of in ("token", "head")]
STRIDES += ["stride_q_seq", "stride_block", "stride_kv_head", "stride_plane"]
PARTS = ["partial_ptr", "max_ptr", "sum_ptr"]
HEAD = {"HEAD_DIM": 128, "BLOCK_D": 128}
ATTENTION = HEAD | {"BLOCK_N": 64, "CAPPED": False}
# sinks come with windows, as gpt-oss has them
KINDS_OF_ROWS = [{"WINDOW": False, "sink_ptr": None}, {"WINDOW": True}]
by_kind = pytest.mark.parametrize("kind", KINDS_OF_ROWS, ids=["plain", "sinks"])


def compiled(kernel: str, constants: dict[str, Any], num_warps: int = 4) -> str:
    said = ptx(f"pdserve.kernels.{kernel}", constants, KINDS, num_warps, STRIDES)
    assert ".local" not in said
    return said


def test_rows_are_rounded_by_instructions() -> None:
    constants: dict[str, Any] = {"HALF": 64, "BLOCK_HALF": 64, "Q_HEADS": 16, "KV_HEADS": 8}
    constants |= {"Q_PLUS_ONE": False, "K_PLUS_ONE": False, "PDL": True}
    constants |= {"q_norm_ptr": None, "k_norm_ptr": None}
    said = compiled("kv.cache_rows:rope_write_kv_kernel", constants)
    assert "cvt.rn.satfinite.e4m3x2.f32" in said and "cvt.rn.f16x2.e4m3x2" in said
    assert "min.NaN.xorsign.abs.f32" in said, "a NaN would become the largest number"


@by_kind
def test_decode_reads_codes(kind: dict[str, Any]) -> None:
    constants = ATTENTION | kind | {"BLOCK_M": 16, "BLOCK_S": 32, "PDL": True}
    said = compiled("attention.decode:decode_kernel", constants)
    assert "cp.async.cg.shared.global" in said and "cvt.rn.f16x2.e4m3x2" in said
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in said
    assert "ld.shared.b8" not in said and "ld.shared.u8" not in said
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in said, "V is loaded byte by byte"


@pytest.mark.parametrize("head_dim", [16, 32, 64, 256])
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_heads_of_other_widths_compile(kernel: str, head_dim: int) -> None:
    constants: dict[str, Any] = {"HEAD_DIM": head_dim, "BLOCK_D": head_dim, "BLOCK_N": 32}
    constants |= {"CAPPED": False, "WINDOW": False, "sink_ptr": None}
    if kernel == "decode":
        constants |= {"BLOCK_M": 16, "BLOCK_S": 32, "PDL": True}
    else:
        constants |= {"BLOCK_M": 64, "kv_matrix": None, **dict.fromkeys(PARTS)}
    assert "cvt.rn.f16x2.e4m3x2" in compiled(f"attention.{kernel}:{kernel}_kernel", constants)


@by_kind
@pytest.mark.parametrize("is_shared", [False, True])
def test_prefill_reads_codes(kind: dict[str, Any], is_shared: bool) -> None:
    constants = ATTENTION | kind | {"BLOCK_M": 128, "kv_matrix": None}
    # programs share no keys where there is a window
    constants |= {"WINDOW": False} if is_shared else dict.fromkeys(PARTS)
    said = compiled("attention.prefill:prefill_kernel", constants, 8)
    assert "cp.async.cg.shared.global" in said and "cvt.rn.f16x2.e4m3x2" in said
    assert "wgmma.mma_async" in said and ".f16.f16" in said


def test_what_shares_of_keys_have_found_is_merged() -> None:
    said = compiled("attention.shares:merge_rows_kernel", HEAD | {"ROWS": 8})
    assert "ld.global.v4.b32" in said and "ex2.approx" in said


def test_gather_reads_codes() -> None:
    said = compiled("kv.cache_rows:gather_kv_kernel", HEAD | {"ROWS": 32})
    assert "ld.global.v4.b32" in said and "cvt.rn.f16x2.e4m3x2" in said
    assert "st.global.v4.b32" in said
