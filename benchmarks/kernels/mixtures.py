"""Times the Triton kernels of experts and of attention over latents on one CUDA device, beside the
device's ceiling, at the shapes of Qwen3-30B-A3B and DeepSeek-V2-Lite. "qwen3-tp2" is the half of
each expert that one of two ranks has.

    python -m benchmarks.kernels.mixtures --out benchmarks/results/kernels-h200.jsonl
    python -m benchmarks.kernels.mixtures --only "experts qwen3" --sweep

Random routers choose the experts of rows. The work of few rows is the bytes of the chosen experts,
and that of many rows their products. For prompts over latents, the work is the operations of heads
with keys and values of their own. Experts are held in 16 bits. "experts fp8_block" are in e4m3 with
a scale per 128 x 128 weights, and "experts int4" are in 4 bits in groups of 128. --sweep also times
other tiles, and torch's grouped product. This module only knows the kernels.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton

from benchmarks.support.kernel_timer import Case, add_timer_arguments, replayed, time_all
from pdserve.kernels.attention.spec import AttentionSpec, Paged, Prefills
from pdserve.kernels.e4m3 import E4M3
from pdserve.kernels.experts.ops import Choice, Experts, Router
from pdserve.kernels.experts.products.e4m3 import launch_e4m3
from pdserve.kernels.experts.products.int4 import launch_int4
from pdserve.kernels.experts.products.many_rows import launch_combine, launch_many_rows
from pdserve.kernels.experts.products.tiles import Tile
from pdserve.kernels.experts.routing import Routing
from pdserve.kernels.experts.triton_ops import mix, route
from pdserve.kernels.latents.attention import LatentTiles, launch_latent
from pdserve.kernels.latents.spec import LatentAttentionSpec, LatentHeads
from pdserve.kernels.latents.triton_ops import expanded_prefill, warm
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.schemes.int4 import Int4
from pdserve.kernels.linear.schemes.scheme import Cut
from pdserve.kernels.norm.ops import Norm

DTYPE = torch.bfloat16
LAYERS = 4
RANK, ROPE, NOPE, VALUE, LATENT_HEADS = 512, 64, 128, 128, 16
LATENT_SPEC = AttentionSpec(LATENT_HEADS, 1, RANK + ROPE, (NOPE + ROPE) ** -0.5, value_width=RANK)
FEW = (1, 2, 4)
SOME = (8, 16, 32, 64, 128, 256, 512)
MANY = (2048, 8192)
TILES = {
    64: [(Tile(16, 128, 128, 4, 3),) * 2],
    256: [(Tile(16, 64, 128, 4, 4),) * 2, (Tile(64, 128, 64, 4, 4),) * 2],
    512: [(Tile(32, 128, 128, 4, 3),) * 2],
    8192: [
        (Tile(128, 128, 64, 8, 3),) * 2,
        (Tile(128, 256, 64, 8, 4, has_tma=True), Tile(128, 128, 64, 8, 3, has_tma=True)),
        (Tile(128, 256, 64, 8, 4, has_tma=True),) * 2,
    ],
}
FEW_E4M3 = [
    (Tile(16, 64, inputs, 4, stages),) * 2 for inputs, stages in ((128, 8), (256, 3), (256, 6))
]
MANY_E4M3 = [
    (Tile(64, 64, 256, 4, 3),) * 2,
    (Tile(128, 128, 128, 8, 4, has_tma=True),) * 2,
    (Tile(128, 256, 128, 8, 4),) * 2,
    (Tile(128, 256, 128, 8, 4, has_tma=True), Tile(128, 128, 128, 8, 4, has_tma=True)),
    (Tile(128, 256, 128, 8, 3, has_tma=True),) * 2,
]
E4M3_TILES = {
    1: FEW_E4M3,
    16: FEW_E4M3,
    64: FEW_E4M3,
    512: [
        (Tile(32, 64, 256, 4, 3),) * 2,
        (Tile(64, 64, 256, 4, 3),) * 2,
        (Tile(64, 64, 128, 4, 6),) * 2,
    ],
    2048: MANY_E4M3,
    8192: MANY_E4M3,
}
FEW_INT4 = [Tile(16, outputs, 128, 4, stages) for outputs, stages in ((64, 3), (64, 8), (128, 4))]
MANY_INT4 = [Tile(64, 64, 128, 4, 4), Tile(128, 64, 128, 4, 3), Tile(128, 128, 128, 8, 2)]
INT4_TILES = {
    1: FEW_INT4,
    16: FEW_INT4,
    64: FEW_INT4,
    512: [Tile(32, 64, 128, 4, 3), Tile(32, 128, 128, 4, 4), Tile(64, 64, 128, 4, 4)],
    2048: MANY_INT4,
    8192: MANY_INT4,
}
LATENT_TILES = [
    LatentTiles(16, 32, 4, 4),
    LatentTiles(16, 64, 4, 5),
    LatentTiles(16, 64, 8, 5),
    LatentTiles(16, 32, 8, 5),
]


@dataclass(frozen=True)
class Mixture:
    """The sizes of a layer."""

    name: str
    routing: Routing
    hidden: int
    size: int

    @property
    def expert_weights(self) -> int:
        return 3 * self.hidden * self.size


MIXTURES = (
    Mixture("qwen3", Routing(128, 8, normalize=True), 2048, 768),
    Mixture("qwen3-tp2", Routing(128, 8, normalize=True), 2048, 384),
    Mixture("dsv2", Routing(64, 6, num_shared=2), 2048, 1408),
)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def expert_cases(mixture: Mixture, sweep: bool) -> Iterator[Case]:
    """Yields cases of experts. Each call has weights of its own, as layers do."""
    routing = mixture.routing
    router = Router(random(routing.num_experts, mixture.hidden), routing)
    load = torch.zeros(routing.num_experts, dtype=torch.int64, device="cuda")
    for num_rows in (*FEW, *SOME, *MANY):
        x = random(num_rows, mixture.hidden)

        def routes(x: torch.Tensor = x) -> None:
            for _ in range(LAYERS):
                route(x, router, None, load)

        read = (routing.num_experts + num_rows) * mixture.hidden * DTYPE.itemsize
        yield Case(f"route {mixture.name} {num_rows}", replayed(routes), read, "TB/s", LAYERS)
    for kind in STACKS:
        yield from mix_cases(mixture, router, load, kind, sweep)


def mix_cases(
    mixture: Mixture, router: Router, load: torch.Tensor, kind: str, sweep: bool
) -> Iterator[Case]:
    stack, weight_bytes = STACKS[kind]
    count = mixture.routing.num_experts + mixture.routing.num_shared
    layers = [
        Experts(
            stack(count, 2 * mixture.size, mixture.hidden),
            stack(count, mixture.hidden, mixture.size),
            "silu",
        )
        for _ in range(LAYERS)
    ]
    for num_rows in (*FEW, *SOME, *MANY):
        x = random(num_rows, mixture.hidden)
        choice = route(x, router, None, load)
        onto = random(num_rows, mixture.hidden)

        def mixes(
            run: Callable[..., object],
            x: torch.Tensor = x,
            choice: Choice = choice,
            onto: torch.Tensor = onto,
        ) -> None:
            for experts in layers:
                run(x, choice, experts, onto)

        if not kind and num_rows not in FEW:
            yield combine_case(mixture, choice, x, onto)
        work, unit = expert_work(mixture, choice, weight_bytes)
        label = f"experts {kind}{mixture.name} {num_rows}"
        yield Case(label, replayed(partial(mixes, mix)), work, unit, LAYERS)
        if not sweep:
            continue
        for name, run in others(kind, num_rows):
            yield Case(f"{label}: {name}", replayed(partial(mixes, run)), work, unit, LAYERS)
        if num_rows in (256, 512, *MANY) and not kind:
            call = replayed(partial(mixes, grouped))
            yield Case(f"{label}, torch._grouped_mm", call, work, unit, LAYERS)


def combine_case(mixture: Mixture, choice: Choice, x: torch.Tensor, onto: torch.Tensor) -> Case:
    """Makes the case that adds the weighted results of each row's experts to its stream."""
    made = random(choice.experts.numel(), mixture.hidden)

    def combines() -> None:
        for _ in range(LAYERS):
            launch_combine(made, choice, x, onto)

    moved = (made.numel() + 2 * onto.numel()) * DTYPE.itemsize
    return Case(f"combine {mixture.name} {len(x)}", replayed(combines), moved, "TB/s", LAYERS)


