"""Which part of the pool's chunks a rank keeps, and which ranks keep a server for their node."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.shares import Degrees, dims_of, num_ranks

from pdserve.kvtransfer.pool.chunks import Shard
from pdserve.worker.hosts import pool_servers
from pdserve.worker.hosts.pool_servers import server_of_node, shard_of


def test_homes_keep_the_same_shards() -> None:
    degrees = Degrees(tp=2, pp=2, dp=2)
    by_home: dict[int, list[Shard]] = {}
    for rank in range(num_ranks(degrees)):
        dims = dims_of(rank, degrees)
        by_home.setdefault(dims.home, []).append(shard_of(dims))
    assert by_home == {home: [Shard(4, place) for place in range(4)] for home in (0, 1)}
    alone = Degrees(tp=2, pp=2)
    assert by_home[0] == [shard_of(dims_of(rank, alone)) for rank in range(4)]


@pytest.mark.parametrize(
    ("nodes", "keepers"), [(("a", "b"), [0, 4]), (("a", "a"), [0])], ids=["two nodes", "one node"]
)
def test_one_rank_of_a_node_keeps_its_server(
    nodes: tuple[str, str], keepers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nodes` are those of the two stages, each of which has two homes."""
    monkeypatch.setattr(pool_servers, "SharedServer", lambda _: "a server")
    degrees = Degrees(tp=2, pp=2, dp=2)
    transfer = SimpleNamespace(pool=SimpleNamespace(mode="start"))
    kept = []
    for rank in range(num_ranks(degrees)):
        dims = dims_of(rank, degrees)
        config: Any = SimpleNamespace(transfer=transfer, host=nodes[dims.pp_rank])
        group: Any = SimpleNamespace(dims=dims, rank0_host=nodes[0])
        if server_of_node(config, group) is not None:
            kept.append(rank)
    assert kept == keepers
