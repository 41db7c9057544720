"""Tests norms of heads inside the rotation. Triton and its plain-torch twin are compared with
float64, and with a separate norm before a rotation that has none."""

from typing import Any, NamedTuple

import pytest
import torch
from compiled import ptx
from torch import Tensor

from pdserve.kernels.kv.ops import HeadNorms, KVOps
from pdserve.kernels.norm.ops import Norm
from pdserve.kernels.ops import TORCH, Ops, triton_ops

pytestmark = pytest.mark.lengthy

TRITON = triton_ops()
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BLOCK_SIZE = 16
NUM_TOKENS = 5
MANY_HEADS = (64, 33)  # several programs of queries, and of keys
# heads of q and of k, head_dim, dtype; 24, 80 and 96 are no powers of two
CASES = [
    ((6, 2), 80, torch.float32),
    ((1, 1), 24, torch.float32),
    ((7, 1), 256, torch.float32),
    (MANY_HEADS, 96, torch.float32),
    ((6, 2), 80, torch.float16),
    ((32, 8), 128, torch.float16),
    ((6, 2), 80, torch.bfloat16),
    ((32, 4), 128, torch.bfloat16),
]
cases = pytest.mark.parametrize(("heads", "head_dim", "dtype"), CASES)
plus_ones = pytest.mark.parametrize("plus_one", [False, True])


class Problem(NamedTuple):
    """The inputs of one test.

    q, k, v: slices of a fused projection.
    angles: float64 [max_pos, D // 2].
    pool: [blocks, Hk, layers, 2, block_size, D]; the rows go to layer 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    angles: Tensor
    positions: Tensor
    pool: Tensor
    slots: Tensor
    norms: HeadNorms

    def run(self, ops: KVOps, norms: HeadNorms | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q and k, normed and rotated, and the pool. The inputs stay as they are."""
        pool = self.pool.clone()
        fused = torch.cat((self.q, self.k, self.v), 1)
        q, k, v = fused.split([x.shape[1] for x in (self.q, self.k, self.v)], 1)
        tables = self.angles.cos().float(), self.angles.sin().float()
        q, k, _ = ops.rope_write_kv(
            q, k, v, *tables, self.positions, pool[:, :, 1], self.slots, norms
        )
        assert torch.equal(fused[:, -v.shape[1] :], self.v)
        return q, k, pool

    def by_hand(self) -> tuple[Tensor, Tensor]:
        """Computes the answer in float64, without rounding on the way."""
        cos, sin = self.angles.cos()[self.positions, None], self.angles.sin()[self.positions, None]

        def rotated(x: Tensor, norm: Norm) -> Tensor:
            wide = x.double()
            weight = norm.weight.double() + norm.plus_one
            length = (wide.square().sum(-1, keepdim=True) / x.shape[-1] + norm.eps).sqrt()
            first, second = (wide / length * weight).chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        return rotated(self.q, self.norms.q), rotated(self.k, self.norms.k)


