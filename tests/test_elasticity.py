"""Roles change and workers leave under 32 streams of every kind, without Ray: each answer equals an
undisturbed one to the byte, and nothing has failed. The same over Ray, with counts and nodes:
tests/test_elasticity_ray.py.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from support.constant_load import Calm, calmed, load
from support.hosts import Host, hosts
from support.served import DEMO, Cluster, blocks_in_use, cluster
from support.streams import COMPLETIONS, Ask, drafted, prompts
from support.waiting import Condition, until_async

from pdserve.configs.router import RouterConfig
from pdserve.router.admin import Admin
from pdserve.router.fleet.worker_state import WorkerState
from pdserve.text.grammars.checker import shared_checker
from pdserve.text.tokenizer import Tokenizer

# prompts of more than 128 tokens come in parts
ENGINE = {"num_kv_blocks": 2048, "max_num_batched_tokens": 128}
CONFIG = RouterConfig(split="always", policy="round-robin", worker_silence_s=300.0)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Host]]:
    with hosts(DEMO, "P0", "D0", "D1", engine=ENGINE) as started:
        yield started


@pytest.fixture(scope="module", autouse=True)
def no_process_stays() -> Iterator[None]:
    """Grammars are checked in processes of this one's router."""
    yield
    shared_checker().close()


@pytest.fixture(scope="module")
async def calm(workers: list[Host]) -> Calm:
    async with cluster(*workers) as running:
        make = await drafted(running.client, prompts((160, 800)), Tokenizer.load(DEMO).decode)
        return await calmed(running.client, make)


def state_of(running: Cluster, host: Host) -> WorkerState:
    return next(worker for worker in running.fleet.workers if worker.worker_id == host.worker_id)


async def until(condition: Condition) -> None:
    await until_async(condition)


async def all_free(*running: Cluster) -> None:
    for one in running:
        async with asyncio.timeout(60):
            while await blocks_in_use(one):
                await asyncio.sleep(0.05)


async def test_roles_change_under_load(workers: list[Host], calm: Calm) -> None:
    """Changes roles, 1P2D -> 2P1D -> 1P2D, with other workers in each role. Then a new router
    starts."""
    p0, d0, d1 = workers
    async with cluster(*workers, config=CONFIG) as running:
        admin = Admin(running.fleet)
        async with load(running.client, calm) as asking:
            await asking.until_round()
            decoding = len(state_of(running, d0).legs)
            await admin.set_role(d0.worker_id, "prefill")
            assert decoding and len(state_of(running, d0).legs) > decoding / 2, "they go on"
            await until(lambda: state_of(running, d1).is_connected_to(state_of(running, d0)))
            await asking.until_round()
            await admin.set_role(p0.worker_id, "both")
            await admin.set_role(p0.worker_id, "decode")
            await until(lambda: state_of(running, p0).is_connected_to(state_of(running, d0)))
            await asking.until_round()
        roles = {worker.worker_id[:2]: worker.role for worker in running.fleet.workers}
        assert roles == {"P0": "decode", "D0": "prefill", "D1": "decode"}
        assert await running.metric("pdserve_router_failovers_total") == 0
        assert await running.metric("pdserve_kv_handoffs_total", role="prefill") > 0
        await all_free(running)
    async with cluster(*workers, config=CONFIG) as late:  # a router that comes now
        assert {worker.worker_id[:2]: worker.role for worker in late.fleet.workers} == roles
        answers = await asyncio.gather(*(ask.run(late.client) for ask in calm.drafts()))
        assert answers == calm.expected
        assert await late.metric("pdserve_router_plans_total", plan="whole") == 0
        for host, role in ((p0, "prefill"), (d0, "decode")):
            await Admin(late.fleet).set_role(host.worker_id, role)


async def test_streams_of_a_worker_that_leaves_end_there_or_are_moved(
    workers: list[Host], calm: Calm
) -> None:
    p0, d0, d1 = workers
    async with cluster(p0, d0, config=CONFIG, drain_s=0.1) as running:
        async with load(running.client, calm) as asking:
            await asking.until_round()
            running.join(d1)
            await running.settled(d1, p0)
            count = len(state_of(running, d0).legs)
            planned = state_of(running, d0).num_expected  # these are handed over all the same
            running.fleet.leave(d0.worker_id)
            assert count and len(state_of(running, d0).legs) == count, "they may end"
            await until(lambda: d0.worker_id not in running.fleet.worker_ids)
        moved = await running.metric("pdserve_router_failovers_total", reason="drained")
        assert 0 < moved <= count + planned
        assert await running.metric("pdserve_router_failovers_total") == moved
        await all_free(running)
    async with cluster(d0) as observer:
        await all_free(observer)


async def test_constrained_streams_of_a_worker_that_leaves_go_on_in_their_form(
    workers: list[Host],
) -> None:
    """The worker that takes over builds the grammar anew, and takes it through the tokens that the
    answer has."""
    p0, d0, d1 = workers
    numbers = {"type": "array", "items": {"enum": [*range(99)]}, "minItems": 40, "maxItems": 40}
    schema = {
        "type": "object",
        "properties": {"numbers": numbers, "end": {"const": "é"}},
        "required": ["numbers", "end"],
        "additionalProperties": False,
    }
    form = {"structured_outputs": {"json": schema | {"title": "drained"}}}
    asks = [
        Ask(name, COMPLETIONS, {"prompt": "Numbers:", **form, **fields, "max_tokens": 600})
        for name, fields in (
            ("greedy", {"temperature": 0, "return_token_ids": True}),
            ("sampled", {"temperature": 1.0, "seed": 5, "n": 2, "return_token_ids": True}),
            ("whole", {"temperature": 0, "stream": False}),
        )
    ]
    async with cluster(p0, d0, config=CONFIG) as running:
        expected = await asyncio.gather(*(ask.run(running.client) for ask in asks))
    for answer in expected:
        for choice in as_list(json.loads(answer)["choices"]):
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(choice["text"]), schema)
    again = [Ask(ask.name, ask.path, ask.body) for ask in asks]
    async with cluster(p0, d0, config=CONFIG, drain_s=0.0) as running:
        running.join(d1)
        await running.settled(p0, d0, d1)
        asking = asyncio.gather(*(ask.run(running.client) for ask in again))
        await until(lambda: all(sum(ask.counts.values()) > 20 for ask in again if ask.streams))
        busy, count = max(
            ((host, len(state_of(running, host).legs)) for host in (d0, d1)), key=lambda at: at[1]
        )
        assert count
        running.fleet.leave(busy.worker_id)
        assert await asking == expected
        moved = await running.metric("pdserve_router_failovers_total", reason="drained")
        assert 0 < moved == await running.metric("pdserve_router_failovers_total")
        await until(lambda: busy.worker_id not in running.fleet.worker_ids)


def as_list(choices: Any) -> list[Any]:
    """The choices of a whole answer, or of a folded stream, which has them by index."""
    return list(choices.values()) if isinstance(choices, dict) else choices
