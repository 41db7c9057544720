"""The whole application over a local Ray with fake engines: HTTP and the Python client, and a
worker lost in mid-answer."""

import asyncio
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from fake_engine_host import held
from ray import serve
from support.lines import json_lines
from support.waiting import until

from pdserve.cluster import app as cluster_app
from pdserve.cluster.client import Client, ClusterError, connect
from pdserve.cluster.deployments.http_server import Address
from pdserve.configs.schema import ClusterConfig
from pdserve.protocol.sampling_params import SamplingParams

FAKE = "fake_engine_host:FakeEngineHost"
APP = "whole"
PROXY_PORT = 8123
OWN_PORT = 8124  # of the router itself


@pytest.fixture(scope="module")
def client(local_ray: None) -> Iterator[Client]:
    args = {"mode": "aggregated", "model": {"name": "fake"}, "decode": {"replicas": 2}}
    config = ClusterConfig.model_validate(args)
    address = Address("127.0.0.1", OWN_PORT)
    serve.run(cluster_app.assemble(config, FAKE, address), name=APP, route_prefix="/")
    with connect(app_name=APP) as client:
        wait_until_answered(client)
        yield client
    serve.delete(APP)


def wait_until_answered(client: Client) -> None:
    def is_answered() -> bool:
        try:
            return bool(client.generate([[5]], SamplingParams(max_tokens=1)))
        except ClusterError as error:
            assert error.status == 503
            return False

    until(is_answered, 180)


