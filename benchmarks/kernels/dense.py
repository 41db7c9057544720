"""Times every Triton kernel at Llama-3.1-8B shapes on one CUDA device, beside the device's ceiling.

    python -m benchmarks.kernels.dense --out benchmarks/results/kernels.jsonl
    python -m benchmarks.kernels.dense --only prefill --sweep

Figures are medians of triton.testing.do_bench, which clears the L2 cache between runs. Ceilings are
an H200's (benchmarks/results); pass those of another device. --sweep also times attention with
other tiles and split counts. This module only knows the kernels: no engine and no model.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton

from benchmarks.support.kernel_timer import Case, add_timer_arguments, replayed, time_all
from pdserve.kernels.attention import dense
from pdserve.kernels.attention.decode import decode_tiles, launch_decode
from pdserve.kernels.attention.prefill import launch_prefill
from pdserve.kernels.attention.spec import AttentionSpec, Paged, Prefills
from pdserve.kernels.attention.tiles import AttentionTiles
from pdserve.kernels.attention.triton_ops import paged_prefill
from pdserve.kernels.e4m3 import E4M3
from pdserve.kernels.kv.ops import HeadNorms
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.triton_ops import linear
from pdserve.kernels.norm.ops import Norm
from pdserve.kernels.ops import triton_ops
from pdserve.protocol.sampling_params import MAX_LOGIT_BIAS

HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128
HIDDEN = 4096
INTERMEDIATE = 14336
LAYERS = 4
VOCAB = 128256
MODEL_LEN = 131072
DTYPE = torch.bfloat16
QKV_HEADS = HEADS + 2 * KV_HEADS
SPEC = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
TRITON = triton_ops()


@dataclass(frozen=True)
class PagedInputs:
    """Sequences in shuffled blocks of a KV cache. `kv` is one of its layers."""

    pool: torch.Tensor
    block_tables: torch.Tensor
    table_rows: torch.Tensor
    context_lens: torch.Tensor

    @property
    def kv(self) -> torch.Tensor:
        return self.pool[:, :, 1]

    def paged(self, longest: int) -> Paged:
        return Paged(self.block_tables, self.table_rows, self.context_lens, longest)


def paged_inputs(contexts: list[int], block_size: int) -> PagedInputs:
    num_blocks = [triton.cdiv(context, block_size) for context in contexts]
    pool = torch.randn(
        (sum(num_blocks) + 1, KV_HEADS, LAYERS, 2, block_size, HEAD_DIM), dtype=DTYPE, device="cuda"
    )
    ids = (torch.randperm(sum(num_blocks), device="cuda", dtype=torch.int32) + 1).split(num_blocks)
    tables = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
    lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    rows = torch.arange(len(contexts), dtype=torch.int32, device="cuda")
    return PagedInputs(pool, tables, rows, lens)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def decode_cases(block_size: int, sweep: bool) -> Iterator[Case]:
    """Yields cases of decode attention over caches in 16 bits and in e4m3. Grids are sized for
    MODEL_LEN tokens, as in a captured graph."""
    batches = {
        f"{s} x {n}": [n] * s for s, n in ((64, 8192), (256, 1024), (1, 8192), (1, 1024), (1, 128))
    }
    batches["64 x 128..8066"] = [128 + 126 * i for i in range(64)]
    batches["63 x 1024, 1 x 65536"] = [1024] * 63 + [65536]
    for batch, contexts in batches.items():
        wide = paged_inputs(contexts, block_size)
        q = random(len(contexts), QKV_HEADS, HEAD_DIM)[:, :HEADS]
        out = torch.empty(q.shape, dtype=DTYPE, device="cuda")
        for inputs, form in (wide, ""), (replace(wide, pool=wide.pool.to(E4M3)), " in e4m3"):
            args = (q, inputs.kv, inputs.paged(MODEL_LEN), SPEC)
            work = sum(contexts) * KV_HEADS * HEAD_DIM * 2 * inputs.pool.itemsize
            name = f"decode {batch}{form}, blocks of {block_size}"
            yield Case(name, decode_graph(inputs, q), work, "TB/s", LAYERS)
            for tiles, programs in decode_sweep() if sweep else ():
                label = (
                    f"{name}: n{tiles.block_n} w{tiles.num_warps} s{tiles.num_stages} programs "
                    f"{programs}"
                )
                yield Case(label, partial(launch_decode, *args, tiles, programs, out), work, "TB/s")


def decode_graph(inputs: PagedInputs, q: torch.Tensor) -> Callable[[], object]:
    """Captures one call per layer."""

    def step() -> None:
        for layer in range(LAYERS):
            kv = inputs.pool[:, :, layer]
            TRITON.attention.decode(q, kv, inputs.paged(MODEL_LEN), SPEC)

    return replayed(step)


def decode_sweep() -> Iterator[tuple[AttentionTiles, int]]:
    base = decode_tiles(HEADS // KV_HEADS, HEAD_DIM, DTYPE)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    for block_n, num_warps, num_stages, per_sm in (
        *((64, 4, 3, 3), (64, 4, 5, 2), (64, 4, 5, 3), (64, 4, 7, 1), (64, 2, 5, 4)),
        *((32, 4, 6, 3), (32, 4, 8, 3), (128, 4, 5, 2)),
    ):
        yield (
            AttentionTiles(base.block_m, block_n, base.block_d, num_warps, num_stages),
            per_sm * num_sms,
        )


def prefill_cases(block_size: int, sweep: bool) -> Iterator[Case]:
    """Yields cases of prefill attention, by (sequences, queries, past tokens)."""
    for num_seqs, length, past in (
        (1, 2048, 0),
        (1, 8192, 0),
        (1, 16384, 0),
        (16, 1024, 0),
        (1, 8192, 8192),
        *((1, length, past) for past in (0, 4000, 14000) for length in (64, 128, 256, 384, 512)),
        (4, 128, 4000),
    ):
        inputs = paged_inputs([past + length] * num_seqs, block_size)
        q = random(num_seqs * length, QKV_HEADS, HEAD_DIM)[:, :HEADS]
        out = torch.empty(q.shape, dtype=DTYPE, device="cuda")
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * length
        prefills = Prefills(inputs.paged(past + length), starts, length)
        args = (q, inputs.kv, prefills, SPEC)
        work = prefill_work(num_seqs, length, past)
        name = f"prefill {num_seqs} x {length} behind {past}, blocks of {block_size}"
        yield Case(name, partial(paged_prefill, *args), work, "TFLOP/s")
        for tiles in prefill_sweep() if sweep else ():
            label = (
                f"{name}: m{tiles.block_m} n{tiles.block_n} w{tiles.num_warps} s{tiles.num_stages}"
            )
            yield Case(label, partial(launch_prefill, *args, tiles, out, length), work, "TFLOP/s")


def prefill_sweep() -> Iterator[AttentionTiles]:
    shapes = ((128, 64, 4, 3), (64, 64, 4, 5), (64, 64, 4, 3), (128, 64, 8, 5), (128, 128, 8, 5))
    for block_m, block_n, num_warps, num_stages in shapes:
        yield AttentionTiles(block_m, block_n, HEAD_DIM, num_warps, num_stages)


def prefill_work(num_seqs: int, length: int, past: int) -> float:
    return 4 * HEADS * HEAD_DIM * num_seqs * (length * (length + 1) / 2 + length * past)


def dense_cases() -> Iterator[Case]:
    """Yields cases with the same work as the prefill cases, by cuDNN."""
    for num_seqs, length in ((1, 2048), (1, 8192), (1, 16384), (16, 1024)):
        q, k, v = random(num_seqs * length, QKV_HEADS, HEAD_DIM).split(
            (HEADS, KV_HEADS, KV_HEADS), dim=1
        )
        call = partial(dense.fresh_prefill, q, k, v, (length,) * num_seqs, HEAD_DIM**-0.5)
        yield Case(
            f"dense prefill {num_seqs} x {length}",
            call,
            prefill_work(num_seqs, length, 0),
            "TFLOP/s",
        )
    q, k, v = random(8192, QKV_HEADS, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    dense.warm_dense_prefill(q, k, v, HEAD_DIM**-0.5)
    for past, length in ((8192, 8192), (8192, 7808), (24576, 8192)):
        inputs = paged_inputs([past + length], 64)
        starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        prefills = Prefills(inputs.paged(past + length), starts, length, ((past, length),))
        rows = q[:length], k[:length], v[:length]
        call = partial(TRITON.attention.prefill, *rows, inputs.kv, prefills, SPEC)
        yield Case(
            f"dense prefill {length} behind {past}", call, prefill_work(1, length, past), "TFLOP/s"
        )
        again = partial(paged_prefill, q[:length], inputs.kv, prefills, SPEC)
        yield Case(
            f"dense prefill {length} behind {past}, paged",
            again,
            prefill_work(1, length, past),
            "TFLOP/s",
        )


def elementwise_cases(num_tokens: int) -> Iterator[Case]:
    """Yields cases of elementwise kernels. Each reads its inputs and writes its outputs once, and
    the work counts those bytes."""
    x = random(num_tokens, HIDDEN)
    weight = random(HIDDEN)
    rows = num_tokens * DTYPE.itemsize
    yield Case(
        f"rms_norm {num_tokens}",
        partial(TRITON.norm.rms_norm, x, Norm(weight, 1e-5)),
        2 * rows * HIDDEN,
        "TB/s",
    )
    qkv = random(num_tokens, QKV_HEADS, HEAD_DIM)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    positions = torch.arange(num_tokens, device="cuda")
    cos = torch.ones(num_tokens, HEAD_DIM // 2, device="cuda")
    kv = paged_inputs([num_tokens], 16).kv
    slots = torch.randperm(num_tokens, device="cuda") + 16
    rope_work = rows * (2 * HEADS + 5 * KV_HEADS) * HEAD_DIM + num_tokens * HEAD_DIM * 4
    rope = partial(
        TRITON.kv.rope_write_kv, q, k, v, cos, torch.zeros_like(cos), positions, kv, slots
    )
    yield Case(f"rope_write_kv {num_tokens}", rope, rope_work, "TB/s")
    norms = HeadNorms(Norm(random(HEAD_DIM), 1e-6), Norm(random(HEAD_DIM), 1e-6))
    normed = partial(rope, norms)
    yield Case(f"rope_write_kv with norms {num_tokens}", normed, rope_work, "TB/s")

    silu = partial(TRITON.norm.gate, random(num_tokens, 2 * INTERMEDIATE), "silu")
    yield Case(f"silu_mul {num_tokens}", silu, 3 * rows * INTERMEDIATE, "TB/s")


def product_cases() -> Iterator[Case]:
    """Yields products of a decode batch's rows with each matrix of a layer and the head, by the op
    and by cuBLAS. The work counts weights."""
    shapes = {
        "qkv": (QKV_HEADS * HEAD_DIM, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "gate_up": (2 * INTERMEDIATE, HIDDEN),
    }
    shapes |= {"down": (HIDDEN, INTERMEDIATE), "head": (VOCAB, HIDDEN)}
    for name, shape in shapes.items():
        weight = random(*shape)
        work = shape[0] * shape[1] * DTYPE.itemsize
        for num_rows in (1, 2, 4, 8, 16, 32, 64):
            x = random(num_rows, shape[1])
            yield Case(
                f"product {name} {num_rows}", partial(linear, x, Matrix(weight)), work, "TB/s"
            )
            cublas = partial(torch.nn.functional.linear, x, weight)
            yield Case(f"product {name} {num_rows}, cuBLAS", cublas, work, "TB/s")


def copy_cases() -> Iterator[Case]:
    pool = random(512, KV_HEADS, 32, 2, 16, HEAD_DIM)  # 2 MiB a block
    src, dst = torch.randperm(512, device="cuda").split(256)
    work = 2 * 256 * pool.stride(0) * DTYPE.itemsize
    yield Case(
        "copy_blocks 256 x 2 MiB", partial(TRITON.kv.copy_blocks, pool, src, dst), work, "TB/s"
    )


def sampling_cases() -> Iterator[Case]:
    """Yields cases from logits to tokens. The work counts the logits once, although some kernels
    must read them twice. Normally distributed logits are the flattest case, in which a top_p alone
    keeps most of the vocabulary."""
    for rows in (1, 64, 512):
        logits = random(rows, VOCAB)
        work = rows * VOCAB * DTYPE.itemsize
        ones, zeros = (torch.full((rows,), value, device="cuda") for value in (1.0, 0.0))
        keys = torch.randint(-(2**31), 2**31, (rows,), device="cuda").int()
        top_k, off = (
            torch.full((rows,), value, dtype=torch.int32, device="cuda") for value in (50, VOCAB)
        )
        yield Case(
            f"sample {rows}, greedy", partial(TRITON.sampling.draw_tokens, logits), work, "TB/s"
        )
        yield Case(
            f"sample {rows}, drawn",
            partial(TRITON.sampling.draw_tokens, logits, ones, keys),
            work,
            "TB/s",
        )
        filtered = partial(filtered_draw, logits, ones, keys)
        yield Case(
            f"sample {rows}, top_k 50, top_p 0.9",
            partial(filtered, top_k, ones * 0.9, zeros),
            work,
            "TB/s",
        )
        yield Case(
            f"sample {rows}, top_p 0.9", partial(filtered, off, ones * 0.9, zeros), work, "TB/s"
        )
        peaked = partial(filtered_draw, logits * 4, ones, keys)
        yield Case(
            f"sample {rows}, top_p 0.9, peaked",
            partial(peaked, off, ones * 0.9, zeros),
            work,
            "TB/s",
        )

        counts = torch.zeros(rows + 1, VOCAB, dtype=torch.int32, device="cuda")
        counts.scatter_(1, torch.randint(VOCAB, (rows + 1, 1000), device="cuda"), 1)
        slots = torch.arange(1, rows + 1, dtype=torch.int32, device="cuda")
        settings = counts, slots, ones * 1.1, ones * 0.1, ones * 0.1
        yield Case(
            f"sample {rows}, penalties", partial(penalised_draw, logits, settings), work, "TB/s"
        )
        ids = torch.randint(VOCAB, (rows + 1, MAX_LOGIT_BIAS), device="cuda").int()
        edits = (
            slots,
            torch.full((rows + 1,), MAX_LOGIT_BIAS, device="cuda").int(),
            ids,
            torch.rand_like(ids.float()),
        )
        yield Case(
            f"sample {rows}, {MAX_LOGIT_BIAS} biases",
            partial(edited_draw, logits, edits),
            work,
            "TB/s",
        )
        scores = partial(TRITON.sampling.token_logprobs, logits, slots)
        yield Case(f"sample {rows}, logprob of one token", partial(scores, 0), work, "TB/s")
        yield Case(f"sample {rows}, logprobs of 5", partial(scores, 5), work, "TB/s")


def filtered_draw(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, *settings: torch.Tensor
) -> None:
    TRITON.sampling.draw_tokens(
        logits, temperature, keys, TRITON.sampling.cut_tokens(logits, temperature, *settings)
    )


def edited_draw(logits: torch.Tensor, edits: tuple[torch.Tensor, ...]) -> None:
    edited = logits.float()
    TRITON.sampling.apply_edits(edited, *edits)
    TRITON.sampling.draw_tokens(edited)


def penalised_draw(logits: torch.Tensor, settings: tuple[torch.Tensor, ...]) -> None:
    edited = logits.float()
    TRITON.sampling.apply_penalties(edited, *settings)
    TRITON.sampling.draw_tokens(edited)


def all_cases(block_sizes: list[int], sweep: bool) -> Iterator[Case]:
    for block_size in block_sizes:
        yield from decode_cases(block_size, sweep)
        yield from prefill_cases(block_size, sweep)
    yield from dense_cases()
    for num_tokens in (64, 8192):
        yield from elementwise_cases(num_tokens)
    yield from product_cases()
    yield from copy_cases()
    yield from sampling_cases()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--block-sizes",
        type=int,
        nargs="+",
        default=[16, 64, 128],
        help="KV block sizes of attention",
    )
    add_timer_arguments(parser)
    options = parser.parse_args()
    time_all(all_cases(options.block_sizes, options.sweep), options)


if __name__ == "__main__":
    main()
