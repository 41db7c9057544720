"""`serve run cluster.yaml` can call what its import_path names; it serves nothing by an
oversight."""

import inspect
import logging
from types import FunctionType
from typing import Any

import pytest
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.exceptions import RayServeException

from pdserve.cluster import app
from pdserve.cluster.app import build

MODEL = {"path": "demo/pdserve-demo"}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Where Serve listens: its last entry. Ray is not started."""
    hosts: list[str | None] = ["127.0.0.1"]
    monkeypatch.setattr(app, "await_capacity", lambda config: None)
    monkeypatch.setattr(app, "serve_host", lambda: hosts[-1])
    return hosts


def built(args: dict[str, Any]) -> str:
    assert isinstance(build, FunctionType)
    return type(call_user_app_builder_with_args_if_necessary(build, args)).__name__


def test_the_builder_has_the_one_parameter_that_serve_asks_for(host: list[str | None]) -> None:
    assert list(inspect.signature(build).parameters) == ["args"]
    assert built({"model": MODEL}) == "Application"


@pytest.mark.parametrize("args", [{}, {"mode": "aggregated"}, {"model": {"name": "chat"}}])
def test_without_a_model_nothing_is_served(host: list[str | None], args: dict[str, Any]) -> None:
    """Serve ignores a misspelt `args:` of its file, and gives an empty one."""
    with pytest.raises(RayServeException, match=r"args\.model\.path is missing"):
        built(args)


def test_open_doors_are_logged(host: list[str | None], caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)
    try:
        for where in ("127.0.0.1", None):
            host.append(where)
            built({"model": MODEL})
        host.append("0.0.0.0")
        built({"model": MODEL, "router": {"api_key_env": "KEYS"}})
        assert not caplog.records
        built({"model": MODEL})
    finally:
        logger.removeHandler(caplog.handler)
    [record] = caplog.records
    assert (
        record.levelname == "WARNING"
        and "0.0.0.0 can be reached from other machines" in record.message
    )