def problem(
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    plus_one: bool | tuple[bool, bool] = False,
) -> Problem:
    """Heads of very different lengths; small ones show eps, which differs between q and k."""
    generator = torch.Generator().manual_seed(head_dim + sum(heads))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_heads, num_kv_heads = heads
    fused = draw(NUM_TOKENS, num_heads + 2 * num_kv_heads, head_dim)
    fused *= 4.0 ** torch.randint(-3, 4, fused.shape[:2], generator=generator)[..., None]
    q, k, v = fused.to(DEVICE, dtype).split((num_heads, num_kv_heads, num_kv_heads), 1)
    by_q, by_k = (plus_one, plus_one) if isinstance(plus_one, bool) else plus_one
    weights = [draw(head_dim).to(DEVICE, dtype) for _ in range(2)]
    return Problem(
        q,
        k,
        v,
        (torch.rand(50, head_dim // 2, generator=generator, dtype=torch.float64) * 6).to(DEVICE),
        torch.randint(50, (NUM_TOKENS,), generator=generator).to(DEVICE),
        draw(3, num_kv_heads, 3, 2, BLOCK_SIZE, head_dim).to(DEVICE, dtype),
        torch.randperm(3 * BLOCK_SIZE, generator=generator)[:NUM_TOKENS].to(DEVICE),
        HeadNorms(Norm(weights[0], 1e-3, by_q), Norm(weights[1], 2e-2, by_k)),
    )


def tolerance(answer: Tensor, dtype: torch.dtype) -> float:
    """Three roundings to nearest of the largest number; the interpreter cuts to bfloat16, which is
    twice as far off."""
    roundings = 6 if dtype == torch.bfloat16 and not ON_GPU else 3
    floor = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2 * roundings
    return floor * float(answer.abs().max())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ops", [TRITON, TORCH], ids=["triton", "reference"])
@plus_ones
@cases
def test_they_equal_a_computation_by_hand(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, plus_one: bool, ops: Ops
) -> None:
    """Only the given slots of one layer change."""
    given = problem(heads, head_dim, dtype, plus_one)
    q, k, pool = given.run(ops.kv, given.norms)
    for mine, answer in zip((q, k), given.by_hand(), strict=True):
        assert mine.shape == answer.shape and mine.dtype == dtype
        error = float((mine.double() - answer).abs().max())
        assert error <= tolerance(answer, dtype), error
    want = given.pool.clone()
    rows = torch.stack((k, given.v), 2)
    want[given.slots // BLOCK_SIZE, :, 1, :, given.slots % BLOCK_SIZE] = rows
    assert torch.equal(pool, want)


@pytest.mark.sampled(3)
@plus_ones
@cases
def test_they_equal_norms_and_then_a_rotation(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, plus_one: bool
) -> None:
    """The twin gives these bits. So does the kernel, but where a sum in another order, or the
    interpreter's bfloat16, rounds differently."""
    given = problem(heads, head_dim, dtype, plus_one)

    def apart(ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (
            ops.norm.rms_norm(x, norm)
            for x, norm in ((given.q, given.norms.q), (given.k, given.norms.k))
        )
        return given._replace(q=q, k=k).run(ops.kv, None)

    for mine, want in zip(given.run(TORCH.kv, given.norms), apart(TORCH), strict=True):
        assert torch.equal(mine, want)
    rounds_alike = ON_GPU or dtype != torch.bfloat16
    wanted = apart(TORCH if rounds_alike else TRITON)
    for mine, want in zip(given.run(TRITON.kv, given.norms), wanted, strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=tolerance(want, dtype))
        assert dtype == torch.float32 or (mine == want).double().mean() > 0.99


def test_the_norm_of_queries_is_not_that_of_keys() -> None:
    """Weights, eps and kind are each their own."""
    for plus_one in ((True, False), (False, True)):
        given = problem((6, 2), 80, torch.float32, plus_one)
        q, k, _ = given.run(TRITON.kv, given.norms)
        for mine, answer in zip((q, k), given.by_hand(), strict=True):
            assert float((mine.double() - answer).abs().max()) <= tolerance(answer, torch.float32)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["none", "norms", "by one and a weight"])
def test_the_kernel_compiles_and_loads_weights_early(kind: str) -> None:
    """As launched for Qwen3-30B-A3B; before it waits, it loads nothing but weights of norms."""
    constants: dict[str, Any] = {"HALF": 64, "BLOCK_HALF": 64, "Q_HEADS": 16, "KV_HEADS": 4}
    constants |= {name: kind == "by one and a weight" for name in ("Q_PLUS_ONE", "K_PLUS_ONE")}
    if kind == "none":
        constants |= {"q_norm_ptr": None, "k_norm_ptr": None}
    kinds = {f"{name}_ptr": "*bf16" for name in ("q", "k", "v", "kv", "q_norm", "k_norm")}
    kinds |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "slot_mapping_ptr": "*i64"}
    kinds |= {"q_eps": "fp32", "k_eps": "fp32"}
    strides = [f"stride_{x}_{of}" for x in "qkv" for of in ("token", "head")]
    said = ptx(
        "pdserve.kernels.kv.cache_rows:rope_write_kv_kernel",
        constants | {"PDL": True},
        kinds,
        num_warps=4,
        multiples=[*strides, "stride_block", "stride_kv_head", "stride_plane"],
    )
    early, late = said.split("griddepcontrol.wait")
    assert "ld.global" in late and ("ld.global" in early) == (kind != "none")
    assert ("shfl.sync" in late) == (kind != "none")
    assert "bar.sync" not in late, "a sum leaves its warp"
