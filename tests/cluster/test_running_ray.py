"""A Ray that was running before `pdserve up` is asked for what it read at its start."""

import pytest

from pdserve.cluster.operate import running_ray


def test_haproxy_is_refused_on_a_ray_that_was_started_without_it(local_ray: None) -> None:
    assert running_ray.variable_of_ray("RAY_AUTH_MODE") == "disabled"
    with pytest.raises(ValueError, match="--haproxy: the running Ray was started without"):
        running_ray.check_haproxy()


def test_haproxy_is_taken_where_ray_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_ray, "variable_of_ray", {running_ray.SWITCH: "1"}.get)
    running_ray.check_haproxy()
