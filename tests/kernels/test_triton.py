"""The Triton kernels against float64, beside their plain-torch twins: no worse than twice the
twin's error.

Without CUDA the kernels run in the interpreter over pairwise samples of odd sizes; on a GPU (marked
gpu) over the full product.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from attention_problem import PagedProblem, paged_problem, pairwise
from torch import Tensor

from pdserve.configs.kv_layout import KVLayout, LayerGroup
from pdserve.engine.memory.kv_cache import TORCH_DTYPES, KVCache
from pdserve.kernels.attention import decode
from pdserve.kernels.attention import triton_ops as attention
from pdserve.kernels.attention.shares import Parts, num_splits
from pdserve.kernels.attention.spec import Paged, Prefills
from pdserve.kernels.attention.tiles import AttentionTiles
from pdserve.kernels.kv.reference import write_kv
from pdserve.kernels.linear import reference as torch_products
from pdserve.kernels.linear import triton_ops as triton_products
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.norm.ops import Activation, Norm
from pdserve.kernels.ops import TORCH, Ops, ops_for, triton_ops

pytestmark = pytest.mark.lengthy

TRITON = triton_ops()
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
interpreted = pytest.mark.skipif(ON_GPU, reason="the full product runs on the GPU instead")

HEADS = [(1, 1), (3, 3), (6, 2), (7, 1), (32, 8), (64, 1)]
MORE_HEADS = [(2, 1), (16, 8), (48, 16), (64, 64)]
HEAD_DIMS = [32, 40, 64, 80, 96, 128, 192, 256]
BLOCK_SIZES = [16, 32, 64, 128]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ATTENTION_SAMPLE = [
    *pairwise(HEADS, HEAD_DIMS, BLOCK_SIZES, DTYPES[:2]),
    *pairwise(HEADS[1:4], HEAD_DIMS[:4], [16], DTYPES[2:])[::3],
    ((64, 64), 40, 16, torch.float32),
    ((48, 16), 32, 32, torch.float16),
]
WIDTHS = [32, 100, 128, 1000, 4096]


def assert_as_good(
    out: Tensor, twin: Tensor, answer: Tensor, roundings: int = 1, terms: int = 1
) -> None:
    """Largest error against float64 at most twice the twin's, over a floor of a quarter of the
    dtype's spacing.

    The interpreter cuts float32 to bf16 where a GPU rounds, so there the floor is 2 spacings. It
    grows with the `roundings` on the way to out, and in float32 with the root of the `terms` of a
    sum: of a few outputs the twin's may happen to be right.
    """
    floor = torch.finfo(out.dtype).eps * max(float(answer.abs().max()), 1.0)
    floor *= roundings * (2 if out.dtype == torch.bfloat16 and not ON_GPU else 0.25)
    if out.dtype == torch.float32:  # a GPU's exp2 and division may each be 2 spacings off
        floor = max(16 * floor, roundings * 2e-6 * max(1.0, terms / 500) ** 0.5)
    error, twin_error = (float((x.double() - answer).abs().max()) for x in (out, twin))
    assert error <= 2 * twin_error + floor, f"error {error}, the twin's {twin_error}"


def check_decode(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype, contexts: list[int]
) -> None:
    problem = paged_problem(heads, head_dim, block_size, dtype, contexts, device=DEVICE)
    out = problem.decode(TRITON.attention)
    assert_as_good(out, problem.decode(TORCH.attention), problem.answer())


def check_prefill(
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    pairs: list[tuple[int, int]],
) -> None:
    """Checks prefill. pairs: (context, queries) of each sequence."""
    contexts, query_lens = [list(x) for x in zip(*pairs, strict=True)]
    problem = paged_problem(
        heads, head_dim, block_size, dtype, contexts, query_lens, padding=7, device=DEVICE
    )
    out = problem.prefill(TRITON.attention)
    assert_as_good(out, problem.prefill(TORCH.attention), problem.answer())
    assert not out[-7:].any()


@pytest.mark.sampled(9)
@interpreted
@pytest.mark.parametrize("heads,head_dim,block_size,dtype", ATTENTION_SAMPLE)
def test_decode_interpreted(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    contexts = (
        [Random().randrange(258, 280), Random().randrange(1, 70), 0] if heads[1] <= 8 else [33]
    )
    check_decode(heads, head_dim, block_size, dtype, contexts)


@pytest.mark.sampled(5)
@interpreted
@pytest.mark.parametrize("heads,head_dim,block_size,dtype", ATTENTION_SAMPLE)
def test_prefill_interpreted(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """A cached prefix with a chunk behind it, a whole prompt, and one query alone."""
    prompt = Random().randrange(2, 40)
    cached = Random().randrange(1, 90)
    pairs = [(cached + 5, 5), (prompt, prompt), (67, 1)] if heads[1] <= 8 else [(40, 9)]
    check_prefill(heads, head_dim, block_size, dtype, pairs)


def parts_of_nan(make: Callable[[Tensor, int], Parts]) -> Callable[[Tensor, int], Parts]:
    def made(q: Tensor, splits: int) -> Parts:
        parts = make(q, splits)
        for memory in (parts.sums, parts.maxima, parts.totals):
            memory.fill_(torch.nan)
        return parts

    return made


@pytest.mark.sampled(7)
@pytest.mark.parametrize("splits", [2, 3, 16])
@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.float32), (64, torch.float16)])
@pytest.mark.parametrize("others", [{}, {"soft_cap": 2.0}, {"sinks": True}], ids=str)
def test_programs_share_the_keys_of_a_short_chunk(
    splits: int,
    block_size: int,
    dtype: torch.dtype,
    others: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some shares have no key: a context may be shorter than there are shares. Their memory, which
    holds NaN here, is not read. The chunk that ends a step of keys has a row whose masked keys are
    all hidden."""
    monkeypatch.setattr(attention, "num_splits", lambda *_: splits)
    monkeypatch.setattr(Parts, "of", staticmethod(parts_of_nan(Parts.of)))
    contexts, query_lens = [700, 5, 64 + 17, 40, 256 + 3], [5, 5, 1, 40, 4]
    problem = paged_problem(
        (8, 2), 64, block_size, dtype, contexts, query_lens, padding=7, device=DEVICE
    )
    problem.soft_cap = others.get("soft_cap")
    if others.get("sinks"):
        problem.sinks = torch.randn(8, device=DEVICE)
    out = problem.prefill(TRITON.attention)
    assert_as_good(out, problem.prefill(TORCH.attention), problem.answer())
    assert not out[-7:].any()


