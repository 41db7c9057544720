"""Attention over latents: rotated and written as by hand, attended in the latent's space as every
head by itself would, bits on CPU whatever the batch."""

from typing import Any

import pytest
import torch
from support.dense_model import dense_attend_latent
from torch import Tensor

from pdserve.configs.kv_layout import KVLayout, LayerGroup
from pdserve.engine.execution.attention import AttentionBatch, PagedAttention
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.engine.stepping.work import StepShape
from pdserve.kernels.attention.spec import AttentionSpec, Paged, Prefills
from pdserve.kernels.latents import attention as latent_attention
from pdserve.kernels.latents import reference
from pdserve.kernels.latents import triton_ops as triton
from pdserve.kernels.latents.ops import LatentOps
from pdserve.kernels.latents.spec import LatentAttentionSpec, LatentHeads
from pdserve.kernels.norm.ops import Norm
from pdserve.kernels.ops import TORCH, triton_ops

TRITON = triton_ops()
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
RANK, ROPE, NOPE, VALUE, HEADS, BLOCK = 40, 8, 12, 20, 6, 16
both = pytest.mark.parametrize("ops", [reference, triton], ids=["reference", "triton"])


def tables(rotated: int, num_positions: int = 400) -> tuple[Tensor, Tensor]:
    angles = torch.rand(num_positions, rotated // 2, dtype=torch.float64) * 6
    return angles.cos().float().to(DEVICE), angles.sin().float().to(DEVICE)


@both
@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "rank", "rotated", "dtype"),
    [(1, 16, 4, torch.float32), (5, 40, 12, torch.float16), (16, 512, 64, torch.bfloat16)],
)
def test_rows_are_rotated_and_written(
    ops: LatentOps,
    is_interleaved: bool,
    is_in_place: bool,
    heads: int,
    rank: int,
    rotated: int,
    dtype: torch.dtype,
) -> None:
    """Queries are slices of a wider product, and rotated there or to another's columns; only the
    given slots of one layer change."""
    fused = torch.randn(4, heads, 7 + rotated, device=DEVICE).to(dtype)
    q = fused[:, :, 7:]
    latent = torch.randn(4, rank + rotated, device=DEVICE).to(dtype)
    norm = Norm(torch.randn(rank, device=DEVICE).to(dtype), 1e-6)
    cos, sin = tables(rotated, 50)
    positions = torch.randint(0, 50, (4,), device=DEVICE)
    pool = torch.randn(3, 1, 2, 1, BLOCK, rank + rotated, device=DEVICE).to(dtype)
    before = pool.clone()
    slots = torch.randperm(3 * BLOCK, device=DEVICE)[:4]

    def by_hand(x: Tensor) -> Tensor:
        pairs = x.double().unflatten(-1, (-1, 2) if is_interleaved else (2, -1))
        first, second = pairs.unbind(-1 if is_interleaved else -2)
        c, s = (t.double()[positions].view(4, *[1] * (x.ndim - 2), -1) for t in (cos, sin))
        return torch.cat((first * c - second * s, second * c + first * s), -1)

    want_q, want_rope = by_hand(q), by_hand(latent[:, rank:])
    wide = latent[:, :rank].double()
    scale = (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    want_latent = wide * scale * norm.weight.double()
    wider = torch.zeros(4, heads, 5 + rotated, device=DEVICE).to(dtype)
    into = q if is_in_place else wider[:, :, 5:]
    ops.rope_write(q, into, latent, norm, cos, sin, positions, pool[:, :, 1], slots, is_interleaved)
    stored = pool[slots // BLOCK, 0, 1, 0, slots % BLOCK]
    for mine, want in (
        (into, want_q),
        (stored[:, rank:], want_rope),
        (stored[:, :rank], want_latent),
    ):
        torch.testing.assert_close(mine.double(), want, atol=40 * torch.finfo(dtype).eps, rtol=0)
    assert not wider[:, :, :5].any()
    pool[slots // BLOCK, 0, 1, 0, slots % BLOCK] = before[slots // BLOCK, 0, 1, 0, slots % BLOCK]
    assert torch.equal(pool, before)


class Latents:
    """On CPU, one layer over the prompts of some sequences, whose blocks are given out from the
    last on."""

    def __init__(self, lengths: list[int]) -> None:
        chance = torch.Generator().manual_seed(4)
        total = sum(lengths)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=chance)

        self.lengths = lengths
        self.q = draw(total, HEADS, NOPE + ROPE)
        self.latent = draw(total, RANK + ROPE)
        norm = Norm(draw(RANK), 1e-6)
        self.heads = LatentHeads(norm, draw(HEADS, NOPE, RANK) / 6, draw(HEADS, VALUE, RANK) / 6)
        attends = AttentionSpec(HEADS, 1, RANK + ROPE, scale=0.3, value_width=RANK)
        self.spec = LatentAttentionSpec(attends, NOPE, VALUE, is_interleaved=True)
        torch.manual_seed(1)
        cos, sin = tables(ROPE)
        self.rope = cos.cpu(), sin.cpu()
        group = LayerGroup(layers=(0,), heads=(0,), row_width=RANK + ROPE, planes=1)
        layout = KVLayout(groups=(group,), block_size=BLOCK)
        each = max(-(-length // BLOCK) for length in lengths)
        num_blocks = 1 + each * len(lengths)
        memory = torch.full((num_blocks, layout.block_bytes // 4), float("nan"))
        self.cache = KVCache(memory, layout)
        self.tables = torch.arange(num_blocks - 1, 0, -1, dtype=torch.int32).view(-1, each)

    def alone(self) -> list[Tensor]:
        parts = zip(self.q.split(self.lengths), self.latent.split(self.lengths), strict=True)
        return [
            dense_attend_latent(0, self.spec, q, latent, self.heads, self.rope)
            for q, latent in parts
        ]

    def step(self, rows: list[range]) -> list[Tensor]:
        """Computes these rows of each sequence, which follow the rows of earlier steps. One row is
        a decode, and decodes come first."""
        starts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        order = sorted(range(len(rows)), key=lambda s: len(rows[s]) != 1)
        num_decodes = sum(len(r) == 1 for r in rows)
        picked = torch.tensor([starts[s] + i for s in order for i in rows[s]])
        positions = torch.tensor([i for s in order for i in rows[s]], dtype=torch.int32)
        slots = torch.tensor(
            [int(self.tables[s, i // BLOCK]) * BLOCK + i % BLOCK for s in order for i in rows[s]]
        )
        num_padding = -len(picked) % 16
        pad = torch.zeros(num_padding, dtype=torch.long)
        lens = [len(rows[s]) for s in order][num_decodes:]
        chunks = tuple((rows[s].start, len(rows[s])) for s in order[num_decodes:])
        shape = StepShape(num_decodes, 400, chunks)
        batch = AttentionBatch(
            shape=shape,
            positions=torch.cat((positions, pad.int())),
            slot_mapping=torch.cat((slots, pad)),
            block_tables=self.tables,
            table_rows=torch.tensor(order, dtype=torch.int32),
            context_lens=torch.tensor([rows[s].stop for s in order], dtype=torch.int32),
            query_starts=torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int(),
        )
        padded = torch.cat((picked, pad))
        attend = PagedAttention(self.cache, TORCH, batch)
        out = attend.latent(
            0, self.spec, self.q[padded], self.latent[padded], self.heads, self.rope
        )
        found = dict(
            zip(order, out[: len(picked)].split([len(rows[s]) for s in order]), strict=True)
        )
        return [found[s] for s in range(len(rows))]


def test_every_head_by_itself_gets_the_same() -> None:
    latents = Latents([70, 1, 33])
    got = latents.step([range(70), range(1), range(33)])
    for one, want in zip(got, latents.alone(), strict=True):
        torch.testing.assert_close(one, want, atol=2e-5, rtol=0)


def test_bits_do_not_depend_on_how_rows_came() -> None:
    lengths = [70, 21, 33]
    whole = Latents(lengths).step([range(n) for n in lengths])
    parts = Latents(lengths)
    seen = [
        parts.step([range(16), range(20), range(1)]),
        parts.step([range(16, 69), range(20, 21), range(1, 33)]),
        parts.step([range(69, 70), range(20, 21), range(32, 33)]),
    ]
    assert torch.equal(torch.cat([seen[0][0], seen[1][0], seen[2][0]]), whole[0])
    assert torch.equal(torch.cat([seen[0][1], seen[1][1]]), whole[1])
    assert torch.equal(torch.cat([seen[0][2], seen[1][2]]), whole[2])


@pytest.mark.parametrize("value_width", [0, 49])
def test_values_are_a_part_of_the_keys(value_width: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to head_dim 48, not {value_width}"):
        AttentionSpec(HEADS, 1, RANK + ROPE, scale=0.3, value_width=value_width)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "rank", "rotated"), [(6, 40, 8), (16, 64, 16), (20, 32, 16)], ids=str
)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_the_kernel_attends_as_its_twin(
    kind: str, heads: int, rank: int, rotated: int, dtype: torch.dtype
) -> None:
    """Contexts of one part and of several, an empty one; chunks behind a prefix; padding."""
    chance = torch.Generator().manual_seed(heads)
    contexts = [601, 40, 1] if kind == "decode" else [75, 18, 9]
    queries = [1, 1, 1] if kind == "decode" else [21, 18, 1]
    width = rank + rotated
    attends = AttentionSpec(heads, 1, width, scale=width**-0.5, value_width=rank)
    spec = LatentAttentionSpec(attends, NOPE, VALUE, is_interleaved=True)
    num_blocks = sum(-(-n // BLOCK) for n in contexts) + 1
    pool = torch.randn(num_blocks, 1, 2, 1, BLOCK, width, generator=chance).to(DEVICE, dtype)
    pool[0] = float("nan")
    order = torch.randperm(num_blocks - 1, generator=chance) + 1
    each = max(-(-n // BLOCK) for n in contexts)
    table = torch.zeros(4, each, dtype=torch.int32)
    first = 0
    for row, context in enumerate(contexts):
        count = -(-context // BLOCK)
        table[3 - row, :count] = order[first : first + count]
        first += count
    slots, lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([3, 2, 1], contexts))
    paged = Paged(table.to(DEVICE), slots, lens, max(contexts))
    num_tokens = sum(queries) + (5 if kind == "prefill" else 0)
    q = torch.randn(num_tokens, heads, width + 3, generator=chance).to(DEVICE, dtype)[:, :, 3:]
    kv = pool[:, :, 1]
    if kind == "decode":
        got, want = (ops.latents.decode(q, kv, paged, spec) for ops in (TRITON, TORCH))
    else:
        starts = torch.tensor([0, *queries], dtype=torch.int32, device=DEVICE).cumsum(0).int()
        prefills = Prefills(paged, starts, max(queries))
        got, want = (ops.latents.prefill(q, kv, prefills, spec) for ops in (TRITON, TORCH))
    assert got.shape == (num_tokens, heads, rank)
    near = 2e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got.float(), want.float(), atol=near, rtol=0)
    if kind == "prefill":
        assert not got[-5:].any()


def test_a_context_of_nothing_gets_zeros() -> None:
    attends = AttentionSpec(HEADS, 1, RANK + ROPE, scale=0.3, value_width=RANK)
    spec = LatentAttentionSpec(attends, NOPE, VALUE, is_interleaved=True)
    kv = torch.full((3, 1, 1, BLOCK, RANK + ROPE), float("nan"), device=DEVICE)
    ids = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    q = torch.randn(2, HEADS, RANK + ROPE, device=DEVICE)
    for longest in (16, 4096):
        paged = Paged(torch.zeros(1, 256, dtype=torch.int32, device=DEVICE), ids, ids, longest)
        assert not TRITON.latents.decode(q, kv, paged, spec).any()


def test_a_warm_up_meets_every_way_to_deal_out_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    attends = AttentionSpec(HEADS, 1, RANK + ROPE, scale=0.3, value_width=RANK)
    spec = LatentAttentionSpec(attends, NOPE, VALUE, is_interleaved=True)
    seen: set[int] = set()
    launch = latent_attention.launch

    def note(kernel: Any, grid: Any, pointers: Any, numbers: Any, **options: Any) -> None:
        seen.add(options["PARTS"])
        launch(kernel, grid, pointers, numbers, **options)

    monkeypatch.setattr(latent_attention, "launch", note)
    monkeypatch.setattr(latent_attention, "num_sms", lambda device: 132)
    kv = torch.zeros(2, 1, 1, BLOCK, RANK + ROPE, device=DEVICE)
    q = torch.zeros(1, HEADS, RANK + ROPE, device=DEVICE)
    tables = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
    TRITON.latents.warm(kv, tables, spec, Latents([1]).heads, 16)
    assert seen == {1, 2, 4, 8, 16, 32}
    ids = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for longest in (1, 700, 2_999, 100_000):
        TRITON.latents.decode(q, kv, Paged(tables, ids, ids, longest), spec)
    assert seen == {1, 2, 4, 8, 16, 32}
