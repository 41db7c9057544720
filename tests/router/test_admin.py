"""The operator's side of a router: reports, roles while requests run, counts, what is refused, and
who may ask by HTTP."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from router.harness import Harness, until
from support.clock import Clock

from pdserve.cluster.operate.commands import table
from pdserve.configs.router import RouterConfig
from pdserve.protocol.commands import ConnectPeer, DisconnectPeer, SetRole
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router import admin as router_admin
from pdserve.router.admin import Admin, CannotScale, Count
from pdserve.router.choosing.split_gain import SplitGain
from pdserve.router.errors import ApiError
from pdserve.router.http.app import build_app

Make = Callable[..., Harness]
PROMPT = tuple(range(10, 30))


class FakeCounts:
    """Stands for Serve."""

    def __init__(self) -> None:
        self.targets = {"prefill": 1, "decode": 1}
        self.broken: Exception | None = None

    async def get(self) -> dict[str, Count]:
        if isinstance(self.broken, ConnectionError):
            raise self.broken
        return {name: Count(target=target, running=1) for name, target in self.targets.items()}

    async def set(self, targets: Mapping[str, int]) -> list[str]:
        if self.broken is not None:
            raise self.broken
        self.targets |= targets
        return ["no room"] if max(targets.values()) > 9 else []


def sampling(**values: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 7, "max_tokens": 12, "ignore_eos": True} | values))


def admin_of(harness: Harness) -> tuple[Admin, FakeCounts]:
    counts = FakeCounts()
    return Admin(harness.fleet, counts), counts


async def refused(work: Any, status: int, *words: str) -> None:
    with pytest.raises(ApiError) as caught:
        await work
    assert caught.value.status == status and all(word in caught.value.message for word in words), (
        caught.value.message
    )


async def test_a_changed_role_is_chosen_by_and_introduced(make: Make) -> None:
    harness = await make(1, 2, policy="round-robin").start()
    admin, _ = admin_of(harness)
    assert (await admin.set_role("d1", "prefill")).role == "prefill"
    await until(lambda: ("d0", "d1") in harness.connected_pairs())
    for _ in range(4):
        harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())
    assert (
        len(harness.decodes[1].submits("prefill"))
        == len(harness.prefills[0].submits("prefill"))
        == 2
    )
    assert len(harness.decodes[0].submits("decode")) == 4 and not harness.decodes[1].submits(
        "decode"
    )

    await admin.set_role("p0", "decode")
    await until(lambda: ("p0", "d1") in harness.connected_pairs())
    for _ in range(2):
        harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())
    assert len(harness.prefills[0].submits("decode")) == 1
    await admin.set_role("d1", "decode")  # without any prefill worker all is done whole
    harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())
    assert sum(len(worker.submits("full")) for worker in harness.world.workers.values()) == 1


async def test_what_runs_ends_as_it_began(make: Make) -> None:
    """P's leg is under way to a planned D when both change."""
    harness = await make(1, 2).start()
    admin, _ = admin_of(harness)
    for worker in harness.world.workers.values():
        worker.step_s = 0.02
    tasks = [
        asyncio.create_task(harness.collect(PROMPT, sampling(max_tokens=30))) for _ in range(4)
    ]
    await until(lambda: harness.prefills[0].submits())
    await admin.set_role("d0", "prefill")
    await admin.set_role("p0", "both")
    await until(lambda: harness.decodes[0].submits("decode"))
    await admin.set_role("p0", "prefill")
    for task in tasks:
        harness.check(await task, PROMPT, sampling(max_tokens=30))
    assert next(iter(harness.service.metrics.failovers.collect())).samples == []
    assert harness.world.held() == 0


async def test_the_last_decoder_stays_unless_forced(make: Make) -> None:
    harness = await make(1, 1).start()
    admin, _ = admin_of(harness)
    await refused(admin.set_role("d0", "prefill"), 409, "d0", "only worker that can decode")
    await admin.set_role("d0", "both")
    await admin.set_role("p0", "both")
    changes = await asyncio.gather(
        admin.set_role("p0", "prefill"), admin.set_role("d0", "prefill"), return_exceptions=True
    )
    assert [isinstance(change, ApiError) for change in changes] == [False, True], (
        "they do not count on each other"
    )
    await admin.set_role("d0", "prefill", force=True)
    await refused(harness.collect(PROMPT, sampling()), 503)


async def test_a_role_that_an_operator_confirms_is_the_operators(make: Make) -> None:
    harness = await make(1, 1).start()
    admin = Admin(harness.fleet)
    decode = next(w for w in harness.fleet.workers if w.worker_id == "d0")
    for _ in range(2):
        await admin.set_role("d0", "decode")
        await until(lambda: decode.snapshot is not None and decode.snapshot.role_by == "operator")
    assert sum(isinstance(command, SetRole) for command in harness.decodes[0].commands) == 1


