"""`serve run cluster.yaml` can call what its import_path names."""

import inspect
from types import FunctionType

import pytest

from pdserve.cluster import app
from pdserve.cluster.app import build


def test_the_builder_has_the_one_parameter_that_serve_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    monkeypatch.setattr(app, "await_room", lambda config: None)  # Ray is not started
    assert list(inspect.signature(build).parameters) == ["args"]
    assert isinstance(build, FunctionType)
    application = call_user_app_builder_with_args_if_necessary(build, {"model": {"path": "demo/pdserve-demo"}})
    assert type(application).__name__ == "Application"