def post(port: int, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def commands(journal: Path, kind: str = "submit") -> list[dict[str, Any]]:
    lines = [line for path in journal.iterdir() for line in json_lines(path)]
    return [line for line in lines if line["command"]["type"] == kind]


def test_generate_answers_every_prompt_in_order(client: Client) -> None:
    outputs = client.generate([[10 * i, 1] for i in range(6)], SamplingParams(max_tokens=4))
    assert [output.prompt_token_ids for output in outputs] == [[10 * i, 1] for i in range(6)]
    assert [output.outputs[0].token_ids for output in outputs] == [
        [10 * i + p for p in range(4)] for i in range(6)
    ]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_stream_gives_tokens_as_they_come(client: Client) -> None:
    chunks = list(client.stream([20], SamplingParams(max_tokens=5)))
    assert [t for chunk in chunks for t in chunk.token_ids] == [20, 21, 22, 23, 24]
    assert len(chunks) > 1
    assert chunks[-1].finish_reason == "length"


async def test_the_asyncio_twins_give_the_same(client: Client) -> None:
    [output], chunks = await asyncio.gather(
        client.agenerate([30], SamplingParams(max_tokens=3)),
        collect(client.astream([30], SamplingParams(max_tokens=3))),
    )
    assert (
        output.outputs[0].token_ids
        == [t for chunk in chunks for t in chunk.token_ids]
        == [30, 31, 32]
    )
    assert output.outputs[0].text == "".join(chunk.text for chunk in chunks)


async def collect(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


def test_bad_requests_are_value_errors_that_name_the_parameter(client: Client) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        client.generate([[100_000]], SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="prompt"):
        list(client.stream([], SamplingParams()))
    with pytest.raises(ValueError, match="unknown keyword 'prio'"):
        client.generate([[1]], prio=1)
    with pytest.raises(ValueError, match="unknown keyword 'timeline'"):
        list(client.stream([1], timeline=True))


async def test_conversations_go_through_the_handle_in_all_four_ways(client: Client) -> None:
    messages = [{"role": "user", "content": "7"}]
    params = SamplingParams(max_tokens=4)
    whole = client.chat(messages, params)
    [choice] = whole.outputs
    assert whole.prompt is None and len(choice.token_ids) == 4
    assert not choice.tool_calls and not choice.reasoning
    again = await client.achat(messages, params)
    streamed = list(client.stream_chat(messages, params))
    collected = await collect(client.astream_chat(messages, params))
    for tokens in (
        again.outputs[0].token_ids,
        [token for chunk in streamed for token in chunk.token_ids],
        [token for chunk in collected for token in chunk.token_ids],
    ):
        assert tokens == choice.token_ids
    with pytest.raises(ValueError, match="unknown keyword 'tool'"):
        client.chat(messages, params, tool=[])
    with pytest.raises(ValueError, match="messages is empty"):
        client.stream_chat([])


def test_priority_and_session_go_with_a_prompt(client: Client, journal: Path) -> None:
    for token in range(600, 606):
        client.generate([[token]], SamplingParams(max_tokens=2), priority=-4, session_id="a")
    sent = [
        line for line in commands(journal) if 600 <= line["command"]["prompt_token_ids"][0] < 606
    ]
    assert [line["command"]["priority"] for line in sent] == [-4] * 6
    assert len({line["pid"] for line in sent}) == 1, "two idle workers, one session"
    with pytest.raises(ValueError, match="priority must be of type int, not '1'"):
        client.generate([[1]], priority="1")
    with pytest.raises(ValueError, match="x-session-id"):
        client.generate([[1]], session_id="x" * 257)


def test_timelines_are_there_on_demand(client: Client) -> None:
    plain, shown = (
        client.generate([[50]], SamplingParams(max_tokens=3), timeline=t)[0] for t in (False, True)
    )
    assert plain.timeline is None and plain.outputs == shown.outputs
    assert shown.timeline is not None and shown.timeline.generated_tokens == 3
    assert [(leg.phase, leg.end) for leg in shown.timeline.legs][-1] in {
        ("full", "finished"),
        ("decode", "finished"),
    }


def test_connect_names_an_application_that_is_not_there(client: Client) -> None:
    with pytest.raises(ValueError, match="no application 'nothing'"):
        connect(app_name="nothing")


def test_an_application_that_was_not_deployed_for_it_is_not_scaled(client: Client) -> None:
    with pytest.raises(ClusterError, match="external_scaler_enabled: true") as caught:
        client.scale(decode=3)
    assert caught.value.status == 409
    assert [worker.role for worker in client.workers().workers] == ["both", "both"]


def test_a_closed_client_says_so_and_leaves_no_thread(client: Client) -> None:
    threads = threading.active_count()
    with connect(app_name=APP) as other:
        stream = other.stream([50], SamplingParams(max_tokens=900))
        next(stream)
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        list(stream)
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        other.generate([[1]])
    other.close()
    assert threading.active_count() == threads


def test_a_closed_stream_cancels_at_the_worker(client: Client, journal: Path) -> None:
    stream = client.stream([41], SamplingParams(max_tokens=900))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    [submit] = [line for line in commands(journal) if line["command"]["prompt_token_ids"] == [41]]
    request_id = submit["command"]["key"][2]

    def cancelled() -> list[str]:
        return [line["command"]["key"][2] for line in commands(journal, "cancel")]

    until(lambda: request_id in cancelled(), pause_s=0.02)


@pytest.mark.parametrize("port", [PROXY_PORT, OWN_PORT])
def test_http_answers_and_refuses_in_openais_form(client: Client, port: int) -> None:
    status, answer = post(
        port, "/v1/completions", {"model": "fake", "prompt": [50], "max_tokens": 3}
    )
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 3
    status, answer = post(
        port, "/v1/completions", {"model": "fake", "prompt": [50], "temperature": -1}
    )
    assert status == 400
    assert answer["error"]["param"] == "temperature"


def health(port: int) -> int | None:
    """None: nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def test_a_replaced_router_listens_when_it_can_answer(client: Client) -> None:
    [router] = [
        a for a in ray.util.list_named_actors(all_namespaces=True) if f"{APP}#Router#" in a["name"]
    ]
    ray.kill(ray.get_actor(router["name"], namespace=router["namespace"]))
    deadline = time.monotonic() + 180
    seen = list[int | None]()
    while None not in seen or seen[-1] != 200:
        assert time.monotonic() < deadline, "no router came back"
        seen.append(health(OWN_PORT))
        time.sleep(0.002)
    assert 503 not in seen
    wait_until_answered(client)


def test_a_worker_killed_in_mid_answer_costs_a_pause_only(client: Client, journal: Path) -> None:
    stream = client.stream([60], SamplingParams(max_tokens=100))
    tokens = list(next(stream).token_ids)
    with held(journal):
        [submit] = [
            line for line in commands(journal) if line["command"]["prompt_token_ids"] == [60]
        ]
        os.kill(submit["pid"], signal.SIGKILL)
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == list(range(60, 160))
    legs = [line for line in commands(journal) if line["command"]["prompt_token_ids"] == [60]]
    assert len(legs) == 2
    assert legs[0]["pid"] != legs[1]["pid"]
