"""What is installed: the files beside the code that the package needs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.processes
def test_a_built_package_has_its_types_and_its_clusters(tmp_path: Path) -> None:
    """Without py.typed, mypy takes an installed package for untyped."""
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
    files = {
        path.relative_to(built)
        for path in built.rglob("*")
        if path.suffix != ".py" and path.is_file()
    }
    package = ROOT / "pdserve"
    data = [
        *package.rglob("*.yaml"),
        *package.rglob("shipped/*.json"),
        package / "calibration" / "sample.txt",
        *package.glob("router/http/page/files/*"),
    ]
    wanted = {path.relative_to(package) for path in data}
    assert files == wanted | {Path("py.typed")} and wanted