async def test_a_report_says_whether_splitting_pays(make: Make, clock: Clock) -> None:
    harness = await make(1, 1, now=clock).start()
    gain = SplitGain()
    admin = Admin(harness.fleet, gain=gain, now=clock)
    assert "too few recent prompts" in (await admin.report()).splitting
    for _ in range(121):
        gain.note(0.0, clock())
        clock.seconds += 1
    report = await admin.report()
    assert report.splitting.startswith("splitting does not pay here")
    assert list(table(report))[-1] == report.splitting
    await admin.set_role("p0", "both")
    assert (await admin.report()).splitting == "", "nobody is there to split with"


async def test_roles_that_cannot_be(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await make(1, 1).start()
    admin, _ = admin_of(harness)
    harness.add("a0", "both", pool=False)
    await until(lambda: len(harness.fleet.workers) == 3)
    await refused(admin.set_role("d0", "draft"), 400, "prefill, decode or both", "'draft'")
    await refused(admin.set_role("d9", "both"), 404, "'d9'", "a0, d0, p0")
    await refused(admin.set_role("a0", "decode"), 400, "a0", "hands nothing over")
    harness.prefills[0].mute = True
    with monkeypatch.context() as patch:
        patch.setattr(router_admin, "ANSWER_S", 0.1)
        await refused(admin.set_role("p0", "both"), 503, "p0 did not answer")
    monkeypatch.setattr(router_admin, "ANSWER_S", 600.0)
    changing = asyncio.create_task(admin.set_role("p0", "decode"))
    await until(lambda: SetRole(role="decode") in harness.prefills[0].commands)
    harness.prefills[0].die()
    await refused(changing, 503, "p0 was lost")
    task = asyncio.create_task(harness.collect(PROMPT, sampling(max_tokens=100)))
    harness.decodes[0].step_s = 0.01
    await until(lambda: harness.decodes[0].submits())
    harness.fleet.leave("d0")
    await refused(admin.set_role("d0", "both"), 409, "d0 is leaving")
    assert not any(isinstance(command, SetRole) for command in harness.decodes[0].commands)
    task.cancel()


async def test_a_worker_that_decodes_no_more_forgets_a_peer_that_left(make: Make) -> None:
    harness = await make(1, 2).start()
    admin, _ = admin_of(harness)
    await admin.set_role("d1", "prefill")
    harness.prefills[0].die()
    await until(lambda: "p0" not in harness.fleet.worker_ids)
    harness.fleet.leave("p0")
    gone = DisconnectPeer(engine_id="engine-p0", incarnation=1)
    await until(lambda: gone in harness.decodes[1].commands)


async def test_a_worker_that_comes_with_a_changed_role_is_taken_so(make: Make) -> None:
    """A second router hears of it in Hello."""
    harness = await make(0, 1).start()
    harness.decodes[0].role = "prefill"
    harness.fleet.leave("d0")
    await until(lambda: not harness.fleet.worker_ids)
    harness.fleet.join(harness.decodes[0])
    harness.add("d1", "decode")
    await until(lambda: harness.connected_pairs() == {("d1", "d0")})
    assert not any(isinstance(command, ConnectPeer) for command in harness.decodes[0].commands)


async def test_counts_go_to_who_starts_workers(make: Make) -> None:
    harness = make(0, 0)
    for name in ("Prefill#a", "Decode#b", "Decode#c"):
        harness.add(name, "prefill" if name[0] == "P" else "decode")
    await until(lambda: len(harness.fleet.workers) == 3)
    admin, counts = admin_of(harness)
    report = await admin.scale({"prefill": 2, "decode": 10})
    assert counts.targets == {"prefill": 2, "decode": 10} and report.warnings == ["no room"]
    assert report.counts["decode"] == Count(target=10, running=1)
    assert [worker.deployment for worker in report.workers] == ["decode", "decode", "prefill"]
    await admin.scale({"prefill": 0})
    for bad in ({"decode": -1}, {"router": 1}, {"decode": True}, {"decode": 1025}):
        await refused(admin.scale(bad), 400, next(iter(bad)))
    await refused(admin.scale({"decode": 200_000}), 400, "decode=200000", "at most 1024")
    await refused(admin.scale({"decode": 0}), 409, "might leave no worker")
    await admin.set_role("c", "prefill")
    await refused(admin.scale({"decode": 1}), 409, "might leave no worker")  # Serve may stop b
    await admin.scale({"decode": 1}, force=True)
    assert counts.targets == {"prefill": 0, "decode": 1}
    await admin.set_role("Prefill#a", "both")
    await admin.scale({"prefill": 1, "decode": 0})
    counts.broken = ConnectionError("the controller is gone")
    await refused(admin.scale({"decode": 1}), 503, "controller")
    await refused(admin.report(), 503, "controller")
    counts.broken = CannotScale("external_scaler_enabled")
    await refused(admin.scale({"decode": 1}), 409, "external_scaler_enabled")
    await refused(Admin(harness.fleet).scale({"decode": 1}), 409)


async def test_a_role_is_not_taken_from_who_may_be_the_last_after_a_scale(make: Make) -> None:
    """Serve stops b or c, and nobody knows which: the router sees both for a while."""
    harness = make(0, 0)
    for name in ("Prefill#a", "Decode#b", "Decode#c"):
        harness.add(name, "prefill" if name[0] == "P" else "decode")
    await until(lambda: len(harness.fleet.workers) == 3)
    admin, counts = admin_of(harness)
    counts.targets["decode"] = 2
    await admin.scale({"decode": 1})
    await refused(admin.set_role("b", "prefill"), 409, "b", "only worker that can decode")
    await admin.set_role("a", "both")
    await admin.set_role("b", "prefill")
    # c may be the one that stops
    await refused(admin.scale({"prefill": 0}), 409, "might leave no worker")
    counts.broken = ConnectionError("the controller is gone")
    await refused(admin.set_role("c", "prefill"), 503, "controller")
    await admin.set_role("b", "decode")


async def call(
    app: Any,
    method: str,
    path: str,
    client: str = "127.0.0.1",
    base: str = "127.0.0.1",
    **more: Any,
) -> Any:
    transport = httpx.ASGITransport(app=app, client=(client, 5))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{base}:8000") as http:
        return await http.request(method, path, **more)


async def test_http_routes_are_for_this_machine(make: Make) -> None:
    harness = make(0, 0)
    for name in ("Prefill#a", "Decode#b", "Decode#c"):
        harness.add(name, "prefill" if name[0] == "P" else "decode")
    await until(lambda: len(harness.fleet.workers) == 3)
    admin, counts = admin_of(harness)
    counts.targets["decode"] = 2
    assert (await call(harness.app, "GET", "/admin/workers")).status_code == 404
    app = build_app(
        harness.fleet, harness.tokenizer, RouterConfig(), "demo", harness.service, admin
    )
    answer = await call(app, "GET", "/admin/workers")
    assert answer.status_code == 200
    assert [w["worker"] for w in answer.json()["workers"]] == ["Decode#b", "Decode#c", "Prefill#a"]
    answer = await call(app, "POST", "/admin/workers/Decode%23c/role", json={"role": "prefill"})
    assert answer.status_code == 200 and answer.json()["role"] == "prefill"
    answer = await call(app, "POST", "/admin/workers/b/role", json={"role": "prefill"})
    assert answer.status_code == 409 and answer.json()["error"]["code"] == "last_decode_worker"
    assert (await call(app, "POST", "/admin/scale", json={"decode": 3})).status_code == 200
    assert counts.targets == {"prefill": 1, "decode": 3}

    strangers: list[dict[str, Any]] = [{"client": "10.0.0.3"}, {"base": "evil.example"}]
    for stranger in strangers:
        for method, path in (
            ("GET", "/admin/workers"),
            ("POST", "/admin/scale"),
            ("POST", "/admin/workers/b/role"),
        ):
            answer = await call(app, method, path, **stranger, json={})
            assert answer.status_code == 403, (stranger, path)
    form = await call(
        app,
        "POST",
        "/admin/scale",
        content=b'{"decode": 4}',
        headers={"content-type": "text/plain"},
    )
    assert form.status_code == 415
    bad: list[Any] = [{"decode": "x"}, {"decod": 1}, [], {"decode": -1}]
    for body in bad:
        assert (await call(app, "POST", "/admin/scale", json=body)).status_code == 400
    assert (
        await call(app, "GET", "/admin/workers", client="::1", base="localhost")
    ).status_code == 200
    assert counts.targets == {"prefill": 1, "decode": 3}


async def test_http_routes_ask_for_a_key_where_there_are_keys(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYS_OF_THE_TEST", "one")
    harness = make(0, 1)
    admin, _ = admin_of(harness)
    config = RouterConfig(api_key_env="KEYS_OF_THE_TEST")
    app = build_app(harness.fleet, harness.tokenizer, config, "demo", harness.service, admin)
    key = {"authorization": "Bearer one"}
    assert (await call(app, "GET", "/admin/workers")).status_code == 401
    assert (await call(app, "GET", "/admin/workers", headers=key)).status_code == 200
    assert (
        await call(app, "GET", "/admin/workers", headers=key, client="10.0.0.3")
    ).status_code == 403
