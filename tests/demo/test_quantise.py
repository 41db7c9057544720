"""The scripts that quantise the demo model, and that say what it costs."""

import sys
from pathlib import Path

import pytest

from demo import quality, quantise
from demo.quality import ROWS, Measure, Row

pytestmark = pytest.mark.lengthy


FP8_KL, INT4_KL = 0.001, 0.02  # largest mean KL to the model in 16 bits, in nats
NUM_PROMPTS = 20  # of 300 at most two may be wrong, so of these none
SAMPLE = {Row("ct-int4-fp8"), Row("16 bits", "fp8")}


@pytest.fixture(scope="module")
def measure() -> Measure:
    return Measure(num_tokens=6000, num_prompts=NUM_PROMPTS)


def most_of(row: Row) -> float:
    """Returns the bound of the row. Weights and KV cache may each cost theirs."""
    weights = 0.0
    if row.weights != "16 bits":
        is_int4 = row.weights.startswith(("ct-int4", "awq", "gptq"))
        weights = INT4_KL if is_int4 else FP8_KL
    return weights + (FP8_KL if row.kv_dtype == "fp8" else 0.0)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[] if row in SAMPLE else [pytest.mark.slow])
        for row in ROWS
        if row != Row("16 bits")
    ],
    ids=str,
)
def test_formats_cost_the_demo_little(row: Row, measure: Measure) -> None:
    found = measure.quality(row)
    assert 0 < found.kl <= most_of(row) and found.recall == NUM_PROMPTS


def test_a_format_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "awq"
    monkeypatch.setattr(sys, "argv", ["quantise", "awq", str(out)])
    assert quantise.main() == 0
    assert "bytes of weights" in capsys.readouterr().out
    assert (out / "tokenizer.json").is_file()
    with pytest.raises(SystemExit):
        quantise.main()
    assert "exists already" in capsys.readouterr().err
    assert quality.MODEL_DIR == quantise.MODEL_DIR
