"""Tests benchmarks/targets/measure.py: the shipped table, marks, the table of saved results, and a
run over a tiny model."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from sse_server import Behaviour, served

from benchmarks.support.served_cluster import stop
from benchmarks.support.stand_in_tokenizer import make_tokenizer, servable_folder
from benchmarks.targets import measure as targets
from benchmarks.targets.table import (
    BEHIND,
    BETWEEN,
    REACHED,
    choose,
    mark,
    read_model,
    read_results,
    read_rows,
    render,
)
from pdserve.configs.schema import ClusterConfig
from pdserve.text.tokenizer import Tokenizer

TABLES = Path(targets.__file__).parent
QUANTISED = [f"llama-3.1-8b-{kind}" for kind in ("fp8", "fp8-kv", "awq", "gptq", "int4-fp8")]
SHIPPED = TABLES / "targets.toml"
TABLE = """
[[offline]]
id = "decode"
work = "decode, batch 1"
kind = "latency"
shape = "1x9x3"
metric = "decode_ms_per_token"
unit = "ms/token"
vllm = 5.0
floor = 3.0
target = 4.0

[[offline]]
id = "batch"
work = "batch of 4"
kind = "throughput"
shape = "4x9x3"
metric = "tokens_per_s"
unit = "tok/s"
vllm = 30000
target = 36700

[[http]]
id = "clients"
work = "2 clients"
clients = 2
shape = "4x9x3"
vllm = { ttft_p50 = 10, ttft_p99 = 20, tpot_p50 = 5, tpot_p99 = 6, tok_s = 100 }

[[http]]
id = "poisson"
work = "50 req/s"
rate = 50
shape = "4x9x3"
vllm = { ttft_p50 = 10, ttft_p99 = 20, tpot_p50 = 5, tpot_p99 = 6, tok_s = 100 }
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.toml"
    path.write_text(TABLE)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["targets.py", *map(str, arguments)])
    return targets.main()


def saved(path: Path, **values: float) -> Path:
    """Results of a run as they lie in a file: offline medians by row id; HTTP rows all alike."""
    load = {
        "ttft_ms": {"p50": 9.0, "p99": 25.0},
        "tpot_ms": {"p50": 5.0, "p99": 6.1},
        "output_tokens_per_s": 99.0,
    }
    load |= {"num_failed": 0, "client_cpu_share": 0.25}
    metrics = {"decode": "decode_ms_per_token", "batch": "tokens_per_s"}
    with path.open("a") as out:
        for row, value in values.items():
            figures = (
                {metrics[row]: {"median": value}}
                if row in metrics
                else load | {"num_failed": int(value)}
            )
            result = {
                "benchmark": "targets",
                "row": row,
                "model": "a-model",
                "device": "A GPU",
                "commit": "abc",
                "figures": figures,
            }
            out.write(json.dumps(result) + "\n")
    return path


def line_of(text: str, start: str, after: int = 0) -> list[str]:
    lines = text.splitlines()
    index = next(i for i, line in enumerate(lines) if line.startswith(f"| {start}"))
    return [cell.strip() for cell in lines[index + after].strip("|").split("|")]


def test_the_shipped_table_has_the_rows_of_the_targets_page() -> None:
    rows = read_rows(SHIPPED)
    assert len(choose(rows, ["offline"])) == 10 and len(choose(rows, ["http"])) == 5
    assert len(choose(rows, ["pair"])) == 6 and len({row.id for row in rows}) == 21
    assert choose(rows, []) == choose(rows, ["offline", "http"]), "what one GPU can do"
    assert [row.id for row in choose(rows, ["http-32", "start"])] == ["start", "http-32"]
    text = render(rows, {})
    vllm = ["1 client, 8,192/32", "vLLM", "249.0 / 275.0", "-", "4.83 / 4.85", "-", "", ""]
    assert line_of(text, "1 client, 8,192/32") == vllm
    assert line_of(text, "1 client, 8,192/32", after=1)[1:5] == [
        "must reach",
        "210.0 / -",
        "12.00",
        "- / -",
    ]
    assert line_of(text, "64 clients, 1,024/128", after=1)[2:5] == ["- / -", "", "- / 6.80"], (
        "no target for the gap"
    )
    assert line_of(text, "decode, batch 1") == [
        "decode, batch 1, 128 in / 256 out",
        "4.91 ms/token",
        "3.37",
        "≤ 4.1",
        "-",
        "",
        "",
    ]
    assert line_of(text, "15 req/s")[1:5] == ["vLLM", "169.0 / 412.0", "22.60 / 41.50", "1,767"]


