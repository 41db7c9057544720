"""Tests what `connect` says when there is no cluster that takes this process."""

from typing import Any

import pytest
import ray

from pdserve.cluster.client import connect


@pytest.mark.parametrize(
    ("mode", "said"), [(None, "is not set here"), ("token", "is 'token' here")]
)
def test_a_cluster_that_refuses_this_process(
    mode: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    refuse(monkeypatch, "Failed to connect to Ray cluster at 10.0.0.1:6379")
    with pytest.raises(ConnectionError, match=f"6379; RAY_AUTH_MODE {said}: if Ray says Invalid"):
        connect("10.0.0.1:6379")


def test_no_cluster_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "Could not find any running Ray instance.")
    with pytest.raises(ConnectionError, match=r"instance\.$"):
        connect()


def refuse(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError(message)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