def test_short_chunks_deep_in_a_prompt_fill_the_device() -> None:
    """256 rows of an 8B model are 128 tiles, which two programs each fill; fresh prompts, long
    chunks and windows need none."""
    plain = paged_problem((32, 8), 128, 64, torch.bfloat16, [64]).spec
    assert num_splits(128, 14_000, plain, 132) == 2
    assert num_splits(32, 14_000, plain, 132) == 8
    assert num_splits(192, 14_000, plain, 132) == 4, "three rounds, nearly full"
    assert num_splits(260, 14_000, plain, 132) == 1, "one round, nearly full"
    assert num_splits(8, 140_000, plain, 132) == num_splits(8, 16_384, plain, 132) == 15
    assert num_splits(32, 2_100, plain, 132) == 2, "fewer keys cost more to merge than to read"
    assert num_splits(32, 512, plain, 132) == num_splits(256, 14_000, plain, 132) == 1
    assert num_splits(32, 14_000, replace(plain, window=4096), 132) == 1
    assert num_splits(32, 14_000, plain, 132, skip=2048) == 1


def test_the_start_compiles_all_kernels_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of rows has its tiles, and programs may share the keys of one. To compile such a
    kernel takes seconds, in which the engine does nothing else."""
    launched: set[tuple[AttentionTiles, bool]] = set()
    monkeypatch.setattr(
        attention, "launch_prefill", lambda *given: launched.add((given[4], given[-1] > 1))
    )
    monkeypatch.setattr(attention, "num_sms", lambda device: 132)
    spec = paged_problem((32, 8), 128, 64, torch.bfloat16, [64]).spec
    kv = torch.empty(256, 8, 2, 64, 128, dtype=torch.bfloat16)
    tables = torch.zeros(8, 256, dtype=torch.int32)
    q, k, v = (torch.empty(8192, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8))

    def prefills(past: int, length: int, num_seqs: int) -> Prefills:
        rows = torch.arange(num_seqs, dtype=torch.int32)
        lens = torch.full((num_seqs,), past + length, dtype=torch.int32)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * length
        return Prefills(Paged(tables, rows, lens, past + length), starts, length)

    attention.warm_prefill(q, k, v, kv, tables, spec)
    warmed = set(launched)
    assert len(warmed) == 3
    for past, length, num_seqs in product((0, 4000, 12_000), (64, 300, 512, 2000, 3207), (1, 2)):
        attention.paged_prefill(q[: num_seqs * length], kv, prefills(past, length, num_seqs), spec)
    out = torch.empty_like(q)
    for skip in (1024, 7168):  # what is left of a chunk when cuDNN has taken its first rows
        attention._launch(q, kv, prefills(8192, 8000, 1), spec, out, 8000, skip, None)
    assert launched == warmed


def test_masked_keys_lose_to_the_lowest_scores() -> None:
    prefill = paged_problem((4, 2), 64, 16, torch.float32, [70, 20], [70, 20], device=DEVICE)
    prefill.make_all_scores(-50000.0)
    out, twin = (prefill.prefill(ops.attention) for ops in (TRITON, TORCH))
    assert_as_good(out, twin, prefill.answer())
    decode = paged_problem((4, 2), 64, 16, torch.float32, [300, 20], device=DEVICE)
    decode.make_all_scores(-50000.0)
    out, twin = (decode.decode(ops.attention) for ops in (TRITON, TORCH))
    assert_as_good(out, twin, decode.answer())


WINDOWS: list[tuple[int | None, float | None]] = [
    (1, None),
    (17, None),
    (64, 20.0),
    (300, 5.0),
    (None, 5.0),
]


@pytest.mark.sampled(6)
@interpreted
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("window,soft_cap", WINDOWS)
def test_windows_and_soft_caps_interpreted(
    window: int | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    check_windows((6, 2), 40, 16, dtype, window, soft_cap)


@pytest.mark.sampled(4)
@interpreted
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("window", [None, 17, 300])
def test_sinks_interpreted(window: int | None, dtype: torch.dtype) -> None:
    check_windows((6, 2), 40, 16, dtype, window, None, has_sinks=True)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 17, 128])
@pytest.mark.parametrize("head_dim,dtype", product([64, 128], DTYPES))
def test_sinks_full_product(head_dim: int, dtype: torch.dtype, window: int | None) -> None:
    for heads, block_size in product([(6, 2), (64, 8)], [16, 128]):
        shape = heads, head_dim, block_size, dtype
        check_windows(*shape, window, None, more=[3000], has_sinks=True)


@pytest.mark.gpu
@pytest.mark.parametrize("window,soft_cap", [*WINDOWS, (1000, 50.0)])
@pytest.mark.parametrize("head_dim,dtype", product([40, 64, 128, 256], DTYPES))
def test_windows_and_soft_caps_full_product(
    head_dim: int, dtype: torch.dtype, window: int | None, soft_cap: float | None
) -> None:
    for heads, block_size in product([(6, 2), (32, 8)], [16, 128]):
        check_windows(heads, head_dim, block_size, dtype, window, soft_cap, more=[3000])


def check_windows(
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    soft_cap: float | None,
    more: Sequence[int] = (),
    has_sinks: bool = False,
) -> None:
    """Windows shorter and longer than contexts, tiles and chunks; keys that no query sees are as
    if never written."""
    shape = heads, head_dim, block_size, dtype
    sinks = torch.linspace(-1.0, 6.0, heads[0], device=DEVICE) if has_sinks else None
    problem = paged_problem(*shape, [1, 40, 129, 0, 280, *more], device=DEVICE)
    problem.sinks = sinks
    check_window(problem, window, soft_cap, lambda ops: problem.decode(ops.attention))
    pairs = [(20, 20), (150, 7), (130, 130), (67, 1), *((length, length // 2) for length in more)]
    contexts, query_lens = [list(x) for x in zip(*pairs, strict=True)]
    prompts = paged_problem(*shape, contexts, query_lens, 5, device=DEVICE)
    prompts.sinks = sinks
    check_window(prompts, window, soft_cap, lambda ops: prompts.prefill(ops.attention))


def check_window(
    problem: PagedProblem,
    window: int | None,
    soft_cap: float | None,
    run: Callable[[Ops], Tensor],
) -> None:
    problem.window, problem.soft_cap = window, soft_cap
    problem.q.mul_(3)  # scores that a cap changes
    if window is not None:
        for seq, (context, queries) in enumerate(
            zip(problem.context_lens.tolist(), problem.query_lens, strict=True)
        ):
            table = problem.block_tables[problem.table_rows[seq]]
            block_size = problem.kv.shape[3]
            for block in range(max(context - queries - window + 1, 0) // block_size):
                problem.kv[table[block]] = float("nan")  # given up
    twin = run(TORCH)
    assert twin.isfinite().all()
    assert_as_good(run(TRITON), twin, problem.answer(), 2, 500 * 25 if soft_cap else 1)
    plain = replace(problem, window=None, soft_cap=None, sinks=None)
    if window is None or window < 100 or problem.sinks is not None:
        assert not torch.allclose(plain.answer().nan_to_num(9.0), problem.answer(), atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim,dtype", product([*HEAD_DIMS, 72, 112], DTYPES))
def test_decode_full_product(head_dim: int, dtype: torch.dtype) -> None:
    for heads, block_size in product(HEADS + MORE_HEADS, BLOCK_SIZES):
        check_decode(heads, head_dim, block_size, dtype, [1, 700, 0, 4097, block_size, 129])
        check_decode(
            heads, head_dim, block_size, dtype, [Random().randrange(1, 250) for _ in range(6)]
        )


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim,dtype", product([*HEAD_DIMS, 72, 112], DTYPES))
def test_prefill_full_product(head_dim: int, dtype: torch.dtype) -> None:
    for heads, block_size in product(HEADS + MORE_HEADS, BLOCK_SIZES):
        cached = Random().randrange(1, 600)
        check_prefill(
            heads,
            head_dim,
            block_size,
            dtype,
            [(cached + 50, 50), (300, 300), (513, 1), (16, 16), (1, 1)],
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, width, device=DEVICE).to(dtype)
    weight = torch.randn(width, device=DEVICE).to(dtype)
    wide = x.double()
    answer = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert_as_good(
        TRITON.norm.rms_norm(x, Norm(weight, 1e-5)),
        TORCH.norm.rms_norm(x, Norm(weight, 1e-5)),
        answer,
    )


def test_norm_of_heads_inside_a_fused_projection() -> None:
    fused = torch.randn(5, 12, 40, device=DEVICE)
    norm = Norm(torch.randn(40, device=DEVICE), 1e-6)
    for rows in (fused[:, 3:10], fused[0, 0]):
        torch.testing.assert_close(
            TRITON.norm.rms_norm(rows, norm), TORCH.norm.rms_norm(rows, norm)
        )


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "heads,head_dim,block_size,dtype",
    pairwise([*HEADS, *MORE_HEADS, (22, 11)], HEAD_DIMS, BLOCK_SIZES, DTYPES),
)
def test_rope_write_kv(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Heads are slices of a fused projection; only the given slots of one layer change."""
    num_heads, num_kv_heads = heads
    fused = torch.randn(4, num_heads + 2 * num_kv_heads, head_dim, device=DEVICE).to(dtype)
    angles = torch.rand(50, head_dim // 2, device=DEVICE, dtype=torch.float64) * 6
    cos = angles.cos().float()
    sin = angles.sin().float()
    positions = torch.randint(0, 50, (4,), device=DEVICE)
    q, k, v = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    v_before = v.clone()
    first, second = torch.cat((q, k), 1).double().chunk(2, -1)
    c = angles.cos()[positions, None]
    s = angles.sin()[positions, None]
    answer = torch.cat((first * c - second * s, second * c + first * s), -1)
    pool = torch.randn(3, num_kv_heads, 3, 2, block_size, head_dim, device=DEVICE).to(dtype)
    want = pool.clone()
    twin_pool = pool.clone()
    slots = torch.randperm(3 * block_size, device=DEVICE)[:4]
    *twin, _ = TORCH.kv.rope_write_kv(q, k, v, cos, sin, positions, twin_pool[:, :, 1], slots)

    q, k, _ = TRITON.kv.rope_write_kv(q, k, v, cos, sin, positions, pool[:, :, 1], slots)
    assert_as_good(torch.cat((q, k), 1), torch.cat(twin, 1), answer)
    assert torch.equal(v, v_before)
    write_kv(k, v, want[:, :, 1], slots)
    assert torch.equal(pool, want)
    assert torch.equal(pool[slots // block_size, :, 1, 0, slots % block_size], k)
    assert torch.equal(twin_pool[slots // block_size, :, 1, 1, slots % block_size], v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_by_one_and_a_weight(dtype: torch.dtype) -> None:
    x = torch.randn(5, 1000, device=DEVICE).to(dtype)
    norm = Norm((torch.randn(1000, device=DEVICE) / 4).to(dtype), 1e-5, plus_one=True)
    wide = x.double()
    answer = (
        wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (1 + norm.weight.double())
    )
    assert_as_good(TRITON.norm.rms_norm(x, norm), TORCH.norm.rms_norm(x, norm), answer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 1024, 1500])
def test_gate_by_gelu(width: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 2 * width, device=DEVICE) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    answer = torch.nn.functional.gelu(gate, approximate="tanh") * up
    kind: Activation = "gelu_tanh"
    assert_as_good(TRITON.norm.gate(gate_up, kind), TORCH.norm.gate(gate_up, kind), answer, 8)


@pytest.mark.parametrize("num_rows", [1, 5, 80])
def test_what_is_added_may_be_normed_before(num_rows: int) -> None:
    x, stream = torch.randn(2, num_rows, 96, device=DEVICE).unbind()
    m = Matrix(torch.randn(96, 96, device=DEVICE))
    norm = Norm(torch.randn(96, device=DEVICE), 1e-6)
    twin = torch_products.add_linear(stream.clone(), x, m, norm)
    torch.testing.assert_close(triton_products.add_linear(stream, x, m, norm), twin)


@pytest.mark.parametrize("num_rows", [1, 5, 80])
def test_a_gate_by_gelu_after_a_product(num_rows: int) -> None:
    x = torch.randn(num_rows, 96, device=DEVICE).half()
    m = Matrix(torch.randn(64, 96, device=DEVICE).half() / 10)
    norm = Norm(torch.randn(96, device=DEVICE).half(), 1e-6)
    [ours, _], [twin, _] = (
        products.norm_gated(x, norm, m, "gelu_tanh")
        for products in (triton_products, torch_products)
    )
    torch.testing.assert_close(ours, twin, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 1024, 1500])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 2 * width, device=DEVICE) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert_as_good(
        TRITON.norm.gate(gate_up, "silu"),
        TORCH.norm.gate(gate_up, "silu"),
        gate / (1 + (-gate).exp()) * up,
    )


def check_products(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, bias: bool
) -> None:
    """Checks linear, linear_into, add_linear, and both products after a norm."""
    x = torch.randn(num_rows, num_inputs, device=DEVICE).to(dtype) * 3
    norm, row = (torch.randn(width, device=DEVICE).to(dtype) for width in (num_inputs, num_outputs))
    weight = (torch.randn(num_outputs, num_inputs, device=DEVICE) * num_inputs**-0.5).to(dtype)
    m = Matrix(weight, row if bias else None)
    answer = x.double() @ weight.double().T + (row.double() if bias else 0)
    ours, twin = (products.linear(x, m) for products in (triton_products, torch_products))
    assert_as_good(ours, twin, answer, terms=num_inputs)
    written = torch.zeros(num_rows, num_outputs + 2, device=DEVICE, dtype=dtype)
    triton_products.linear_into(x, m, written[:, :num_outputs])
    assert_as_good(written[:, :num_outputs], twin, answer, terms=num_inputs)
    assert not written[:, num_outputs:].any()
    stream = torch.randn(num_rows, num_outputs, device=DEVICE).to(dtype)
    answer += stream.double()
    twin = torch_products.add_linear(stream.clone(), x, m)
    assert_as_good(triton_products.add_linear(stream, x, m), twin, answer, 2, num_inputs)

    wide = x.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.double()
    answer = normed @ weight.double().T + (row.double() if bias else 0)
    stored = Norm(norm, 1e-5)
    [ours, _], [twin, _] = (
        products.norm_linear(x, stored, m) for products in (triton_products, torch_products)
    )
    assert_as_good(ours, twin, answer, 4, num_inputs)
    gate, up = answer.chunk(2, -1)
    [ours, _], [twin, _] = (
        products.norm_gated(x, stored, m, "silu") for products in (triton_products, torch_products)
    )
    assert_as_good(ours, twin, gate / (1 + (-gate).exp()) * up, 8, num_inputs)


PRODUCT_ROWS = [1, 2, 3, 16, 17, 33, 64, 65]
PRODUCT_INPUTS = [16, 80, 100, 1040, 2096]
PRODUCT_OUTPUTS = [2, 48, 134]


@pytest.mark.sampled(5)
@interpreted
@pytest.mark.parametrize(
    "num_rows,num_inputs,num_outputs,dtype,bias",
    pairwise(PRODUCT_ROWS, PRODUCT_INPUTS, PRODUCT_OUTPUTS, DTYPES, [True, False]),
)
def test_products_interpreted(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, bias: bool
) -> None:
    check_products(num_rows, num_inputs, num_outputs, dtype, bias)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "num_inputs,dtype", product([*PRODUCT_INPUTS, 896, 4096, 14336, 18944], DTYPES)
)
def test_products_full_product(num_inputs: int, dtype: torch.dtype) -> None:
    for num_rows, num_outputs, bias in product(
        PRODUCT_ROWS, [*PRODUCT_OUTPUTS, 4096, 6150], [True, False]
    ):
        check_products(num_rows, num_inputs, num_outputs, dtype, bias)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_products_of_slices(num_rows: int) -> None:
    """Rows of a wider tensor, and weights that are not contiguous."""
    x = torch.randn(num_rows, 3, 64, device=DEVICE).half()[:, 1]
    weight = torch.randn(2, 40, 64, device=DEVICE).half().transpose(0, 1)[:, 1]
    want = x.float() @ weight.float().T
    for matrix in (Matrix(weight), Matrix(weight.contiguous())):
        got = triton_products.linear(x, matrix).float()
        torch.testing.assert_close(got, want, atol=0.05, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks(dtype: torch.dtype) -> None:
    pool = torch.randn(9, 3, 2, 2, 16, 40, device=DEVICE).to(dtype)
    want = pool.clone()
    src = torch.tensor([2, 7, 2], device=DEVICE)
    dst = torch.tensor([0, 8, 5], device=DEVICE)
    TRITON.kv.copy_blocks(pool, src, dst)
    TORCH.kv.copy_blocks(want, src, dst)
    assert torch.equal(pool, want)
    assert torch.equal(pool[5], pool[2])


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_layers_of_a_cache_of_several_groups(dtype: torch.dtype) -> None:
    """As of a cache of one: a layer whose blocks stand between those of other rows, and end where
    no multiple of theirs does."""
    names = {value: name for name, value in TORCH_DTYPES.items()}
    groups = tuple(
        LayerGroup(layers=layers, heads=(0, 1), row_width=width, dtype=names[dtype])
        for layers, width in (((0,), 8), ((1, 3), 40), ((2,), 16))
    )
    layout = KVLayout(groups=groups, block_size=16)
    decodes = paged_problem((6, 2), 40, 16, dtype, [70, 5], device=DEVICE)
    prefills = paged_problem((6, 2), 40, 16, dtype, [70, 20], [9, 20], device=DEVICE)
    for problem, run in ((decodes, decodes.decode), (prefills, prefills.prefill)):
        alone = [run(ops.attention) for ops in (TRITON, TORCH)]
        nan = torch.full((len(problem.kv), layout.block_bytes), 255, dtype=torch.uint8)
        cache = KVCache(nan.to(DEVICE), layout)
        cache.layers[3].copy_(problem.kv)
        problem.kv = cache.layers[3]
        for ops, out in zip((TRITON, TORCH), alone, strict=True):
            assert torch.equal(run(ops.attention), out)


@pytest.mark.parametrize("sizes", [(16, 64), (128, 16)])
def test_rows_of_several_groups_are_repacked_and_written(sizes: tuple[int, int]) -> None:
    groups = tuple(
        LayerGroup(layers=layers, heads=(0, 1), row_width=width)
        for layers, width in (((0,), 12), ((1, 2), 40))
    )
    source, *targets = (
        KVCache(torch.rand(20, layout.block_bytes // 4, device=DEVICE), layout)
        for layout in (KVLayout(groups=groups, block_size=size) for size in (*sizes, sizes[1]))
    )
    targets[1].data.copy_(targets[0].data)
    num_rows = 2 * max(sizes)
    sources, blocks = (
        torch.randperm(20, dtype=torch.int32, device=DEVICE)[: num_rows // size] for size in sizes
    )
    k, v = (torch.rand(10, 2, 40, device=DEVICE) for _ in range(2))
    tables = torch.ones(10, 20, device=DEVICE), torch.zeros(10, 20, device=DEVICE)
    positions = torch.arange(10, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(10, device=DEVICE) + 3 * sizes[1] + 5
    for ops, target in zip((TRITON, TORCH), targets, strict=True):
        for there, here in zip(source.groups, target.groups, strict=True):
            ops.kv.repack(there, sources, here, blocks, 0, num_rows)
            moved, wanted = (
                rows[ids.long()].movedim(4, 1).flatten(0, 1)
                for rows, ids in ((here, blocks), (there, sources))
            )
            assert torch.equal(moved, wanted)
        q = torch.zeros(10, 4, 40, device=DEVICE)
        ops.kv.rope_write_kv(q, k.clone(), v, *tables, positions, target.layers[1], slots)
    assert torch.equal(targets[0].data, targets[1].data)


@pytest.mark.parametrize(("num_rows", "block_size"), [(1, 16), (130, 32), (700, 128)])
def test_batch_state(num_rows: int, block_size: int) -> None:
    """Exact against the twins: changes of tables, inputs by slot, tokens fed back."""
    generator = torch.Generator().manual_seed(num_rows)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32).to(DEVICE)

    tables = integers(10**6, 9, 50)
    last_token = integers(128_000, 9)
    slots = integers(9, num_rows)
    positions = integers(50 * block_size, num_rows)
    ids = integers(128_000, num_rows) - 64_000  # half of them negative
    chosen = torch.randperm(9 * 50, generator=generator)[:200].to(DEVICE)
    changes = torch.stack([chosen // 50, chosen % 50, integers(10**6, 200)]).to(torch.int32)
    want = tables.clone()
    TORCH.batch.update_tables(want, changes)
    TRITON.batch.update_tables(tables, changes)
    assert torch.equal(tables, want)
    got = TRITON.batch.gather_inputs(ids, positions, slots, last_token, tables, block_size)
    for a, b in zip(
        got,
        TORCH.batch.gather_inputs(ids, positions, slots, last_token, tables, block_size),
        strict=True,
    ):
        assert a.dtype == b.dtype and torch.equal(a, b)
    some = torch.randperm(9, generator=generator)[:5].to(DEVICE, torch.int32)
    sampled = integers(128_000, 5)
    want = last_token.clone()
    TORCH.batch.store_tokens(want, some, sampled)
    TRITON.batch.store_tokens(last_token, some, sampled)
    assert torch.equal(last_token, want)


def test_blocks_beyond_two_to_the_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """All the KV of a sequence lies past 2 ** 31 elements of a KV cache, of which only those pages
    are ever touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    num_blocks = 2**31 // (2 * 16 * 64) + 4
    pool = torch.empty(num_blocks, 1, 1, 2, 16, 64, dtype=torch.float16, device=DEVICE)
    kv = pool[:, :, 0]
    block = num_blocks - 2
    k, v, q = (torch.randn(16, heads, 64, device=DEVICE).half() for heads in (1, 1, 4))
    positions = torch.arange(16, device=DEVICE)
    slots = block * 16 + torch.arange(16, device=DEVICE)
    ones = torch.ones(16, 32, device=DEVICE)
    zeros = torch.zeros(16, 32, device=DEVICE)
    TRITON.kv.rope_write_kv(q, k, v, ones, zeros, positions, kv, slots)
    assert torch.equal(kv[block, 0, 0], k[:, 0])
    TRITON.kv.copy_blocks(
        pool, torch.tensor([block], device=DEVICE), torch.tensor([block + 1], device=DEVICE)
    )
    assert torch.equal(pool[block + 1], pool[block])

    table, rows, lens = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([[block + 1]], [0], [16])
    )
    starts = torch.tensor([0, 16], dtype=torch.int32, device=DEVICE)
    problem = PagedProblem(q, kv, table, rows, lens, starts, 16, 0.125, [k], [v])
    out = problem.prefill(TRITON.attention)
    assert_as_good(out, problem.prefill(TORCH.attention), problem.answer())
    last = TRITON.attention.decode(q[-1:], kv, problem.paged, problem.spec)
    torch.testing.assert_close(last, out[-1:], atol=2e-3, rtol=0)


def test_empty_batches_launch_nothing() -> None:
    problem = paged_problem((4, 2), 32, 16, torch.float32, [5], device=DEVICE)
    none = torch.empty(0, 4, 32, device=DEVICE)
    paged = Paged(problem.block_tables, problem.table_rows[:0], problem.context_lens[:0], 0)
    out = TRITON.attention.decode(none, problem.kv, paged, problem.spec)
    assert out.shape == none.shape
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    table = torch.empty(1, 16, device=DEVICE)
    TRITON.kv.rope_write_kv(none, none[:, :2], none[:, :2], table, table, slots, problem.kv, slots)
    TRITON.kv.copy_blocks(torch.empty(3, 4, device=DEVICE), slots, slots)
    assert TRITON.norm.gate(torch.empty(0, 8, device=DEVICE), "silu").shape == (0, 4)


@pytest.mark.parametrize("ops", [TRITON, TORCH], ids=["triton", "reference"])
def test_attention_writes_where_it_is_told(ops: Ops) -> None:
    """Attention writes to rows of a larger tensor, including padding rows, and to no others."""
    decode = paged_problem((6, 2), 40, 16, torch.float32, [1, 33, 70], device=DEVICE)
    prefill = paged_problem(
        (6, 2), 40, 16, torch.float32, [20, 37], [7, 37], padding=3, device=DEVICE
    )
    out = torch.full((52, 6, 40), 7.0, device=DEVICE)
    assert decode.decode(ops.attention, out[1:4]).data_ptr() == out[1].data_ptr()
    assert prefill.prefill(ops.attention, out[4:51]).data_ptr() == out[4].data_ptr()
    assert torch.equal(out[1:4], decode.decode(ops.attention))
    assert torch.equal(out[4:51], prefill.prefill(ops.attention))
    assert (out[[0, 51]] == 7.0).all()


def test_wrong_layouts_are_refused() -> None:
    problem = paged_problem((4, 2), 32, 16, torch.float32, [5], device=DEVICE)
    q, kv, paged, spec = problem.q, problem.kv, problem.paged, problem.spec
    run = TRITON.attention.decode
    with pytest.raises(ValueError, match="q must have"):
        run(q[:, :3], kv, paged, spec)
    with pytest.raises(ValueError, match="kv must be"):
        run(q, kv.transpose(3, 4), paged, spec)
    with pytest.raises(ValueError, match="q has stride"):
        run(q.transpose(1, 2).contiguous().transpose(1, 2), kv, paged, spec)
    with pytest.raises(ValueError, match="kv_cache must be contiguous"):
        TRITON.kv.copy_blocks(kv, problem.table_rows, problem.table_rows)
    for wrong in (q.half(), q[:0], torch.empty(1, 32, 4, device=DEVICE).transpose(1, 2)):
        with pytest.raises(ValueError, match="out must be contiguous"):
            run(q, kv, paged, spec, wrong)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("max_context_len", [300, 131072])
@pytest.mark.parametrize(
    "contexts", [[300], [1, 64, 65], [0, 0, 128, 1], [2] * 7, [0], [300, *[0] * 20]]
)
def test_decode_for_any_shares(contexts: list[int], max_context_len: int) -> None:
    """Shares that end inside, at the end of and across the contexts; a grid for far longer ones
    changes nothing."""
    problem = paged_problem((6, 3), 64, 16, torch.float32, contexts, device=DEVICE)
    paged = replace(problem.paged, longest=max_context_len)
    out = TRITON.attention.decode(problem.q, problem.kv, paged, problem.spec)
    assert_as_good(out, problem.decode(TORCH.attention), problem.answer())


def test_number_of_decode_programs() -> None:
    """Resident at once, none without a share, never none."""
    num_programs = decode.num_decode_programs
    share = decode.MIN_SHARE.value
    assert num_programs(8, 131072, 64, 132) == 132 * decode.PROGRAMS_PER_SM
    assert num_programs(8, 128, 64, 132) == 8 * (2 + decode.ITEM_COST.value) // share
    assert 1 <= num_programs(1, 0, 64, 132) <= 2


def test_ops_for_chooses_by_device() -> None:
    assert ops_for(torch.device("cpu")) is TORCH
    assert ops_for(torch.device("cuda")) == TRITON
    with pytest.raises(ValueError, match="device must be"):
        ops_for(torch.device("meta"))


@pytest.mark.gpu
def test_attention_in_a_cuda_graph_follows_its_inputs() -> None:
    """One capture, replayed for other contexts; no op waits for the device."""
    problem = paged_problem((8, 2), 128, 16, torch.bfloat16, [900, 30, 512], device=DEVICE)
    args = problem.q, problem.kv, replace(problem.paged, longest=4096), problem.spec
    TRITON.attention.decode(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = TRITON.attention.decode(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for lens in ([900, 30, 512], [1, 17, 300], [0, 30, 0]):
        problem.context_lens.copy_(torch.tensor(lens))
        problem.keys = [k[:length] for k, length in zip(problem.keys, lens, strict=True)]
        problem.values = [v[:length] for v, length in zip(problem.values, lens, strict=True)]
        graph.replay()
        assert_as_good(out, problem.decode(TORCH.attention), problem.answer())
