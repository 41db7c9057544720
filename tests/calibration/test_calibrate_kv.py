"""`pdserve calibrate-kv`: scales of a text's largest keys and values, and what they cost."""

import json
from pathlib import Path

import pytest
import torch
from support.tiny_models import DEMO, make_tiny

from demo.sample_text import sample_text
from pdserve.calibration.cli import SAMPLE
from pdserve.calibration.kv_scales import calibrate, divergence
from pdserve.calibration.whole_prompts import WholePrompts
from pdserve.calibration.windows import CONTEXT, Window, windows_of
from pdserve.cluster.cli import main
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.kernels.ops import ops_for
from pdserve.models.config import read_spec
from pdserve.models.loader import load_model
from pdserve.models.registry import CausalLM

pytestmark = pytest.mark.lengthy

CPU = torch.device("cpu")
OPS = ops_for(CPU)


def loaded(folder: Path) -> CausalLM:
    return load_model(str(folder), read_spec(str(folder)), torch.float32, CPU, OPS)


def run(*arguments: str) -> int:
    return main(["calibrate-kv", *arguments])


def test_the_shipped_text_is_the_scripts() -> None:
    assert SAMPLE.read_text() == sample_text()


def test_the_demo_gets_scales_that_an_engine_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scales.json"
    assert run(str(DEMO), "--out", str(out), "--tokens", "3000") == 0
    said = capsys.readouterr().out
    assert "keys" in said and "━" in said and "3,000 tokens" in said and f"kv_scales: {out}" in said
    found = json.loads(out.read_text())
    assert 0 < found["mean_kl"] < 0.005 and found["tokens"] == 3000
    spec = read_spec(str(DEMO), kv_scales=str(out))
    assert spec.kv_scales is not None and len(spec.kv_scales.k) == spec.num_layers
    llm = LLM(str(DEMO), device="cpu", num_kv_blocks=64, kv_cache_dtype="fp8", kv_scales=str(out))
    prompt = (
        "The code of Mira is 4729. Tom lives in Oakdale.\nQuestion: Where does Tom live?\nAnswer:"
    )
    [answer] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert answer.outputs[0].text.strip().startswith("Oakdale.")


def test_scales_hold_the_largest_of_all_prompts(tmp_path: Path) -> None:
    """The first prompt is the longest; what the others leave in its place counts, too."""
    folder = make_tiny("llama3", tmp_path)
    model = loaded(folder)
    prompts = [
        [(start + 7 * n) % 250 for n in range(length)] for start, length in ((0, 50), (3, 40))
    ]
    windows = [Window(prompts[0]), Window(prompts[1], first=10)]
    found = calibrate(model, OPS, "float32", windows, 16)
    seen: dict[int, torch.Tensor] = {}
    for prompt in prompts:
        each = WholePrompts(model, OPS, "float32", len(prompt), 64)
        each.hidden(prompt)
        for layer, rows in each.kv_cache.layers.items():
            largest = rows[1, :, :, : len(prompt)].abs().amax((2, 3))
            seen[layer] = torch.maximum(seen.get(layer, largest), largest)
    for layer, largest in enumerate(found.largest):
        assert torch.equal(largest, seen[layer])
        for plane, scales in enumerate((found.scales.k, found.scales.v)):
            ratios = largest[:, plane] / torch.tensor(scales[layer])
            assert (ratios <= 448).all() and (ratios > 224).all()
    assert len(found.kl) == 80 and 0 < found.kl.mean() < 1


@pytest.mark.parametrize("length", [2, 3, 100, 1000])
@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 999, 2500])
def test_windows_judge_each_token_once_and_with_text_before_it(count: int, length: int) -> None:
    windows = windows_of(range(count), length)
    assert [token for window in windows for token in window.ids[window.first :]] == [*range(count)]
    for window in windows:
        assert len(window.ids) <= length
        assert window.ids == [*range(window.ids[0], window.ids[0] + len(window.ids))]
        assert window.first == (min(CONTEXT, length // 2) if window.ids[0] else 0)


def test_the_divergence_is_that_of_the_distributions(tmp_path: Path) -> None:
    model = loaded(make_tiny("llama3", tmp_path))
    prompts = WholePrompts(model, OPS, "float32", 300, 16)
    exact = prompts.hidden([n % 250 for n in range(300)])
    other = exact + torch.randn_like(exact) * 0.1
    p, q = (model.logits(x).double().log_softmax(-1) for x in (exact, other))
    want = (p.exp() * (p - q)).sum(-1)
    assert torch.allclose(divergence(model, exact, other).double(), want, atol=1e-4)
    assert divergence(model, exact, exact).abs().max() == 0


def test_whole_prompts_are_what_an_engine_computes(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path)
    ids = [n % 250 for n in range(70)]
    model = loaded(folder)
    logits = model.logits(WholePrompts(model, OPS, "float32", 70, 16).hidden(ids))
    llm = LLM(str(folder), tokenizer=False, device="cpu", num_kv_blocks=32)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    [found] = llm.generate([ids], params, use_tqdm=False)
    said = [each.logprob for each in found.prompt_logprobs or [] if each is not None]
    want = logits[:-1].log_softmax(-1)[torch.arange(69), ids[1:]]
    assert torch.allclose(torch.tensor(said), want, atol=1e-4)


def test_scales_that_cost_too_much_are_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scales.json"
    assert run(str(DEMO), "--out", str(out), "--tokens", "200", "--max-kl", "1e-12") == 2
    said = capsys.readouterr().err
    assert "--max-kl 1e-12" in said and "kv_cache_dtype: auto" in said and not out.exists()


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, empty, binary = (tmp_path / name for name in ("out.json", "empty", "binary"))
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe\x00")
    latents = make_tiny("deepseek-v2", tmp_path / "latents")
    for arguments, problem in (
        ((str(DEMO), "--out", str(tmp_path / "none" / "x.json")), "--out"),
        ((str(DEMO), "--out", str(out), "--text", str(tmp_path / "missing")), "missing"),
        ((str(DEMO), "--out", str(out), "--text", str(empty)), "is empty"),
        ((str(DEMO), "--out", str(out), "--text", str(binary)), "no UTF-8"),
        ((str(latents), "--out", str(out)), "attends over latents"),
    ):
        assert run(*arguments) == 2
        assert problem in capsys.readouterr().err
    assert not out.exists()
