"""The wheel in an environment of its own, far from the checkout: two commands until the demo
answers, and one for a model of the Hub."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.fake_hub import fake_hub
from support.ports import free_port

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "pdserve", "demo")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel alone; what it depends on is found in this
    one, but not what is installed here in editable mode."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:  # setuptools leaves files beside what it builds
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / "tree" / name, symlinks=True)
        else:
            (folder / "tree").mkdir(exist_ok=True)
            shutil.copy(source, folder / "tree" / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", str(folder / "tree"), "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *build, "--wheel-dir", str(folder)], check=True, timeout=300)
    [wheel] = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    python = str(folder / "env" / "bin" / "python")
    install = ["--python", python, "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=300)
    [site] = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder / "env" / "bin"


@contextmanager
def serving(bin_folder: Path, *words: str, **env: str) -> Iterator[str]:
    """`pdserve up`, in an empty folder; its URL."""
    without = ("PYTHONPATH", "RAY_ADDRESS", "HF_TOKEN")
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder,
        subprocess.Popen(
            [str(bin_folder / "pdserve"), "up", *words, "--port", str(port)],
            cwd=folder,
            env={**inherited, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder, **env},
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        said = ""
        try:
            while "Ctrl-C stops it" not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.communicate(timeout=60)


def answer(url: str, model: str) -> str:
    body = {"model": model, "prompt": "45 + 38 =", "temperature": 0, "max_tokens": 8}
    kind = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), kind)
    with urllib.request.urlopen(request, timeout=60) as said:
        text: str = json.load(said)["choices"][0]["text"]
    return text


def test_what_is_imported_is_the_wheel(installed: Path, tmp_path: Path) -> None:
    script = "import pdserve; print(pdserve.__file__)"
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run(
        [str(installed / "python"), "-c", script],
        cwd=tmp_path,
        env=inherited,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(said.stdout.strip()).is_relative_to(installed.parent)


def test_the_demo_answers_after_two_commands(installed: Path) -> None:
    with serving(installed) as url:
        assert answer(url, "pdserve-demo").startswith(" 83")


def test_a_model_of_the_hub_answers_after_one(installed: Path, tmp_path: Path) -> None:
    with (
        fake_hub("someone/demo", ROOT / "demo" / "pdserve-demo") as hub,
        serving(
            installed,
            *("--model", "someone/demo", "--name", "a", "--name", "b"),
            HF_ENDPOINT=hub.url,
            HF_HOME=str(tmp_path),
        ) as url,
    ):
        assert answer(url, "a") == answer(url, "b") and answer(url, "a").startswith(" 83")
