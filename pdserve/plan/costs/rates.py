"""Measured rates of a card and of the links between several. Each names its source.

The sources are files of benchmarks/results: kernels and rows of one GPU, and sums over two and four
GPUs that were measured alone. No constant is fitted to a row of several GPUs, so those rows test
the model. step.py and benchmarks/costs/run.py use this module.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rates:
    """Constants in seconds, bytes per second, and operations per second."""

    # Reading weights for few rows. mixtures-h200.txt, "A row times matrices": 13.9 us for
    # 6144 x 4096 and 58 us for 28672 x 4096 give 1.9 us and 4.19 TB/s.
    weight_bytes_per_s: float = 4.19e12
    # The cost of a product beyond its bytes. row_tail_s is for one row, from the same source.
    # rows_tail_s is for 2 to 511 rows. It is fitted to the 64-row steps of step-profile-h200.jsonl
    # (92e01d9: 4.08 ms for four products of 32 layers, of which 3.61 are bytes and arithmetic).
    row_tail_s: float = 1.9e-6
    rows_tail_s: float = 3.7e-6
    # Matrix products on a hot card: products-h200.txt, 8,192 rows, 114.3 TFLOP in 174.2 ms.
    flops_per_s: float = 656e12
    # The same products while the card's power is not at its limit: step-profile-h200.jsonl,
    # 869f03b, "prefill 8192", 150.9 ms. A card that rests gathers as much time at this rate as it
    # rested, up to rest_s: the loops of products-h200.txt are at the limit, and last 0.25 s.
    rested_flops_per_s: float = 757e12
    rest_s: float = 0.25
    # Experts, counting the padding rows that fill their tiles: mixtures-h200.txt, "prefill 8192" of
    # qwen3-30b-a3b, 54.6 ms in 48 layers.
    expert_flops_per_s: float = 612e12
    # The experts' two kernels beyond their bytes, for more than one row (one row takes two
    # row_tail_s): kernels-h200.jsonl, "experts qwen3 2", 44 us, of which 34 are bytes.
    experts_tail_s: float = 8e-6
    # Router: kernels-h200.jsonl, "route qwen3" 1 and 8192, without the product's own tail.
    route_s: float = 3.0e-6
    route_row_s: float = 5.4e-9

    # Keys and values of decodes: kernels-h200.jsonl, 64 x 8192 and 256 x 1024 in blocks of 16.
    kv_bytes_per_s: float = 4.2e12
    # Latents of decodes: log.md, "Latents again", 512 x 512 in 87 us.
    latent_bytes_per_s: float = 3.5e12
    # A decode's attention beyond its bytes, merge included: kernels-h200.jsonl, "decode 1 x 128".
    attention_tail_s: float = 8.0e-6
    # A prompt's attention: kernels-h200.jsonl, "dense prefill" of 2,048, 8,192 and 16,384 tokens.
    # Its 83, 974 and 3,732 us give a rate, a number of keys per row beyond the causal ones, and a
    # tail.
    prompt_flops_per_s: float = 612e12
    prompt_extra_keys: float = 303
    prompt_tail_s: float = 10e-6

    # Norms, rotation, activation, and gathering the experts' rows: step-profile-h200.jsonl,
    # prefill 8192 (21cb887).
    light_bytes_per_s: float = 4.0e12
    # Each such kernel beyond its bytes: fitted to one row of llama-3.1-8b (targets-h200.jsonl).
    light_tail_s: float = 1.2e-6
    # Greedy choice: rate at which kernels-h200.jsonl, "sample 512, logprob of one token", reads
    # logits.
    sample_bytes_per_s: float = 1.85e12

    # A sum over two GPUs of up to 32 rows, fused with the residual and the norm: sums-h100.jsonl,
    # 20db3bd, 3.75 us at 8 KiB and 5.25 at 256 KiB. Words of 8 bytes carry 4 bytes. The links of an
    # H100 and an H200 are alike.
    sum_s: float = 3.7e-6
    # For each rank beyond two: sums-h200.jsonl, 47182d0, four ranks, 6.8 us at 8 to 64 KiB.
    more_ranks_s: float = 1.6e-6
    word_bytes_per_s: float = 350e9
    # More rows, from the same table, alone: 10.5 us at 1 MiB and 234 at 64 MiB.
    many_sum_s: float = 6.5e-6
    store_bytes_per_s: float = 295e9
    # More than two ranks, which sum in two steps: 22.7 us at 512 KiB and 456 at 64 MiB (the same).
    two_step_s: float = 20.5e-6
    two_step_bytes_per_s: float = 237e9
    # A flag over NVLink and back to the waiting rank: a flagged sum of 8 KiB, measured before the
    # engine had tensor parallelism.
    flag_s: float = 2.3e-6

    # The host's turn of a decode step: log.md, "Host time of a decode step by the engine's own
    # clock", 0.39, 0.91 and 2.54 ms for 1, 64 and 256 rows.
    host_step_s: float = 0.38e-3
    host_row_s: float = 8.4e-6
    # The share of that turn that plans and sends; the rest collects. The split was not measured.
    host_planning_share: float = 0.5
    # Writing and reading the message to other ranks: log.md, 256 decodes.
    message_s: float = 24e-6
    # Host time before a prompt's first kernel: log.md, 2.8 ms for 8,192 tokens.
    host_prompt_s: float = 0.5e-3
    host_token_s: float = 0.28e-6
    # Launches per layer, below which an eager step cannot go. Prompts of 128 tokens take 7.1 ms in
    # 32 layers (targets-h200.jsonl), and 28.8 ms in 48 layers of a mixture (mixtures-h200.jsonl).
    launch_dense_s: float = 0.2e-3
    launch_mixture_s: float = 0.57e-3

    # A hand-off: kv-transfer-h200.jsonl, d05d49d. The rate is from 8,192 tokens of fresh blocks of
    # 16 (295 GB/s). The seconds are what 1,024 tokens take beyond their bytes.
    hand_over_bytes_per_s: float = 295e9
    hand_over_s: float = 0.35e-3
    # Time that HTTP, routers and messages add to a first token: log.md, 2.4 ms.
    http_s: float = 2.4e-3

    # Memory of the card that the engine uses: 0.9 (EngineConfig.kv_memory_fraction) of 139.8 GiB,
    # minus 2 GiB for a step.
    memory_bytes: float = (0.9 * 139.8 - 2) * 2**30


H200 = Rates()
# An H100 computes like an H200, and its memory is slower: quantised-products-h100.jsonl, a layer of
# one row, and attention-e4m3-h100.jsonl, 64 x 1,150 keys. It has 79.2 GiB.
H100 = replace(
    H200,
    weight_bytes_per_s=2.9e12,
    kv_bytes_per_s=2.8e12,
    latent_bytes_per_s=2.8e12,
    light_bytes_per_s=2.8e12,
    sample_bytes_per_s=1.3e12,
    memory_bytes=(0.9 * 79.2 - 2) * 2**30,
)
