"""Which ranks share a node: agreed among all, and refused if a stage's ranks do not."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from pdserve.parallel import nodes
from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.dims import ParallelDims


def near(names: list[str], **degrees: int) -> list[list[int] | str]:
    """What each rank finds if these are the names of their nodes, or why it does not."""
    host = RankGroup.host(ParallelDims(**degrees))

    def find(rank: int) -> list[int] | str:
        dims = ParallelDims(**degrees, rank=rank)
        group = host if rank == 0 else RankGroup.join(dims, host.address)
        try:
            return nodes.near_ranks(group)
        except ValueError as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(names)) as ranks:
        patch.setattr(nodes, "node_name", lambda group: names[group.dims.rank])
        return list(ranks.map(find, range(len(names))))


def test_ranks_of_one_node_find_each_other() -> None:
    assert near(["a", "a", "b", "b"], tp=2, pp=2) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert near(["a", "b", "a"], pp=3) == [[0, 2], [1], [0, 2]]
    assert near(["a", "a"], tp=2) == [[0, 1], [0, 1]]


def test_ranks_that_share_layers_must_share_a_node() -> None:
    for told in near(["a", "b"], tp=2):
        assert isinstance(told, str) and "use pipeline_parallel over nodes" in told
    first, _ = near(["a", "b"], tp=2)
    assert "ranks 0 and 1 share layers" in first


def test_processes_of_one_machine_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    host = RankGroup.host(ParallelDims(tp=2))
    other = RankGroup.join(ParallelDims(tp=2, rank=1), host.address)
    name = nodes.node_name(host)
    assert nodes.node_name(other) == name
    assert nodes.BOOT_ID.read_text().strip() in name
    monkeypatch.setattr(nodes, "NAMESPACES", ["/proc/self/ns/net"])
    assert nodes.node_name(host) != name, "a container of its own"
