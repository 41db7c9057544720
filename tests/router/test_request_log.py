"""One line a request, in both forms, and what must never be in a line."""

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from router.fake_worker import FakeWorker
from router.harness import Harness
from support.clock import Clock

from pdserve.cluster.deployments.logs import JsonFormatter

Make = Callable[..., Harness]

SECRET = "swordfish"
NUMBERS = {"ttft_s", "tpot_s", "total_s", "queue_s"}


class Lines(logging.Handler):
    """Keeps the lines that a JSON file would have."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter({"worker": "none"}))
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    def of(self, part: str) -> list[dict[str, Any]]:
        """The lines whose request's id has this part."""
        lines = [json.loads(text) for text in self.texts]
        return [line for line in lines if part in line.get("request_id", "")]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    ours = logging.getLogger("pdserve")
    before = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    yield handler
    ours.removeHandler(handler)
    ours.setLevel(before)


async def ask(harness: Harness, name: str, **body: Any) -> Any:
    json_body = {
        "model": harness.service.model_name,
        "prompt": SECRET,
        "max_tokens": 5,
        "seed": 3,
        "ignore_eos": True,
    }
    headers = {"x-request-id": name, "authorization": f"Bearer {SECRET}-key"}
    return await harness.http().post("/v1/completions", json=json_body | body, headers=headers)


async def test_a_finished_request_has_one_line_of_json(make: Make, lines: Lines) -> None:
    harness = await make(1, 1, logs={"format": "json"}).start()
    answer = await ask(harness, "one")
    assert answer.headers["x-request-id"] == "one" and answer.json()["id"] == "cmpl-one"
    [line] = [line for line in lines.of("cmpl-one-") if "outcome" in line]
    assert line.keys() >= NUMBERS and all(isinstance(line[name], float) for name in NUMBERS)
    assert 0 < line["ttft_s"] < line["total_s"]
    expected = {
        "outcome": "ok",
        "model": "demo",
        "finish_reasons": ["length"],
        "generated_tokens": 5,
        "prompt_tokens": answer.json()["usage"]["prompt_tokens"],
        "prefill_worker": "p0",
        "decode_worker": "d0",
        "kv_source": "p2p",
        "attempts": 2,
        "failovers": 0,
    }
    assert {name: line[name] for name in expected} == expected
    assert line["message"] == f"request {line['request_id']} ended: ok"
    assert not [text for text in lines.texts if SECRET in text], "neither prompts nor keys"


async def test_text_has_the_same_in_the_message(make: Make, lines: Lines) -> None:
    harness = await make(0, 1, logs={"format": "text"}).start()
    await ask(harness, "two", n=2)
    [line] = [line for line in lines.of("cmpl-two-") if "outcome" in line]
    said = line["message"]
    assert said.startswith(
        f"request {line['request_id']} ended: ok model=demo prompt=0 finish_reasons=length,length "
    )
    assert "generated_tokens=10" in said and "prefill_worker=None decode_worker=d0" in said


def die_once(harness: Harness, worker: FakeWorker, when: int, number: int) -> None:
    if number == when and all(other.alive for other in harness.decodes):
        worker.die()


async def test_a_failover_is_told_with_the_requests_id(make: Make, lines: Lines) -> None:
    harness = await make(0, 2, logs={"format": "json"}).start()
    for worker in harness.decodes:
        worker.before_batch = partial(die_once, harness, worker, 3)
    await ask(harness, "three")
    told = lines.of("cmpl-three-")
    assert {line["message"].split()[0] for line in told} == {"request", "timeline"}
    [line] = [line for line in told if "outcome" in line]
    assert (line["failovers"], line["attempts"], line["outcome"], line["generated_tokens"]) == (
        1,
        2,
        "ok",
        5,
    )


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [({"top_p": 7}, 400, "invalid_request_error"), ({"model": "x"}, 404, "model_not_found")],
)
async def test_a_refused_call_has_a_line(
    make: Make, lines: Lines, body: dict[str, Any], status: int, reason: str
) -> None:
    harness = await make(0, 1, logs={"format": "json"}).start()
    answer = await ask(harness, "four", **body)
    assert answer.status_code == status and answer.headers["x-request-id"] == "four"
    [line] = [line for line in lines.of("four") if "outcome" in line]
    assert (line["outcome"], line["status"], line["reason"]) == ("refused", status, reason)
    assert not [text for text in lines.texts if SECRET in text]


async def test_the_line_of_a_late_prompt_says_why(make: Make, clock: Clock, lines: Lines) -> None:
    """In both forms: what was before it, its own time, the caution, the worker; and for how long to
    stay away."""

    async def refused(name: str, **logs: Any) -> Any:
        harness = make(1, 2, slo={"ttft_ms": 200}, now=clock, logs=logs)
        prefill = harness.prefills[0]
        for worker in [prefill, *harness.decodes]:
            worker.prefill_tokens_per_s = 1000.0
        prefill.queue_tokens = 5000
        await harness.start()
        harness.service.admission.caution = 1.5
        return await ask(harness, name, prompt=list(range(10, 30)))

    answer = await refused("late", format="json")
    assert answer.status_code == 429
    [line] = [line for line in lines.of("late") if "outcome" in line]
    assert (line["outcome"], line["reason"], line["caution"]) == ("refused", "predicted_late", 1.5)
    assert line["worker"] == "p0" and line["retry_after_s"] == int(answer.headers["retry-after"])
    assert line["wait_s"] == 5.0 and line["own_s"] == 0.02, "before the caution"
    await refused("late-too", format="text")
    [told] = [line["message"] for line in lines.of("late-too") if "outcome" in line]
    assert (
        "reason=predicted_late retry_after_s=" in told
        and "own_s=0.02 caution=1.5 worker=p0" in told
    )


async def test_a_request_that_fails_has_one_line_and_no_second(make: Make, lines: Lines) -> None:
    harness = await make(0, 1, max_attempts=1, logs={"format": "json"}).start()
    harness.decodes[0].fail_submit = lambda submit: "internal"
    answer = await ask(harness, "five")
    assert answer.status_code == 500
    assert [line["outcome"] for line in lines.of("five") if "outcome" in line] == ["internal"]


async def test_who_wants_no_lines_gets_none(make: Make, lines: Lines) -> None:
    harness = await make(0, 1, logs={"requests": False}).start()
    await ask(harness, "six")
    await ask(harness, "six", top_p=7)
    assert not [line for line in lines.of("six") if "outcome" in line]


async def test_a_request_without_a_name_gets_one(make: Make) -> None:
    harness = await make(0, 1).start()
    http = harness.http()
    body = {"model": harness.service.model_name, "prompt": "a", "max_tokens": 1}
    answers = [
        await http.post("/v1/completions", json=body | {"stream": stream})
        for stream in (False, True)
    ]
    names = [answer.headers["x-request-id"] for answer in answers]
    assert (
        len(set(names)) == 2
        and answers[0].json()["id"] == f"cmpl-{names[0]}"
        and f"cmpl-{names[1]}" in answers[1].text
    )
    unnamed = await http.post("/v1/completions", json=body, headers={"x-request-id": "not a name"})
    assert unnamed.status_code == 400 and unnamed.json()["error"]["param"] == "x-request-id"
    assert unnamed.headers["x-request-id"] not in ("", "not a name")