def test_every_model_has_a_table_with_ids_of_its_own() -> None:
    tables = {path.stem: read_rows(path) for path in TABLES.glob("*.toml")}
    assert {name: len(rows) for name, rows in tables.items()} == {
        "targets": 21,
        "qwen3-30b-a3b": 6,
        "deepseek-v2-lite": 5,
        **dict.fromkeys(QUANTISED, 5),
    }
    assert len({row.id for rows in tables.values() for row in rows}) == 57
    for name in ("qwen3-30b-a3b", "deepseek-v2-lite", *QUANTISED):
        model = read_model(TABLES / f"{name}.toml")
        assert model.name == name.removesuffix("-kv") and (model / "config.json").is_file()
        assert choose(tables[name], []) == tables[name]
        text = render(tables[name], {})
        assert text.startswith("One GPU, offline\n") and "streaming" not in text
    assert read_model(SHIPPED).name == "llama-3.1-8b"
    assert line_of(render(tables["qwen3-30b-a3b"], {}), "256 x (128 in")[1:4] == [
        "6.01 s",
        "",
        "≤ 5.2",
    ]
    assert line_of(render(tables["deepseek-v2-lite"], {}), "512 x (256 in")[1:4] == [
        "51,273 tok/s",
        "",
        "≥ 56,000",
    ]


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        ((), "llama-3.1-8b"),
        (("--table", TABLES / "qwen3-30b-a3b.toml"), "qwen3-30b-a3b"),
        (("--table", TABLES / "qwen3-30b-a3b.toml", "--model", "m"), "m"),
    ],
)
def test_a_table_names_its_model(
    arguments: tuple[object, ...], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measure(_: object, options: argparse.Namespace) -> tuple[dict, list]:
        asked.append(Path(options.model).name)
        return {}, []

    monkeypatch.setattr(targets, "measure", measure)
    assert run(monkeypatch, *arguments) == 0
    assert asked == [model]


def test_of_several_models_in_one_file_the_tables_own_rows_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And where the time of their requests went, of no others."""
    path = saved(tmp_path / "r.jsonl", decode=4.5, clients=1)
    other = json.loads(path.read_text().splitlines()[-1])
    other["figures"]["share"] = {"of": "another model's requests"}
    path.write_text(path.read_text() + json.dumps(other) + "\n")
    result = {"benchmark": "targets", "row": "qwen3-decode-1", "model": "qwen3-30b-a3b"}
    result |= {"device": "A GPU", "commit": "abc"}
    figures = {"decode_ms_per_token": {"median": 2.5}}
    with path.open("a") as out:
        out.write(json.dumps(result | {"figures": figures}) + "\n")
    assert run(monkeypatch, "--table", TABLES / "qwen3-30b-a3b.toml", "--from", path) == 0
    text = capsys.readouterr().out
    assert line_of(text, "decode")[2:] == ["1.37", "≤ 2.7", "2.50", "1.68", REACHED]
    assert line_of(text, "prefill")[4] == "-"
    assert "ours: qwen3-30b-a3b, A GPU, abc" in text
    assert "a-model" not in text and "http_share" not in text


def test_pair_rows_are_held_to_what_ours_must_reach(table: Path, tmp_path: Path) -> None:
    with table.open("a") as out:
        out.write(
            '[[pair]]\nid = "split"\nwork = "split, 2 clients"\nclients = 2\nshape = "4x9x3"\n'
            "vllm = { ttft_p50 = 10, ttft_p99 = 20, tpot_p50 = 5 }\ntarget = { ttft_p50 = 8 }\n"
        )
    rows = read_rows(table)
    text = render(rows, read_results(saved(tmp_path / "r.jsonl", split=0)))
    assert "Two GPUs, 1P + 1D" in text
    assert line_of(text, "split, 2 clients", after=2)[1:5] == [
        "ours",
        "9.00 ~ / 25.00 ✗",
        "5.00 ✓ / 6.10",
        "99.00",
    ]


def test_the_gap_behind_the_first_token_is_shown_where_it_has_a_target(
    table: Path, tmp_path: Path
) -> None:
    row = (
        '[[pair]]\nid = "{0}"\nwork = "{0} pair"\nclients = 1\nshape = "4x9x3"\n'
        "vllm = {{ ttft_p50 = 10 }}\n"
    )
    with table.open("a") as out:
        out.write(row.format("gap") + "target = { gap_p50 = 12 }\n" + row.format("plain"))
    rows = read_rows(table)
    results = read_results(saved(tmp_path / "r.jsonl", gap=0, plain=0))
    assert line_of(render(rows, results), "load", after=0)[3] == "TPOT p50 / p99 ms", (
        "of the loads on one GPU"
    )
    for gap, cell in ((11.9, f"11.90 {REACHED}"), (12.1, f"12.10 {BEHIND}"), (None, f"- {BEHIND}")):
        for result in results.values():
            result["figures"]["gap_ms"] = {"p50": gap}
        text = render(rows, results)
        assert line_of(text, "gap pair", after=2)[3] == cell
        assert line_of(text, "plain pair", after=1)[3] == ""
    del results["gap"]["figures"]["gap_ms"]
    assert line_of(render(rows, results), "gap pair", after=2)[3] == f"- {BEHIND}", (
        "a result of an older run"
    )


@pytest.mark.parametrize("replicas", [False, True])
def test_pair_rows_have_a_prefill_and_a_decode_worker_or_two_whole_ones(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: bool
) -> None:
    given = {
        "engine_device": "cpu",
        "model": str(tiny_llama),
        "dtype": "auto",
        "load_format": "dummy",
        "quantization": None,
        "activation_dtype": "16-bit",
    }
    slo = [150.0, 6.5] if replicas else None
    options = argparse.Namespace(
        **given, sequential=True, split="always", slo=slo, replicas=replicas
    )
    monkeypatch.setattr(targets, "engine_fields", lambda _: {"device": "cpu"})
    args = targets.cluster_document(options, tmp_path, 1, is_pair=True)["applications"][0]["args"]
    config = ClusterConfig(**args)
    expected = ("aggregated", 1, 2) if replicas else ("disaggregated", 1, 1)
    assert (config.mode, config.prefill.replicas, config.decode.replicas) == expected
    assert config.transfer.overlap is False
    assert config.model.activation_dtype == "16-bit"
    promised = (config.slo.ttft_ms, config.slo.tpot_ms, config.slo.refuse_beyond)
    assert promised == ((150.0, 6.5, None) if replicas else (None, None, 1.0))


@pytest.mark.parametrize(
    ("ours", "higher", "expected"),
    [
        (5.1, False, BEHIND),
        (5.0, False, BETWEEN),
        (4.1, False, BETWEEN),
        (4.0, False, REACHED),
        (3.9, True, BEHIND),
        (4.0, True, BETWEEN),
        (5.0, True, REACHED),
    ],
)
def test_marks(ours: float, higher: bool, expected: str) -> None:
    vllm, target = (4.0, 5.0) if higher else (5.0, 4.0)
    assert mark(ours, vllm, target, higher) == expected


def test_without_a_target_vllms_figure_must_be_reached() -> None:
    assert mark(5.0, 5.0, None, False) == REACHED and mark(5.1, 5.0, None, False) == BEHIND


def test_without_vllms_figure_the_target_must_be_reached() -> None:
    assert mark(4.0, None, 4.0, False) == REACHED and mark(4.1, None, 4.0, False) == BEHIND


def test_saved_results_are_shown_and_nothing_is_run(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "r.jsonl", decode=9.0, batch=30000.0, clients=1, poisson=0)
    saved(path, decode=4.5)  # the newest line counts
    assert run(monkeypatch, "--table", table, "--from", path) == 0
    text = capsys.readouterr().out
    assert line_of(text, "decode")[3:] == ["≤ 4", "4.50", "1.11", BETWEEN]
    assert line_of(text, "batch")[3:] == ["≥ 36,700", "30,000", "1.00", BETWEEN]
    closed = ["9.00 ✓ / 25.00 ✗", "5.00 ✓ / 6.10 ✗", "99.00 ✗", "1 ✗", "25%"]
    assert line_of(text, "2 clients", after=1)[2:] == closed
    # the arrivals fix its tok/s
    assert line_of(text, "50 req/s", after=1)[4:] == ["99.00", "0", "25%"]
    assert "ours: a-model, A GPU, abc" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 1 is no result"), ('{"benchmark": "targets"}', "line 1 is no result")],
)
def test_a_file_of_something_else_is_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_results(path)


@pytest.mark.processes
def test_a_run_measures_every_row_and_saves_it(
    table: Path,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [
        "--table",
        table,
        "--model",
        tiny_llama,
        "--device",
        "cpu",
        "--max-num-batched-tokens",
        "64",
    ]
    with served(Behaviour(gap_s=0.001)) as url:
        assert (
            run(
                monkeypatch,
                *arguments,
                "--repeats",
                "2",
                "--url",
                url,
                "--out",
                out,
                "--commit",
                "abc",
            )
            == 0
        )
    shown = capsys.readouterr().out
    results = read_results(out)
    assert set(results) == {"decode", "batch", "clients", "poisson"}
    assert results["decode"]["engine"]["max_num_seqs"] == 512
    assert results["decode"]["engine"]["max_num_batched_tokens"] == 64
    assert results["clients"]["figures"]["num_finished"] == 4
    assert line_of(shown, "batch of 4")[4] != "-"
    assert run(monkeypatch, "--table", table, "--from", out) == 0
    assert render(read_rows(table), results) in capsys.readouterr().out


@pytest.mark.processes
def test_a_part_that_fails_does_not_keep_the_others_from_being_measured(
    table: Path,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--table", table, "--model", tiny_llama, "--device", "cpu", "--repeats", "1"]
    assert (
        run(monkeypatch, *arguments, "--url", "http://127.0.0.1:9", "--out", tmp_path / "o.jsonl")
        == 1
    )
    assert set(read_results(tmp_path / "o.jsonl")) == {"decode", "batch"}
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "decode-7"],
            "--only decode-7 is unknown; choose from offline, http, pair, start",
        ),
        (["--from", "no.jsonl"], "no.jsonl"),
        (["--table", "no.toml"], "no.toml"),
        (["--block-size", "17", "--only", "decode-1"], "--block-size"),
        (
            ["--table", str(TABLES / "qwen3-30b-a3b.toml"), "--only", "pair"],
            "--only pair: the table has no such rows",
        ),
    ],
)
def test_mistakes_are_told(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.processes
def test_the_start_row_takes_a_process_to_its_first_token(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Through the whole command line; a model that cannot be loaded is told with that process's own
    words."""
    table = tmp_path / "start.toml"
    table.write_text(
        "[[offline]]\nid = 'start'\nwork = 'start'\nkind = 'start'\nunit = 's'\nvllm = 65\ntarget "
        "= 60\n"
    )
    out = tmp_path / "start.jsonl"
    assert (
        run(monkeypatch, "--table", table, "--model", tiny_llama, "--device", "cpu", "--out", out)
        == 0
    )
    assert 0.5 < read_results(out)["start"]["figures"]["seconds"]["median"] < 60
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    assert run(monkeypatch, "--table", table, "--model", tmp_path, "--device", "cpu") == 1
    assert "architecture 'NoSuchModel' is not known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('kind = "latency"', 'kind = "late"'), "decode: kind must be"),
        (('shape = "1x9x3"', ""), "decode: kind latency needs a shape"),
        (("unit =", "units ="), "decode: .*units"),
        (("1x9x3", "1x9"), "must look like"),
        (("[[offline]]", "[[offline"), "is not TOML"),
    ],
)
def test_a_wrong_table_is_refused(change: tuple[str, str], message: str, table: Path) -> None:
    table.write_text(TABLE.replace(*change, 1))
    with pytest.raises(ValueError, match=message):
        read_rows(table)


