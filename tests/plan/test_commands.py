"""`pdserve plan` as a user types it: a small plan from start to files, and errors that name the
parameter and the cure."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.processes import children
from support.waiting import until

from benchmarks.support.places import SHAPES
from pdserve.cluster.cli import main
from pdserve.cluster.operate.cluster_file import load

MODEL = str(SHAPES / "llama-3.1-8b")
GOOD = ["plan", "--model", MODEL, "--poisson", "4,512,16", "--gpus", "2", "--slo"]


@pytest.mark.processes
@pytest.mark.slow
def test_a_plan_is_made_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["ttft=200,tpot=10", "--seconds", "2", "--out", str(tmp_path)]
    assert main([*GOOD, *more]) == 0
    shown = capsys.readouterr().out
    assert "1P + 1D" in shown and "2 whole" in shown and "yes" in shown
    assert "<svg" in (tmp_path / "plan.html").read_text()
    config = load(tmp_path / "cluster.yaml").config
    assert config.slo.tpot_ms == 10 and config.engine.max_model_len == 529


@pytest.mark.processes
@pytest.mark.parametrize(
    "number, status", [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_plan_that_is_interrupted_ends_at_once(number: int, status: int) -> None:
    argv = [*GOOD, "ttft=200,tpot=10", "--poisson", "20,4000,300", "--seconds", "4000"]
    # a shell may have started the tests in the background, where SIGINT is ignored
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"from pdserve.cluster.cli import main; sys.exit(main({argv!r}))"
    )
    plan = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: len(children(plan.pid)) == 2)
        simulators = [psutil.Process(pid) for pid in children(plan.pid)]
        # its threads wait for outcomes
        until(lambda: all(sum(each.cpu_times()[:2]) > 4 for each in simulators))
        plan.send_signal(number)
        _, said = plan.communicate(timeout=10)
        assert plan.returncode == status and "Traceback" not in said
    finally:
        plan.kill()
    until(lambda: not any(each.is_running() for each in simulators), seconds=10)


@pytest.mark.processes
def test_output_that_nobody_reads_is_no_error() -> None:
    argv = ["plan", "--help"]
    code = f"import sys; from pdserve.cluster.cli import main; sys.exit(main({argv!r}))"
    command = f"{sys.executable} -c {shlex.quote(code)} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


def test_where_a_plan_cannot_be_written_is_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.html").mkdir()
    assert main([*GOOD, "ttft=200,tpot=10", "--out", str(tmp_path)]) == 2
    assert "plan.html" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, says",
    [
        ([*GOOD, "ttft=200"], "as in ttft=1000,tpot=10"),
        ([*GOOD, "ttft=0,tpot=1"], "as in ttft=1000,tpot=10"),
        ([*GOOD, "ttft=1,tpot=1", "--gpus", "0"], "as in 8 or 2..64"),
        ([*GOOD, "ttft=1,tpot=1", "--gpus", "4..2"], "as in 8 or 2..64"),
        ([*GOOD, "ttft=1,tpot=1", "--poisson", "4,512"], "RATE,IN,OUT"),
    ],
)
def test_wrong_options_are_named(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, says",
    [
        (["--slo", "ttft=1,tpot=10"], "--slo ttft=1,tpot=10: no layout"),
        (["--slo", "ttft=200,tpot=10", "--attainment", "1"], "--attainment must be below 1"),
        (["--slo", "ttft=200,tpot=10", "--max-input", "9"], "--max-input belongs to --trace"),
        (["--slo", "ttft=200,tpot=10", "--profile", "/none"], "--profile /none cannot be read"),
        (["--slo", "ttft=200,tpot=10", "--poisson", "1,200000,9"], "--poisson asks for 200,009"),
        (["--slo", "ttft=200,tpot=10", "--model", "/none"], "/none"),
    ],
)
def test_what_cannot_be_planned_is_said(
    more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GOOD[:-1], *more]) == 2
    assert says in capsys.readouterr().err
