"""Prompts over latents with keys and values of their own, against the same in the latent's space:
laid out, in pieces, taken back.

Without CUDA the kernels run in the interpreter, and attention in plain torch.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.kernels.attention import join
from pdserve.kernels.attention.spec import AttentionSpec, Paged, Prefills
from pdserve.kernels.latents import expanded, expanded_rows, reference, triton_ops
from pdserve.kernels.latents.spec import LatentAttentionSpec, LatentHeads
from pdserve.kernels.norm.ops import Norm

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
RANK, ROPE, NOPE, VALUE, HEADS, BLOCK = 48, 16, 24, 32, 3, 16
SPEC = LatentAttentionSpec(
    AttentionSpec(HEADS, 1, RANK + ROPE, scale=0.2, value_width=RANK), NOPE, VALUE, True
)
Chunks = tuple[tuple[int, int], ...]


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows of a step: small, for the interpreter; on a GPU plans are made for them."""
    rows = 64
    for name, value in (("MIN_LENGTH", 16), ("LENGTH_MULTIPLE", 32), ("LONG_MULTIPLE", 32)):
        monkeypatch.setattr(expanded, name, value)
    expanded.lay_out.cache_clear()
    monkeypatch.setattr(expanded._warm, "max_rows", {})
    like = torch.zeros(1, dtype=DTYPE, device=DEVICE)
    if ON_GPU:
        expanded.warm_expansion(SPEC, rows, like)
    else:
        expanded._warm.max_rows[expanded._key(SPEC, like)] = rows
    return rows


