"""The Hub's token that `pdserve up` has reaches the workers of every node, and nobody else."""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ray.cluster_utils import Cluster
from support.fake_hub import FakeHub, fake_hub
from support.ports import free_port
from support.served import DEMO

from pdserve.cluster.operate.ray_settings import settings
from pdserve.cluster.operate.up import token_for, token_in
from pdserve.configs.schema import ClusterConfig
from pdserve.models.hub import WEIGHTS

ROOT = Path(__file__).parents[2]
NAME = "someone/demo"
TOKEN = "hf_secretOfTheTest"
ROLES = ("prefill", "decode")


def test_a_file_holds_one_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"\n{TOKEN}\n")
    assert token_in(path) == TOKEN
    path.write_text(f"{TOKEN} {TOKEN}")
    with pytest.raises(ValueError, match="must hold one word, the token, but holds 2") as caught:
        token_in(path)
    assert TOKEN not in str(caught.value)
    path.write_bytes(b"\xff")
    for wrong, said in ((path, "UTF-8"), (tmp_path, "is a folder"), (tmp_path / "x", "no such")):
        with pytest.raises(ValueError, match=f"--hub-token-file .*: .*{said}"):
            token_in(wrong)


def test_a_token_goes_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for model, token in (
        ({"path": "demo/pdserve-demo"}, None),
        ({"path": "org/model"}, TOKEN),
        ({"path": "demo/pdserve-demo", "tokenizer": "org/model"}, TOKEN),
    ):
        assert token_for(ClusterConfig.model_validate({"model": model})) == token


@contextmanager
def nodes(folder: Path, hub: FakeHub) -> Iterator[Cluster]:
    """A head for routers and a node for each role, each with a cache of its own; none has a
    token."""
    with pytest.MonkeyPatch.context() as patch:
        own = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(folder), "HF_ENDPOINT": hub.url}
        for variable, value in {**settings(haproxy=False), **own}.items():
            patch.setenv(variable, value)
        for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            patch.delenv(variable, raising=False)
        memory: dict[str, Any] = {"object_store_memory": 80 << 20}
        patch.setenv("HF_HOME", str(folder / "head"))
        head = {"num_cpus": 2, "resources": {"ingress": 1}, "dashboard_port": free_port(), **memory}
        cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": True})
        try:
            for role in ROLES:
                patch.setenv("HF_HOME", str(folder / role))
                cluster.add_node(num_cpus=1, resources={role: 1}, **memory)
            patch.setenv("HF_HOME", str(folder / "operator"))
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            cluster.shutdown()


def document(port: int) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    made["http_options"]["port"] = port
    args = made["applications"][0]["args"]
    args["model"] = {"path": NAME}
    args["router"] = {"split": "always", "resources": {"ingress": 0.1}}
    for role in ROLES:
        args[role] = {"replicas": 1, "resources": {role: 1}}
    return made


def shown(url: str) -> list[str]:
    """Returns the data that the dashboard's pages are made of."""
    pages = ("api/serve/applications/", "api/jobs/", "api/v0/actors?detail=1", "api/v0/workers")
    said = []
    for page in pages:
        with urllib.request.urlopen(f"{url}/{page}", timeout=60) as answer:
            said.append(answer.read().decode())
    return said


@pytest.mark.slow
def test_two_nodes_download_with_the_operators_token(tmp_path: Path) -> None:
    """Each once, at the same time; the token is in no file, no command line and no page."""
    (tmp_path / "token").write_text(TOKEN)
    path = tmp_path / "cluster.yaml"
    port = free_port()
    path.write_text(yaml.safe_dump(document(port)))
    command = [sys.executable, "-m", "pdserve.cluster.cli", "up", str(path)]
    command += ["--hub-token-file", str(tmp_path / "token"), "--timeout", "180"]
    with (
        fake_hub(NAME, DEMO) as hub,
        tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder,
    ):
        hub.token = TOKEN
        with nodes(Path(folder), hub) as cluster:
            printed = subprocess.run(
                [*command, "--print-yaml"], cwd=tmp_path, env=with_path(), capture_output=True
            )
            assert printed.returncode == 0 and TOKEN.encode() not in printed.stdout
            with subprocess.Popen(
                command,
                cwd=tmp_path,
                env=with_path(),
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            ) as up:
                assert up.stdout is not None
                said = ""
                while "Ctrl-C stops it" not in said:
                    line = up.stdout.readline()
                    assert line, said
                    said += line
                body = {"model": "demo", "prompt": "Once upon", "max_tokens": 4}
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}/v1/completions",
                    json.dumps(body).encode(),
                    {"content-type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert json.load(answer)["usage"]["completion_tokens"] == 4
                assert cluster.head_node is not None
                for page in shown(f"http://{cluster.head_node.webui_url}"):
                    assert len(page) > 50 and TOKEN not in page
                lines = [
                    part
                    for process in psutil.Process().children(recursive=True)
                    for part in process.cmdline()
                ]
                assert not any(TOKEN in part for part in lines)
                up.terminate()
                rest, _ = up.communicate(timeout=60)
            assert up.returncode == 0 and TOKEN not in said + rest
        weights = {hub.named(file) for file in hub.folder.glob(WEIGHTS)}
        counts = Counter(name for name, _ in hub.served if name in weights)
        assert counts == dict.fromkeys(weights, len(ROLES)), "once a node that computes"
        for role in ROLES:
            assert list(Path(folder, role).rglob(WEIGHTS))
        assert not list(Path(folder, "head").rglob(WEIGHTS)), "routers take no weights"
        found = [
            file
            for file in Path(folder).rglob("*")
            if file.is_file() and TOKEN.encode() in file.read_bytes()
        ]
        assert not found


def with_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
