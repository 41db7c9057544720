"""/live and /ready: what load balancers and Kubernetes are told."""

from collections.abc import Callable

from router.harness import Harness, until

Make = Callable[..., Harness]


async def asked(harness: Harness) -> tuple[int, list[str]]:
    """The status of /ready, and what is missing."""
    answer = await harness.http().get("/ready")
    body = answer.json()
    assert body["ready"] is (answer.status_code == 200) is not body["missing"]
    return answer.status_code, body["missing"]


async def test_ready_is_a_connected_pair(make: Make) -> None:
    harness = await make(1, 1).start()
    answer = await harness.http().get("/ready")
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert answer.json() == {"ready": True, "prefill": 1, "decode": 1, "both": 0, "missing": []}
    assert (await harness.http().get("/live")).status_code == 200


async def test_what_is_missing_is_said(make: Make) -> None:
    harness = make(1, 1)
    http = harness.http()
    status, missing = await asked(harness)
    assert status == 503 and [text.split(" worker")[0] for text in missing] == [
        "no prefill",
        "no decode",
    ]
    assert (await http.get("/health")).status_code == 503
    assert (await http.get("/live")).status_code == 200, "the router itself lives"
    harness.fleet.join(harness.decodes[0])
    await until(lambda: len(harness.fleet.workers) == 1)
    status, missing = await asked(harness)
    assert status == 503 and [text.partition(":")[0] for text in missing] == [
        "no prefill worker is running"
    ]
    assert (await http.get("/health")).status_code == 200, "a decode worker does whole requests"
    await harness.start()
    assert await asked(harness) == (200, [])
    harness.fleet.leave("d0")
    status, missing = await asked(harness)
    assert status == 503 and [text.partition(":")[0] for text in missing] == [
        "no decode worker is running"
    ]


async def test_a_pair_that_is_not_connected_is_not_ready(make: Make) -> None:
    harness = make(1, 1)
    harness.decodes[0].refuse_connects = 1 << 20
    for worker in (*harness.prefills, *harness.decodes):
        harness.fleet.join(worker)
    await until(lambda: len(harness.fleet.workers) == 2)
    status, missing = await asked(harness)
    assert status == 503 and missing[0].startswith("no decode worker is connected to a prefill")


async def test_a_whole_worker_is_enough(make: Make) -> None:
    harness = await make(0, 0).start()
    harness.add("w0", "both")
    await until(lambda: len(harness.fleet.workers) == 1)
    assert await asked(harness) == (200, [])
    harness.fleet.leave("w0")
    assert (await asked(harness))[0] == 503
