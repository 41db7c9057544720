"""Background threads: what they raise is logged and counted, and they go on."""

import gc
import logging
import re
import threading
import weakref
from pathlib import Path

import pytest
from support.failures import counts

import pdserve
from pdserve.background import tasks
from pdserve.background.threads import FAILURES, KeptThread

# Who starts threads otherwise, and who hears of their errors.
OTHERS = {
    "background/threads.py": "the kept ones",
    "cluster/loop_thread.py": "an event loop, which survives what its callbacks raise",
    "engine/components.py": "whoever submits waits for the result",
    "engine/grammars/builder.py": "who asked for a grammar hears of it, or waits no longer",
    "engine/execution/local_executor.py": "whoever submits waits for the result",
    "engine/ranks.py": "whoever submits waits for the result",
    "kvtransfer/pool/lmcache_server.py": "the server's process ends with it, whatever happens",
    "models/checkpoint.py": "whoever submits waits for the result",
    "parallel/nccl.py": "what an abort returns says nothing new",
    "parallel/node_pipe.py": "whoever starts it waits for its result",
    "plan/cli.py": "whoever submits waits for the result",
    "text/grammars/checker.py": "the waiters of a job get the error, and the process goes on",
    "text/grammars/probe.py": "whoever starts it waits for its result",
    "router/request/prompts.py": "whoever submits awaits the result",
}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)


def count(name: str) -> float:
    return counts(FAILURES)[name]


def test_no_thread_runs_in_the_background_but_by_this_module() -> None:
    root = Path(pdserve.__file__).parent
    starts = re.compile(r"\bThread\(|\(threading\.Thread\)|PoolExecutor\(|\bTimer\(")
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if starts.search(path.read_text())
    }
    uses = re.compile(r"\bKeptThread\(")
    kept = {
        str(path.relative_to(root)) for path in root.rglob("*.py") if uses.search(path.read_text())
    }
    assert found - kept | {"background/threads.py", "kvtransfer/pool/lmcache_server.py"} == set(
        OTHERS
    )


def test_it_goes_on_after_errors_and_each_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs: list[str] = []

    def run() -> None:
        runs.append(threading.current_thread().name)
        if len(runs) < 4:
            raise KeyError(f"run {len(runs)}")

    thread = KeptThread("goes on", run, of="peer", longest_pause_s=0.01)
    thread.join(5.0)
    assert runs == ["goes on peer"] * 4 and count("goes on") == 3 and not thread.is_alive()
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 3 and all(
        "background thread goes on peer failed" in record.message for record in errors
    )
    assert "KeyError: 'run 2'" in caplog.text and "in run" in caplog.text, "with its traceback"


def test_one_that_returns_has_ended() -> None:
    thread = KeptThread("returns", lambda: None)
    assert thread.finish(5.0) and count("returns") == 0


def test_a_pause_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 3600.0)
    failed = threading.Event()
    runs: list[int] = []

    def run() -> None:
        runs.append(1)
        failed.set()
        raise ValueError

    thread = KeptThread("pauses", run, longest_pause_s=3600.0)
    assert failed.wait(5.0) and thread.finish(5.0)
    assert len(runs) == 1


def test_one_that_runs_on_is_waited_for_no_longer_than_asked() -> None:
    release = threading.Event()

    def run() -> None:
        release.wait(30.0)

    thread = KeptThread("runs on", run)
    assert not thread.finish(0.01)
    release.set()
    assert thread.finish(5.0)


def test_what_an_ended_one_ran_is_let_go() -> None:
    """Its owner holds it, and may hold gigabytes."""

    class Owner:
        def __init__(self) -> None:
            self.thread = KeptThread("let go", self.run)

        def run(self) -> None:
            pass

    owner = Owner()
    assert owner.thread.finish(5.0)
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
