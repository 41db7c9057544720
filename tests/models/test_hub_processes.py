"""Processes of one node, and of two, that want the same model of the Hub at once."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_hub import FakeHub, fake_hub
from support.tiny_models import make_tiny
from support.waiting import until

from pdserve.models.hub import WEIGHTS

ROOT = Path(__file__).parents[2]
NAME = "someone/tiny"
ASK = """
import json, sys
from pdserve.models import hub
from pdserve.models.checkpoint import resolve_folder
hub.LOOK_S = 0.02
told = []
folder = resolve_folder(sys.argv[1], "auto", report=lambda done, total: told.append((done, total)))
print(json.dumps([str(folder), told]))
"""

pytestmark = pytest.mark.processes


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """It gives two processes its files, and takes its time for each."""
    folder = make_tiny("llama3", tmp_path / "made", max_shard_size="100KB")
    with fake_hub(NAME, folder) as made:
        made.pause_s = 0.1
        made.min_askers = 2
        yield made


def ask(hub: FakeHub, home: Path, token: str) -> subprocess.Popen[str]:
    """A process of the node that has its cache there."""
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": token}
    return subprocess.Popen(
        [sys.executable, "-c", ASK, NAME],
        env={**os.environ, "PYTHONPATH": str(ROOT), **own},
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> tuple[Path, list[list[int]]]:
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    folder, told = json.loads(said)
    return Path(folder), told


def served(hub: FakeHub) -> Counter[str]:
    """How often each file of weights went out."""
    weights = {hub.named(path) for path in hub.folder.glob(WEIGHTS)}
    return Counter(name for name, _ in hub.served if name in weights)


def test_workers_of_one_node_download_once_and_the_others_wait(
    hub: FakeHub, tmp_path: Path
) -> None:
    told = [answer(each) for each in [ask(hub, tmp_path / "home", f"t{i}") for i in range(2)]]
    assert told[0][0] == told[1][0] and set(served(hub).values()) == {1}
    assert len(set(hub.takers)) == 1, "one process took all files"
    weights = sum(path.stat().st_size for path in told[0][0].glob(WEIGHTS))
    for _, progress in told:
        assert len(progress) > 1 and progress == sorted(progress), "the one that waits tells it too"
    assert max(progress[-1][0] for _, progress in told) >= weights


def test_two_nodes_download_at_once_each_for_itself(hub: FakeHub, tmp_path: Path) -> None:
    hub.min_getters = 2  # if one waited for the other, no file would ever go out
    both = [ask(hub, tmp_path / home, home) for home in ("a", "b")]
    folders = [answer(each)[0] for each in both]
    for folder, home in zip(folders, "ab", strict=True):
        assert folder.is_relative_to(tmp_path / home)
    assert set(served(hub).values()) == {2}
    assert set(hub.takers) == {"Bearer a", "Bearer b"}


def test_the_death_of_the_one_that_downloads_lets_another_go_on(
    hub: FakeHub, tmp_path: Path
) -> None:
    first = ask(hub, tmp_path / "home", "first")
    until(lambda: bool(hub.askers))
    second = ask(hub, tmp_path / "home", "second")
    until(lambda: bool(served(hub)))
    first.kill()
    first.communicate()
    folder, _ = answer(second)
    made = sorted(path.name for path in hub.folder.glob(WEIGHTS))
    assert sorted(path.name for path in folder.glob(WEIGHTS)) == made
    assert all((folder / name).read_bytes() == (hub.folder / name).read_bytes() for name in made)
