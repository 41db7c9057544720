"""Counts over a local Ray with fake engines: nobody else restarts, and streams that outlast a drain
go on elsewhere."""

import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import ray
from fake_engine_host import held
from ray import serve

from pdserve.cluster import app as cluster_app
from pdserve.cluster.cli import main
from pdserve.cluster.client import Client, ClusterError, connect
from pdserve.configs.schema import ClusterConfig
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.admin import ClusterReport, WorkerReport

FAKE = "fake_engine_host:FakeEngineHost"
APP = "scaled"
PROXY_PORT = 8123
DRAIN_S = 1.0
ROUTE_S = 30.0
# 8 s each
NUM_STREAMS = 6
LENGTH = 400


@pytest.fixture(scope="module")
def client(local_ray: None) -> Iterator[Client]:
    args: dict[str, Any] = {
        "mode": "aggregated",
        "model": {"name": "fake"},
        "router": {"drain_s": DRAIN_S, "policy": "round-robin"},
        "decode": {"num_cpus": 1},
    }
    app = cluster_app.assemble(ClusterConfig.model_validate(args), FAKE)
    serve.run(app, name=APP, route_prefix="/scaled", external_scaler_enabled=True)
    with connect(app_name=APP) as client:
        until(client, lambda report: len(report.workers) == 1)
        yield client
    serve.delete(APP)


def until(
    client: Client, reached: Callable[[ClusterReport], bool], seconds: float = 180.0
) -> ClusterReport:
    deadline = time.monotonic() + seconds
    while not reached(report := client.workers()):
        assert time.monotonic() < deadline, report
        time.sleep(0.05)
    return report


def running(report: ClusterReport) -> list[WorkerReport]:
    return [worker for worker in report.workers if worker.state == "running"]


def router_pid() -> int:
    [router] = [
        a for a in ray.util.list_named_actors(all_namespaces=True) if f"{APP}#Router#" in a["name"]
    ]
    actor = ray.get_actor(router["name"], namespace=router["namespace"])
    pid: Any = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return int(pid)


def streams(pool: ThreadPoolExecutor, client: Client) -> list[Future[list[int]]]:
    def one(first: int) -> list[int]:
        chunks = client.stream([first], SamplingParams(max_tokens=LENGTH))
        return [token for chunk in chunks for token in chunk.token_ids]

    return [pool.submit(one, 10 * number) for number in range(NUM_STREAMS)]


@pytest.mark.slow
def test_up_and_down_with_streams_open(client: Client, journal: Path) -> None:
    router = router_pid()
    [first] = client.workers().workers
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        report = client.scale(decode=3)
        assert report.counts["decode"].target == 3 and not report.warnings
        report = until(client, lambda report: len(report.workers) == 3)
        assert first.worker in [worker.worker for worker in report.workers]
        # one a worker
        leavers = [client.stream([900], SamplingParams(max_tokens=900)) for _ in range(3)]
        for stream in leavers:
            next(stream)
        with held(journal):
            answers = streams(pool, client)
            spread = until(
                client,
                lambda report: sum(worker.num_legs for worker in report.workers) == 3 + NUM_STREAMS,
            )
            client.scale(decode=1)
            until(
                client,
                lambda report: [bool(worker.num_legs) for worker in running(report)] == [True],
            )
            for stream in leavers:
                # a Cancel reaches a worker that leaves
                stream.close()  # type: ignore[attr-defined]
            until(
                client,
                lambda report: [worker.num_legs for worker in report.workers] == [NUM_STREAMS],
            )
        for number, answer in enumerate(answers):
            assert answer.result(300) == [10 * number + position for position in range(LENGTH)]
    until(client, lambda report: report.counts["decode"].running == 1)
    assert router_pid() == router
    failovers = [
        line
        for line in metrics("/scaled").splitlines()
        if line.startswith("pdserve_router_failovers_total")
    ]
    assert len(failovers) == 1 and 'reason="drained"' in failovers[0], (failovers, spread)


def metrics(prefix: str) -> str:
    """The proxy may hear of a route a while after its application runs."""
    url = f"http://127.0.0.1:{PROXY_PORT}{prefix}/metrics"
    limit = time.monotonic() + ROUTE_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                return response.read().decode()
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND or time.monotonic() > limit:
                raise
            time.sleep(0.1)


