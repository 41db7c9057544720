"""The benchmark of what grammars cost an engine's steps, on CPU."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.engine import structured
from benchmarks.support.places import DEMO


@pytest.mark.processes
def test_a_line_says_on_which_device_a_case_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    given = [str(DEMO), "--device", "cpu", "--rows", "2", "--seconds", "0.5", "--schemas", "2"]
    cases = ["plain", "simple", "mixed"]
    monkeypatch.setattr(sys, "argv", ["structured", *given, "--cases", *cases, "--out", str(out)])
    monkeypatch.setattr(structured, "WARM_S", 0.1)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # importing the tokenizer sets it
    structured.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["case"], row["device"]) for row in rows] == [(case, "cpu") for case in cases]
    assert all(row["steps"] > 0 and row["mean_ms"] > 0 for row in rows)
    assert [row["grammars_built"] > 0 or row["masks"] > 0 for row in rows] == [False, True, True]