def problem(chunks: Chunks) -> tuple[Tensor, Tensor, Prefills, LatentHeads]:
    """Returns q [T, H, NOPE + ROPE] with padding, as columns of a wider product; kv; where its rows
    are; the heads."""
    chance = torch.Generator().manual_seed(len(chunks))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance).to(DEVICE, DTYPE)

    contexts = [before + rows for before, rows in chunks]
    counts = [-(-context // BLOCK) for context in contexts]
    kv = draw(sum(counts) + 1, 1, 2, 1, BLOCK, RANK + ROPE)
    kv[0] = float("nan")
    ids = (torch.randperm(sum(counts), generator=chance) + 1).int().split(counts)
    tables = torch.zeros(len(chunks) + 1, max(counts), dtype=torch.int32)
    for sequence, blocks in enumerate(ids):
        tables[len(chunks) - sequence, : len(blocks)] = blocks
    numbers = [
        range(len(chunks), 0, -1),
        contexts,
        [sum(rows for _, rows in chunks[:i]) for i in range(len(chunks) + 1)],
    ]
    rows, lens, starts = (torch.tensor([*n], dtype=torch.int32, device=DEVICE) for n in numbers)
    width = HEADS * (NOPE + ROPE)
    q = draw(int(starts[-1]) + 3, width + 8)[:, :width].unflatten(1, (HEADS, -1))
    heads = draw(HEADS, NOPE + VALUE, RANK) / 7
    prefills = Prefills(Paged(tables.to(DEVICE), rows, lens, max(contexts)), starts, 64, chunks)
    norm = Norm(torch.ones(RANK, device=DEVICE), 1e-6)
    return q, kv[:, :, 1], prefills, LatentHeads(norm, heads[:, :NOPE], heads[:, NOPE:])


@pytest.mark.parametrize(
    "chunks",
    [
        ((0, 64),),
        ((0, 20), (0, 33), (0, 20), (0, 16), (0, 19)),
        ((7, 30), (0, 2), (40, 11)),
        ((100, 28),),
        ((64, 64),),
        ((130, 40), (0, 9), (64, 15)),
        ((200, 3),),
    ],
    ids=str,
)
def test_they_get_what_they_would_in_the_latents_space(chunks: Chunks, short_steps: int) -> None:
    q, kv, prefills, heads = problem(chunks)
    wants, gets = (torch.full((len(q), HEADS, VALUE), 9.0).to(DEVICE, DTYPE) for _ in range(2))
    triton_ops.expanded_prefill(q, kv, prefills, SPEC, heads, gets)
    reference.expanded_prefill(
        q.cpu(),
        kv.cpu(),
        Prefills(
            Paged(
                prefills.paged.tables.cpu(),
                prefills.paged.rows.cpu(),
                prefills.paged.context_lens.cpu(),
                prefills.paged.longest,
            ),
            prefills.query_starts.cpu(),
            64,
        ),
        SPEC,
        LatentHeads(heads.norm, heads.keys.cpu(), heads.values.cpu()),
        wants := wants.cpu(),
    )
    near = 0.03 if ON_GPU else 1e-5
    torch.testing.assert_close(gets.cpu(), wants, atol=near, rtol=0)
    assert not gets[-3:].any()


def test_a_warm_up_launches_all_that_a_context_in_pieces_takes(
    short_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: set[tuple[Any, ...]] = set()

    def note(
        launch: Any, kernel: Any, grid: Any, pointers: Any, *args: Any, **options: Any
    ) -> None:
        launched.add((kernel, *(each is None for each in pointers), *options.items()))
        launch(kernel, grid, pointers, *args, **options)

    for module in (expanded_rows, join):
        monkeypatch.setattr(module, "launch", partial(note, module.launch))
    q, kv, prefills, heads = problem(((200, 3),))
    tables = prefills.paged.tables
    expanded.warm_pieces(kv, tables[:, : 2 * short_steps // BLOCK], SPEC, heads)
    assert not launched, "no context is so long"
    expanded.warm_pieces(kv, tables, SPEC, heads)
    warmed = set(launched)
    launched.clear()
    triton_ops.expanded_prefill(q, kv, prefills, SPEC, heads, q.new_empty(len(q), HEADS, VALUE))
    assert launched and launched <= warmed


def test_sequences_of_about_one_length_go_together() -> None:
    expanded.lay_out.cache_clear()
    found = expanded.lay_out(((0, 200), (0, 5000), (90, 130), (0, 256), (8000, 200)), 8192)
    assert [group[:2] for group in found.groups] == [
        (256, (0, 2)),
        (256, (3,)),
        (5120, (1,)),
        (9216, (4,)),
    ]
    assert all(not any(group.begins) for group in found.groups)


def test_a_long_context_goes_in_pieces() -> None:
    [group] = expanded.lay_out(((20_000, 1000),), 8192).groups
    assert group == (5120, (0,), (16_384,))


@pytest.mark.parametrize("max_rows", [512, 1000, 2048, 8192])
def test_every_group_has_a_shape_that_is_warmed(max_rows: int) -> None:
    shapes = set(expanded._shapes(max_rows))
    chance = torch.Generator().manual_seed(0)
    for _ in range(300):
        count = int(torch.randint(1, 40, (1,), generator=chance))
        befores = torch.randint(0, 4 * max_rows, (count,), generator=chance).tolist()
        rows = torch.randint(1, max_rows + 1, (count,), generator=chance).tolist()
        for group in expanded.lay_out(tuple(zip(befores, rows, strict=True)), max_rows).groups:
            assert (len(group.sequences), group.length) in shapes


def test_it_pays_for_prompts_and_not_for_a_few_tokens(short_steps: int) -> None:
    like = torch.zeros(1, dtype=DTYPE, device=DEVICE)
    prefills = problem(((0, 8),))[2]

    def pays(*chunks: tuple[int, int]) -> bool:
        return expanded.expansion_pays(
            Prefills(prefills.paged, prefills.query_starts, 1, chunks), SPEC, like
        )

    expanded._warm.max_rows[expanded._key(SPEC, like)] = 8192
    expanded.lay_out.cache_clear()
    assert pays((0, 8192)) and pays(*[(0, 1024)] * 8) and pays((8192, 8192)) and pays((900, 3000))
    assert not pays((8000, 16)) and not pays((0, 40), (0, 30)) and not pays()
    assert not pays((0, 9000)), "more rows than a step may have"
    expanded._warm.max_rows.clear()
    assert not pays((0, 8192)), "no plans were made"