def test_the_command_line(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "decode=2", "--app", APP, "--wait", "300"]) == 0
    assert "decode: 2 of 2" in capsys.readouterr().out
    until(client, lambda report: len(report.workers) == 2)
    assert main(["workers", "--app", APP]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["worker", "role", "state"] and len(lines) == 4
    assert lines[-1] == "decode: 2 of 2 running"
    worker = lines[1].split()[0]
    assert main(["role", worker, "prefill", "--app", APP]) == 2
    assert "hands nothing over" in capsys.readouterr().err
    assert main(["role", worker.partition("#")[2], "both", "--app", APP]) == 0
    assert f"{worker} is both" in capsys.readouterr().out
    assert main(["scale", "decode=0", "--app", APP]) == 2
    assert "this might leave no worker that decodes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["scale", "router=2"])
    assert main(["scale", "decode=1", "--app", APP]) == 0


def test_what_cannot_be_scaled_says_why(client: Client) -> None:
    with pytest.raises(ClusterError, match="mode aggregated has no prefill workers") as caught:
        client.scale(prefill=1)
    assert caught.value.status == 409
    with pytest.raises(ValueError, match="decode=-1"):
        client.scale(decode=-1)
    report = client.scale(decode=1, force=True)
    assert report.counts["decode"].target == 1


def test_counts_without_room_are_warned_of(client: Client) -> None:
    """Workers that run are left alone."""
    before = client.workers().workers
    report = client.scale(decode=6)
    assert (
        "decode: 6 replicas" in report.warnings[0] and "there is room for 3" in report.warnings[0]
    )
    until(client, lambda report: len(report.workers) == 3)
    assert before[0].worker in [worker.worker for worker in client.workers().workers]
    client.scale(decode=1)
    until(client, lambda report: len(report.workers) == 1 and report.counts["decode"].running == 1)


def test_counts_outlive_the_controller(client: Client) -> None:
    """The new one tells of the workers one by one, so for a moment one may seem to leave: it is the
    same that stays. (It takes replicas that were being stopped for living ones, so none shall
    be.)"""
    client.scale(decode=2)
    report = until(
        client, lambda report: len(report.workers) == 2 and replica_states() == {"RUNNING": 2}
    )
    before = [worker.worker for worker in report.workers]
    ray.kill(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve"), no_restart=False)
    deadline = time.monotonic() + 180
    while (
        (after := answered(client)) is None
        or len(after.workers) < 2
        or after.counts["decode"].running < 2
    ):
        assert time.monotonic() < deadline, after
        time.sleep(0.1)
    assert (
        after.counts["decode"].target == 2 and [worker.worker for worker in after.workers] == before
    )
    client.scale(decode=1)
    until(client, lambda report: len(report.workers) == 1 and report.counts["decode"].running == 1)


def replica_states() -> dict[str, int]:
    states = serve.status().applications[APP].deployments["Decode"].replica_states
    return {str(getattr(state, "value", state)): count for state, count in states.items()}


def answered(client: Client) -> ClusterReport | None:
    """None while the controller is away."""
    try:
        return client.workers()
    except ClusterError as error:
        assert error.status == 503
        return None


def test_counts_follow_load(local_ray: None, journal: Path) -> None:
    """One of two routers decides; the second worker comes for streams, and goes after them."""
    bounds = {"min": 1, "max": 2, "up_delay_s": 0.5, "down_delay_s": 2, "sequences": 2}
    args: dict[str, Any] = {
        "mode": "aggregated",
        "model": {"name": "fake"},
        "decode": {"autoscaling": bounds},
    }
    app = cluster_app.assemble(
        ClusterConfig.model_validate(args | {"router": {"replicas": 2}}), FAKE
    )
    serve.run(app, name="follows", route_prefix="/follows", external_scaler_enabled=True)
    try:
        with connect(app_name="follows") as client, ThreadPoolExecutor(NUM_STREAMS) as pool:
            until(client, lambda report: len(report.workers) == 1)
            with held(journal):
                answers = streams(pool, client)
                until(client, lambda report: report.counts["decode"].target == 2)
            for number, answer in enumerate(answers):
                assert answer.result(300) == [10 * number + position for position in range(LENGTH)]
            until(client, lambda report: len(report.workers) == 2)
            until(
                client,
                lambda report: report.counts["decode"].target == 1 and len(report.workers) == 1,
            )
    finally:
        serve.delete("follows")
