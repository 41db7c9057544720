"""Starts that hang or fail, over a local Ray: what is said meanwhile, and at the end."""

from pathlib import Path
from typing import Any

import pytest
from ray import serve

from pdserve.cluster import app as cluster_app
from pdserve.cluster.deployments import start_board
from pdserve.cluster.operate.readiness import until_ready
from pdserve.configs.schema import ClusterConfig

FAKE = "fake_engine_host:FakeEngineHost"
NOBODY = "http://127.0.0.1:9"


def said(name: str, timeout_s: float, **args: Any) -> tuple[list[str], str]:
    """All lines, and the error that ended them."""
    model = {"path": "demo/pdserve-demo", "name": name}
    config = ClusterConfig.model_validate({"mode": "aggregated", "model": model, **args})
    serve._run(
        cluster_app.assemble(config, FAKE), name=name, route_prefix=f"/{name}", _blocking=False
    )
    lines: list[str] = []
    try:
        with pytest.raises(ValueError) as caught:
            lines.extend(until_ready(name, NOBODY, timeout_s))
    finally:
        serve.delete(name)
    return lines, str(caught.value)


def test_a_start_that_hangs_fails_with_its_stage_and_logs(local_ray: None) -> None:
    lines, error = said("hangs-in-registration", 600, start={"registration_s": 0.5})
    text = "\n".join(lines)
    assert "deploying 'hangs-in-registration' failed" in error
    stuck = "made no progress for 0.5 s while registering KV memory with the transport: 1"
    for place in (text, error):
        assert "StartError: worker Decode#" in place and stuck in place
        assert "or raise start.registration_s. Its logs on" in place
    assert "registering KV memory with the transport: 1" in text.split("StartError")[0]
    located = next(line for line in lines if "logs on" in line and "StartError" not in line)
    for file in located.rpartition(": ")[2].split(", "):
        assert Path(file).is_file(), file
    assert start_board.read("hangs-in-registration") == []


def test_a_start_that_takes_too_long_in_all_says_where_it_is(local_ray: None) -> None:
    lines, error = said("hangs-in-weights", 5.0)
    assert lines and "not ready after 5 s (--timeout)" in error
    assert "Decode: updating" in error
    start_board.clear("hangs-in-weights")
