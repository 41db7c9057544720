"""A KV cache in fp8: an engine's logits are those of a model whose attention sees rounded rows."""

from pathlib import Path

import pytest
import torch
from engine.harness import make_engine
from support.dense_model import dense_attend
from support.quantised import write_kv_scales
from support.tiny_models import make_tiny

from pdserve.engine.llm import LLM, SamplingParams
from pdserve.engine.memory.row_scales import row_scales
from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.kv.ops import HeadNorms
from pdserve.kernels.kv.reference import apply_rope, norm_heads
from pdserve.kernels.ops import ops_for
from pdserve.models.config import read_spec
from pdserve.models.kv_scales import KvScales
from pdserve.models.loader import load_model
from pdserve.models.step_context import RopeTables, StepContext

CPU = torch.device("cpu")
PROMPT = [(17 * n + 5) % 250 for n in range(70)]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)


def in_e4m3(x: torch.Tensor, scales: tuple[float, ...]) -> torch.Tensor:
    """Rows `[T, heads, D]`, rounded as their heads are scaled."""
    each = torch.tensor(scales)[:, None]
    return (x / each).clamp(-448, 448).to(torch.float8_e4m3fn).float() * each


def dense_logits(folder: Path, ids: list[int], is_rounded: bool) -> torch.Tensor:
    """Compute the logits of all positions at once, by dense attention over keys and values."""
    spec = read_spec(str(folder))
    model = load_model(str(folder), spec, torch.float32, CPU, ops_for(CPU))
    ones = ((1.0,) * spec.num_kv_heads,) * spec.num_layers
    scales = spec.kv_scales or KvScales(k=ones, v=ones)
    dense = dense_attend()

    def attend(
        layer: int,
        attention: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: RopeTables,
        norms: HeadNorms | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        cos, sin = rope
        positions = torch.arange(len(q))
        q, k = apply_rope(*norm_heads(q, k, norms), cos, sin, positions)
        if is_rounded:
            k, v = in_e4m3(k, scales.k[layer]), in_e4m3(v, scales.v[layer])
        still = torch.ones_like(cos), torch.zeros_like(sin)
        return dense(layer, attention, q, k, v, still, None, sinks)

    stream = model.embed(torch.tensor(ids), step := StepContext(attend, torch.arange(len(ids))))
    return model.logits(model.hidden(model.forward(stream, step)))


@pytest.mark.parametrize("family", ["llama3", "qwen3", "mixtral"])
@pytest.mark.parametrize("has_scales", [False, True])
def test_tokens_are_those_over_rounded_rows(family: str, has_scales: bool, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path)
    if has_scales:
        write_kv_scales(folder)
    llm = LLM(str(folder), tokenizer=False, device="cpu", num_kv_blocks=64, kv_cache_dtype="fp8")
    assert llm.engine.layout.groups[0].dtype == "fp8_e4m3"
    [found] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    tokens = found.outputs[0].token_ids
    ids = [*PROMPT, *tokens]
    logprobs = found.outputs[0].logprobs
    assert logprobs is not None
    said = torch.tensor([each.logprob for each in logprobs])

    def gap(logits: torch.Tensor) -> float:
        found = logits[len(PROMPT) - 1 : -1].log_softmax(-1)[torch.arange(len(tokens)), tokens]
        return (found - said).abs().max().item()

    rounded, plain = (gap(dense_logits(folder, ids, is_rounded)) for is_rounded in (True, False))
    # a last bit may put a number on the other side of e4m3's middle
    assert rounded < 0.01 and rounded < plain / 10


def test_twice_as_many_blocks_and_rows_of_their_own(tmp_path: Path) -> None:
    """Rows of another dtype, or of other scales, are other rows: by prefix, hand-off and pool."""
    folder = make_tiny("llama3", tmp_path)
    plain, fp8 = (make_engine(folder, kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    assert plain.layout.token_bytes == 4 * fp8.layout.token_bytes
    assert plain.model_fingerprint == fp8.model_fingerprint
    digests = {plain.rows_digest, fp8.rows_digest}
    write_kv_scales(folder)
    digests.add(make_engine(folder, kv_cache_dtype="fp8").rows_digest)
    write_kv_scales(folder, seed=1)
    digests.add(make_engine(folder, kv_cache_dtype="fp8").rows_digest)
    assert len(digests) == 4


def test_a_rank_has_its_own_heads_scales_on_its_device() -> None:
    """Under the scales of another head e4m3 is nearly as exact, so tokens would show no error."""
    scales = KvScales(
        k=((1.0, 2.0, 4.0, 8.0), (1.0,) * 4), v=((0.5, 1.0, 0.25, 2.0), (1.0, 1.0, 1.0, 0.5))
    )
    spec = AttentionSpec(4, 2, 16, 0.25, first_kv_head=2)
    found = row_scales(scales, {0: spec, 1: spec}, CPU)
    assert found[0].k.tolist() == [4.0, 8.0] and found[0].v.tolist() == [0.25, 2.0]
    assert found[1].k.tolist() == [1.0, 1.0] and found[1].v.tolist() == [1.0, 0.5]
    first = AttentionSpec(4, 2, 16, 0.25)
    assert row_scales(scales, {0: first, 1: first}, CPU).keys() == {0}, "none that are all 1"
    assert row_scales(None, {0: spec}, CPU) == {}


def test_what_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("deepseek-v2", tmp_path)
    with pytest.raises(ValueError, match=r"kv_cache_dtype: fp8 is not supported for latents.*auto"):
        make_engine(folder, kv_cache_dtype="fp8")