def others(kind: str, num_rows: int) -> Iterator[tuple[str, Callable[..., object]]]:
    """Yields (name, call) with other tiles than the chosen ones."""
    if kind == "int4 ":
        for tile in INT4_TILES.get(num_rows, ()):
            yield shown(tile), partial(launch_int4, tile=tile)
        return
    run_tiles = launch_e4m3 if kind else launch_many_rows
    for tiles in (E4M3_TILES if kind else TILES).get(num_rows, ()):
        yield ", ".join(map(shown, tiles)), partial(run_tiles, tiles=tiles)


def dense_stack(count: int, rows: int, columns: int) -> Matrix:
    return Matrix(random(count, rows, columns) * 0.02)


def e4m3_stack(count: int, rows: int, columns: int) -> Matrix:
    scales = torch.full((count, -(-rows // 128), -(-columns // 128)), 0.02, device="cuda")
    data = random(count, rows, columns).to(E4M3)
    return Matrix(data, scales=scales, kind="fp8_block", group=(128, 128))


def int4_stack(count: int, rows: int, columns: int) -> Matrix:
    scheme = Int4(128)
    cut = Cut(slice(0, rows), rows, slice(0, columns), columns)
    whole = scheme.allocate([cut] * count, DTYPE, torch.device("cuda"))
    assert whole.scales is not None and whole.zeros is not None
    whole.data.random_(-(1 << 31), (1 << 31) - 1)
    whole.scales.fill_(0.01)
    whole.zeros.fill_(0x08080808)
    return whole.stacked(count)


STACKS: dict[str, tuple[Callable[[int, int, int], Matrix], float]] = {
    "": (dense_stack, DTYPE.itemsize),
    "fp8_block ": (e4m3_stack, 1),
    "int4 ": (int4_stack, 0.5),
}
"""How experts are held -> the function that makes a stack, and the bytes of a weight."""


def shown(tile: Tile) -> str:
    how = " tma" if tile.has_tma else ""
    return f"{tile.rows}x{tile.outputs}x{tile.inputs} w{tile.num_warps} s{tile.num_stages}{how}"


def expert_work(mixture: Mixture, choice: Choice, itemsize: float) -> tuple[float, str]:
    if len(choice.experts) in MANY:
        return 2.0 * choice.experts.numel() * mixture.expert_weights, "TFLOP/s"
    return float(len(choice.experts.unique()) * mixture.expert_weights * itemsize), "TB/s"


def grouped(x: torch.Tensor, choice: Choice, experts: Experts, onto: torch.Tensor) -> torch.Tensor:
    """Computes experts by torch's grouped product, over rows in the order of their experts."""
    top_k = choice.experts.shape[1]
    flat = choice.experts.flatten()
    order = flat.argsort()
    assert choice.lists is not None
    ends = choice.lists.counts.cumsum(0, dtype=torch.int32)
    rows = x[order // top_k]
    gate, up = torch._grouped_mm(rows, experts.gate_up.data.mT, ends).chunk(2, 1)
    made = torch._grouped_mm(torch.nn.functional.silu(gate) * up, experts.down.data.mT, ends)
    made = made * choice.weights.flatten()[order, None]
    return onto.index_add_(0, order // top_k, made.to(onto.dtype))


def latents_of(contexts: list[int], block_size: int = 64) -> tuple[torch.Tensor, Paged]:
    """Makes a pool of latents `[blocks, 1, LAYERS, 1, block_size, RANK + ROPE]`, and the place of
    each sequence in it."""
    counts = [triton.cdiv(context, block_size) for context in contexts]
    pool = random(sum(counts) + 1, 1, LAYERS, 1, block_size, RANK + ROPE)
    ids = (torch.randperm(sum(counts), device="cuda", dtype=torch.int32) + 1).split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
    lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    rows = torch.arange(len(contexts), dtype=torch.int32, device="cuda")
    return pool, Paged(tables, rows, lens, 32768)


def decode_layers(
    q: torch.Tensor,
    pool: torch.Tensor,
    paged: Paged,
    out: torch.Tensor,
    tiles: LatentTiles | None = None,
) -> None:
    for layer in range(LAYERS):
        launch_latent(q, pool[:, :, layer], paged, LATENT_SPEC, out, tiles=tiles)


def latent_cases(sweep: bool) -> Iterator[Case]:
    for num_seqs, context in (
        (1, 128),
        (1, 1024),
        (1, 8192),
        (64, 1024),
        (64, 1280),
        (256, 1024),
        (512, 512),
        (64, 8192),
    ):
        pool, paged = latents_of([context] * num_seqs)
        q = random(num_seqs, LATENT_HEADS, RANK + ROPE)
        out = torch.empty(num_seqs, LATENT_HEADS, RANK, dtype=DTYPE, device="cuda")

        decodes = partial(decode_layers, q, pool, paged, out)
        work = num_seqs * context * (RANK + ROPE) * DTYPE.itemsize
        name = f"latents decode {num_seqs} x {context}"
        yield Case(name, replayed(decodes), work, "TB/s", LAYERS)
        for tiles in LATENT_TILES if sweep else ():
            call = replayed(partial(decodes, tiles))
            label = f"{name}: n{tiles.keys} w{tiles.num_warps} s{tiles.num_stages}"
            yield Case(label, call, work, "TB/s", LAYERS)
    for num_seqs, length in ((1, 2048), (1, 8192), (16, 1024)):
        pool, paged = latents_of([length] * num_seqs)
        q = random(num_seqs * length, LATENT_HEADS, RANK + ROPE)
        out = torch.empty(len(q), LATENT_HEADS, RANK, dtype=DTYPE, device="cuda")
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * length
        kv = pool[:, :, 1]
        call = partial(launch_latent, q, kv, paged, LATENT_SPEC, out, starts, length)
        pairs = num_seqs * length * (length + 1) / 2
        flops = 2 * LATENT_HEADS * (NOPE + ROPE + VALUE) * pairs
        yield Case(f"latents prefill {num_seqs} x {length}", call, flops, "TFLOP/s")
        spec = LatentAttentionSpec(LATENT_SPEC, NOPE, VALUE, is_interleaved=True)
        norm = Norm(random(RANK), 1e-6)
        both = random(LATENT_HEADS, NOPE + VALUE, RANK)
        heads = LatentHeads(norm, both[:, :NOPE], both[:, NOPE:])
        warm(kv, paged.tables, spec, heads, 8192)
        prefills = Prefills(paged, starts, length, ((0, length),) * num_seqs)
        made = torch.empty(len(q), LATENT_HEADS, VALUE, dtype=DTYPE, device="cuda")
        narrow = random(len(q), LATENT_HEADS, NOPE + ROPE)
        call = partial(expanded_prefill, narrow, kv, prefills, spec, heads, made)
        name = f"latents prefill {num_seqs} x {length}, expanded"
        yield Case(name, call, flops, "TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_timer_arguments(parser)
    options = parser.parse_args()

    def cases() -> Iterator[Case]:
        for mixture in MIXTURES:
            yield from expert_cases(mixture, options.sweep)
        yield from latent_cases(options.sweep)

    time_all(cases(), options)


if __name__ == "__main__":
    main()
