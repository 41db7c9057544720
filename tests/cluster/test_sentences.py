"""Files and options that cannot be: every subcommand says a sentence and ends with status 2."""

import errno
from pathlib import Path

import pytest

from pdserve.cluster import cli
from pdserve.cluster.operate.ray_settings import settings
from pdserve.cluster.operate.sentences import told

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "demo" / "pdserve-demo")
PLAN = ["plan", "--gpus", "2", "--slo", "ttft=500,tpot=50", "--model", DEMO]
LOAD = ["--poisson", "1,10,10"]
HERE = "http://127.0.0.1:9"
NO_FILE = "there is no such file or folder: check the path"
FOLDER = "is a folder, but a file is needed"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings(haproxy=False).items():  # which `up` sets for good
        monkeypatch.setenv(name, value)
    for name in ("RAY_ADDRESS", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("brackets").write_text("a: [1\n")
    Path("bytes").write_bytes(b"ab\xff\xfe")
    Path("empty").write_text("")
    Path("words").write_text("only words")


@pytest.mark.parametrize(
    "words,said",
    [
        (["up", "none"], f"none: {NO_FILE}"),
        (["up", "folder"], f"folder: {FOLDER}"),
        (["up", "words/x"], "words/x: a part of this path is a file, not a folder"),
        (["up", "brackets"], "brackets: is not YAML: expected ',' or ']', but got"),
        (["up", "bytes"], "bytes: is not text in UTF-8 (byte 2): save it as UTF-8"),
        (["up", "empty"], "empty: is empty"),
        (["up", "words"], "words: must be a mapping with `applications:`"),
        (["up", "--model", "folder"], "folder holds no config.json"),
        (["up", "--hub-token-file", "none"], f"--hub-token-file none: {NO_FILE}"),
        (["up", "--nothing"], "unrecognized arguments: --nothing"),
        (["bench", "latency", "--model", "folder"], "folder holds no config.json"),
        (["bench", "throughput", "--shape", "1x8x8", "--out", "folder"], f"folder: {FOLDER}"),
        (["bench", "throughput", "--shape", "1x8x8", "--out", "none/x"], f"none/x: {NO_FILE}"),
        (["bench", "replay", "none", "--url", HERE], f"none: {NO_FILE}"),
        (["bench", "replay", "folder", "--url", HERE], f"folder: {FOLDER}"),
        (["bench", "replay", "bytes", "--url", HERE], "TRACE bytes, line 1:"),
        (["bench", "serve", "--nothing"], "one of the arguments --clients"),
        ([*PLAN, "--trace", "none"], f"none: {NO_FILE}"),
        ([*PLAN, *LOAD, "--profile", "folder"], "--profile folder cannot be read"),
        ([*PLAN, *LOAD, "--profile", "brackets"], "--profile brackets is no profile"),
        ([*PLAN, *LOAD, "--out", "words"], "words: already exists and is not a folder"),
        (["profile", "--model", DEMO, "--device", "cpu", "--out", "folder"], f"folder: {FOLDER}"),
        (["calibrate-kv", DEMO, "--out", "folder"], "--out folder is a folder, and a file is"),
        (["calibrate-kv", DEMO, "--out", "x", "--text", "none"], f"none: {NO_FILE}"),
        (["calibrate-kv", DEMO, "--out", "x", "--text", "bytes"], "bytes is no UTF-8 text"),
        (["chat", "--url", "ftp://x"], "must begin with http:// or https://"),
        (["workers", "--address", "127.0.0.1:1"], "--address is 127.0.0.1:1, but nothing answers"),
        (["role", "x", "nothing"], "invalid choice: 'nothing'"),
        (["scale", "prefill=x"], "write prefill=N or decode=N"),
        (["expert-load"], "the following arguments are required: --out"),
        (["expert-load", "--out", "x", "--role", "all"], "invalid choice: 'all'"),
        (["expert-load", "--out", "x", "--address", "127.0.0.1:1"], "but nothing answers"),
        (["dashboard", "--source", "x"], "invalid choice: 'x'"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_a_sentence_and_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = int(end.code or 0)
    printed = capsys.readouterr().err
    assert status == 2 and said in printed
    assert "Traceback" not in printed and "Errno" not in printed


@pytest.mark.parametrize(
    "file,said",
    [("none", f"none: {NO_FILE}"), ("folder", f"folder: {FOLDER}"), ("brackets", "is not YAML")],
)
def test_doctor_looks_at_the_machine_all_the_same(
    file: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", file]) == 2
    *machine, last = capsys.readouterr().out.splitlines()
    assert last.startswith("error ") and said in last and len(machine) > 5


def test_doctor_without_a_file_looks_at_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert "this folder has no cluster.yaml, and no file was named" in capsys.readouterr().out


def test_what_nobody_may_open_is_said() -> None:
    for code in (errno.EACCES, errno.EPERM):
        error = PermissionError(code, "Permission denied", "x.yaml")
        assert told(error) == "x.yaml: this user may not open it: change its mode or its owner"
    assert told(OSError(errno.EIO, "Input/output error", "x")) == "x: Input/output error"
    assert told(ValueError("as it is")) == "as it is"