def test_a_table_of_a_model_without_a_shape_is_refused(table: Path) -> None:
    assert read_model(table).name == "llama-3.1-8b", "a table that names none"
    table.write_text('model = "gpt-0"\n' + TABLE)
    with pytest.raises(ValueError, match=r"model must be one of .*qwen3-30b-a3b-fp8, not 'gpt-0'"):
        read_model(table)


def test_the_stand_in_tokenizer_has_text_for_every_id(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(3000)
    assert tokenizer.get_vocab_size() == 3000
    model = tmp_path / "model"
    scratch = tmp_path / "scratch"
    model.mkdir()
    scratch.mkdir()
    (model / "config.json").write_text('{"vocab_size": 3000}')
    assert servable_folder(model, scratch) == scratch
    loaded = Tokenizer.load(scratch)
    assert loaded.vocab_size == 3000
    assert all(len(loaded.token_bytes(i)) >= 1 for i in range(3000))
    assert loaded.decode([300, 2999]).startswith(" ")
    assert loaded.decode(loaded.encode("Grüße, 世界")) == "Grüße, 世界"
    (model / "tokenizer.json").write_text("{}")
    assert servable_folder(model, scratch) == model
    with pytest.raises(ValueError, match="at least 256 ids"):
        make_tokenizer(100)


@pytest.mark.processes
def test_a_stopped_server_leaves_no_process_of_its_session() -> None:
    """The shell ends at SIGTERM; its child would live on."""
    script = "sh -c 'trap \"\" TERM; echo ready; sleep 100' & wait"
    server = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    stop(server)
    assert server.stdout.read() == b""  # ends when nobody holds it open any more
