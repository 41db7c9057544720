"""Fixtures of all rooms: one CPU thread, no Ray authentication surprises, the Triton interpreter
where no GPU is, a tiny model on disk.
"""

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before triton is imported

import hypothesis
import pytest
from support.leftovers import Guard, mark
from support.tiny_models import make_tiny

torch.set_num_threads(1)

# Hypothesis fails an example that takes longer than 200 ms, which a busy machine can make of any.
hypothesis.settings.register_profile("pdserve", deadline=None)
hypothesis.settings.load_profile("pdserve")

collect_ignore = ["clients"]  # they run in an environment of their own: make test-clients

guard = Guard()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what the tests start, and as slow the cases that are in no sample. Skips tests for
    which this machine has no devices, with a reason.

    With several test processes (-n), one process runs all tests of clusters, because they need the
    machine and its ports. Another one runs all other tests that start processes. The remaining
    tests of a file stay together, with its fixtures.
    """
    devices = torch.cuda.device_count()
    cases: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None and item.get_closest_marker("slow") is None:
            name = item.nodeid.partition("[")[0]
            if cases[name] % sampled.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[name] += 1
        mark(item)
        starts = item.get_closest_marker("processes") is not None
        item.add_marker(pytest.mark.xdist_group(_group(item) if starts else str(item.path)))
        if item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("multigpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA devices, here are {devices}"))


def _group(item: pytest.Item) -> str:
    """Returns the group of a test that starts processes. Tests that compile kernels may run beside
    any other."""
    room = item.path.relative_to(Path(__file__).parent).parts[0]
    if room == "kernels":
        return str(item.path)
    return "ranks" if room in ("engine", "kvtransfer", "bench", "worker") else "clusters"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Two processes with a Ray each would fight for its ports, and every fixture of a file would
    be made twice."""
    if node.config.option.dist == "loadgroup" and not all("@" in nodeid for nodeid in ids):
        pytest.exit(
            f"pytest {pytest.__version__} with the installed pytest-xdist keeps no group of tests "
            "together: install the versions that pyproject.toml names",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test that draws without a generator of its own draws the same each time."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """Ctrl-C does after a test what it did before. (SIGTERM is left out: `ray.init` handles it from
    then on.)"""
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after == before, f"the test leaves {after} to handle SIGINT"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    guard.before(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    try:
        return (yield)
    finally:
        guard.after(item, nextitem)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a random model like llama3 with wide weights, vocabulary 256 and 512 positions."""
    return make_tiny("llama3", tmp_path_factory.mktemp("tiny") / "llama")
