"""Tests that the files beside the code that the package needs are installed."""

import subprocess
import sys
from functools import partial
from os import walk as walk_links
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
walk = partial(walk_links, followlinks=True)


@pytest.mark.processes
def test_a_built_package_has_every_file_of_its_folders(tmp_path: Path) -> None:
    """Clusters, profiles, a text and the demo model are read; without py.typed, mypy takes an
    installed package for untyped."""
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()"]
    commands = [
        "egg_info",
        "--egg-base",
        str(tmp_path),
        "build_py",
        "--build-lib",
        str(tmp_path / "built"),
    ]
    subprocess.run([*build, "--quiet", *commands], cwd=ROOT, check=True, timeout=600)
    built = tmp_path / "built" / "pdserve"
    wanted = data_of(ROOT / "pdserve")
    assert data_of(built) == wanted
    assert {"py.typed", "configs/cpu-demo.yaml", "demo/pdserve-demo/model.safetensors"} <= wanted
    assert sum((built / name).stat().st_size for name in wanted) < 10 << 20


def data_of(package: Path) -> set[str]:
    """Files that are no code, also those behind a link."""
    found = (Path(folder, name) for folder, _, names in walk(package) for name in names)
    return {str(path.relative_to(package)) for path in found if path.suffix not in (".py", ".pyc")}
