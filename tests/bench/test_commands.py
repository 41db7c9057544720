"""`pdserve bench ...` as a user types it: results, JSON lines, and errors that say what to do."""

import json
from pathlib import Path

import pytest
from sse_server import Behaviour, served

from pdserve.cluster.cli import main


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_latency_of_a_tiny_model(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [
        "bench",
        "latency",
        "--model",
        str(tiny_llama),
        "--batch-size",
        "1",
        "3",
        "--input-len",
        "20",
    ]
    arguments += [
        "--output-len",
        "1",
        "4",
        "--repeats",
        "2",
        "--device",
        "cpu",
        "--out",
        str(out),
        "--commit",
        "abc",
    ]
    assert main(arguments) == 0
    rows = lines(out)
    assert [row["shape"] for row in rows] == ["1x20x1", "1x20x4", "3x20x1", "3x20x4"]
    assert [row["decode_ms_per_token"] is None for row in rows] == [True, False, True, False]
    for row in rows:
        assert row["prefill_ms"]["median"] > 0 and row["commit"] == "abc" and row["device"] == "cpu"
        assert row["engine"] == {"enable_prefix_caching": False, "device": "cpu"}
    decode = rows[3]["decode_ms_per_token"]["median"]
    assert decode == pytest.approx(
        (rows[3]["seconds"]["median"] * 1e3 - rows[3]["prefill_ms"]["median"]) / 3, rel=0.5
    )
    assert "decode ms/token" in capsys.readouterr().out


@pytest.mark.processes
def test_throughput_of_random_weights(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [
        "bench",
        "throughput",
        "--model",
        str(tiny_llama),
        "--load-format",
        "dummy",
        "--shape",
        "5x4-9x3",
    ]
    assert (
        main(
            [
                *arguments,
                "--shape",
                "2x8x2",
                "--repeats",
                "1",
                "--max-num-seqs",
                "2",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    first, second = lines(out)
    assert (first["shape"], second["shape"]) == ("5x4-9x3", "2x8x2")
    assert first["engine"]["max_num_seqs"] == 2 and first["load_format"] == "dummy"
    assert second["tokens_per_s"]["median"] == pytest.approx(
        20 / second["seconds"]["median"], rel=0.01
    )
    assert second["output_tokens_per_s"]["median"] == pytest.approx(
        4 / second["seconds"]["median"], rel=0.01
    )


@pytest.mark.processes
def test_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [
        "bench",
        "serve",
        "--num-requests",
        "4",
        "--input-len",
        "6",
        "--output-len",
        "2-3",
        "--out",
        str(out),
    ]
    with served(Behaviour()) as url:
        assert main([*arguments, "--url", url, "--clients", "2"]) == 0
        assert main([*arguments, "--url", url, "--request-rate", "50", "--model", "named"]) == 0
    closed, opened = lines(out)
    assert closed["model"] == "fake" and closed["clients"] == 2 and closed["shape"] == "4x6x2-3"
    assert opened["model"] == "named" and opened["rate"] == 50 and opened["num_finished"] == 4
    shown = capsys.readouterr().out
    assert (
        "TTFT  p50" in shown
        and "gap  p50" in shown
        and "4 finished, 0 failed" in shown
        and "of a core" in shown
    )


@pytest.mark.processes
def test_serve_with_failures_has_status_1_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with served(Behaviour(fault="error", every=2)) as url:
        arguments = [
            "bench",
            "serve",
            "--url",
            url,
            "--clients",
            "1",
            "--num-requests",
            "4",
            "--warmups",
            "0",
        ]
        assert main([*arguments, "--input-len", "3", "--output-len", "4"]) == 1
    shown = capsys.readouterr().out
    assert "2 finished, 2 failed" in shown and "the worker died" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["throughput", "--shape", "1x500x100", "--model", "TINY"],
            "requests of 600 tokens, but the engine takes 512",
        ),
        (["throughput", "--shape", "1x8x8", "--block-size", "17"], "--block-size: "),
        (
            ["throughput", "--shape", "1x8x8", "--block-size", "["],
            "--block-size: not a value in YAML",
        ),
        (
            ["throughput", "--shape", "1x8x8", "--kv-memory-fraction", ".nan"],
            "--kv-memory-fraction: ",
        ),
        (["throughput", "--shape", "1x8x8", "--model", "no/where/at all"], "is not a local folder"),
        (["throughput", "--shape", "1x8x8", "--out", "no/folder/out.jsonl"], "no/folder/out.jsonl"),
        (["serve", "--clients", "1", "--extra-body", "[1]"], "--extra-body must be a JSON object"),
        (["serve", "--clients", "1", "--extra-body", "{"], "--extra-body is not JSON"),
        (
            ["serve", "--clients", "1", "--url", "http://127.0.0.1:9"],
            "no server at http://127.0.0.1:9",
        ),
    ],
)
def test_mistakes_are_told(
    arguments: list[str], message: str, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *(str(tiny_llama) if a == "TINY" else a for a in arguments)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--shape", "64x"], "must look like 64x1024x256"),
        (["throughput", "--shape", "²x8x8"], "must look like 64x1024x256"),
        (["latency", "--input-len", "a"], "must look like 1024"),
        (
            ["latency", "--input-len", "10-20"],
            "--input-len: latency needs fixed lengths, not '10-20'",
        ),
        (
            ["latency", "--output-len", "8", "4-9"],
            "--output-len: latency needs fixed lengths, not '4-9'",
        ),
        (["latency", "--batch-size", "8", "0"], "--batch-size: must be at least 1, not 0"),
        (["latency", "--repeats", "-3"], "--num-iters: must be at least 1, not -3"),
        (["latency", "--seed", "-1"], "--seed: must be from 0 to"),
        (
            ["throughput", "--shape", "1x8x8", "--repeats", "nan"],
            "must be an integer, at least 1, not 'nan'",
        ),
        (["serve", "--clients", "0"], "must be at least 1, not 0"),
        (["serve", "--clients", "1", "--num-requests", "0"], "must be at least 1, not 0"),
        (
            ["serve", "--clients", "1", "--vocab-size", "1"],
            "--vocab-size: must be from 2 to 2147483648, not 1",
        ),
        (["serve", "--clients", "1", "--warmups", "-1"], "must be at least 0, not -1"),
        (
            ["serve", "--clients", "1", "--timeout", "nan"],
            "--timeout: must be a finite number above 0, not 'nan'",
        ),
        (
            ["serve", "--clients", "1", "--timeout", "inf"],
            "--timeout: must be a finite number above 0, not 'inf'",
        ),
        (
            ["serve", "--clients", "1", "--timeout", "0"],
            "--timeout: must be a finite number above 0, not '0'",
        ),
        (["serve", "--rate", "-1"], "must be a finite number above 0, not '-1'"),
        (["serve", "--rate", "nan"], "must be a finite number above 0, not 'nan'"),
        (["throughput"], "--shape"),
        (["serve"], "--clients"),
        (["serve", "--clients", "1", "--rate", "1"], "not allowed with"),
    ],
)
def test_unreadable_arguments_are_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
