"""The scripts that quantise the demo model, and that say what it costs."""

import sys
from pathlib import Path

import pytest

from demo import quality, quantise
from demo.quality import Measure, Row

pytestmark = pytest.mark.lengthy


@pytest.fixture(scope="module")
def measure() -> Measure:
    return Measure(num_tokens=1500, num_prompts=10)


@pytest.mark.parametrize(
    ("row", "most"),
    [
        (Row("fp8-blocks"), 0.001),
        (Row("online fp8"), 0.001),
        (Row("awq"), 0.02),
        (Row("16 bits", "fp8"), 0.001),
    ],
    ids=str,
)
def test_formats_cost_the_demo_little(row: Row, most: float, measure: Measure) -> None:
    found = measure.quality(row)
    assert 0 < found.kl < 2 * most and found.recall >= 9


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
