"""Tests benchmarks/transfer/kv_transfer.py between two real processes on CPU, and what it
refuses."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.transfer import kv_transfer, transfer_sides
from pdserve.configs.kv_layout import KVLayout


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["kv_transfer.py", "--device", "cpu", *map(str, arguments)])
    return kv_transfer.main()


@pytest.mark.processes
def test_rows_of_fresh_and_aged_pools(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = [
        "--model",
        tiny_llama,
        "--tokens",
        33,
        512,
        "--block-sizes",
        16,
        "--repeats",
        2,
        "--out",
        out,
    ]
    assert run(monkeypatch, *arguments, "--pool-tokens", 1024) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["pool"], row["tokens"]) for row in rows] == [
        ("fresh", 33),
        ("fresh", 512),
        ("aged", 33),
        ("aged", 512),
    ]
    long_fresh = rows[1]
    long_aged = rows[3]
    assert long_fresh["descriptors"] == 1 < long_aged["descriptors"]
    assert rows[0]["bytes"] * 32 == long_fresh["bytes"] * 3, "33 rows lie in three blocks of 16"
    assert all(row["gb_per_s"] > 0 and row["transport"] and row["plain copy"] > 0 for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4 and "plain copy, GB/s" in lines[0]


@pytest.mark.processes
def test_a_pool_that_holds_one_prompt(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        "--model",
        tiny_llama,
        "--tokens",
        512,
        "--pool-tokens",
        512,
        "--block-sizes",
        64,
        "--repeats",
        1,
    ]
    assert run(monkeypatch, *arguments) == 0


@pytest.mark.processes
@pytest.mark.slow
def test_blocks_of_other_sizes_at_the_sink(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = [
        "--model",
        tiny_llama,
        "--tokens",
        100,
        "--block-sizes",
        16,
        64,
        "--sink-block-sizes",
        32,
        64,
    ]
    assert run(monkeypatch, *arguments, "--ages", "aged", "--repeats", 1, "--out", out) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    sizes = [(row["block_size"], row["to_block_size"]) for row in rows]
    assert sizes == [(16, 32), (16, 64), (64, 32), (64, 64)]
    assert all(row["gb_per_s"] > 0 for row in rows), "and the bytes of the first were compared"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens: must be at least 1, not 0"),
        (["--tokens", "64", "--pool-tokens", "32"], "--pool-tokens (32) must hold the longest"),
        (["--model", "no/such/folder"], "no/such/folder"),
    ],
)
def test_mistakes_are_told(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.processes
def test_wrong_bytes_are_noticed() -> None:
    """By the check that every case begins with."""
    layout = KVLayout.uniform(num_layers=1, heads=(0,), head_dim=8, block_size=16, dtype="float32")
    case = kv_transfer.Case((layout, layout), 112, (16,), ("fresh",), 1, "cpu", None, 1000)
    side = transfer_sides.Side(case, 1)
    try:
        side.words[2] = transfer_sides.contents(torch.tensor([5]), side.words.shape[1])[0]
        transfer_sides._check(side, [2], (5,), 16)
        side.words[2, -1] += 1
        with pytest.raises(ValueError, match="not those of the source"):
            transfer_sides._check(side, [2], (5,), 16)
    finally:
        side.close()
