"""Which batch sizes are captured. (Captures and replays: test_gpu.py.)"""

import pytest

from pdserve.engine.execution.cuda_graphs import graph_sizes


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 100, 256, 500, 512])
def test_every_batch_up_to_the_largest_has_a_graph_not_much_larger(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for batch in range(1, most + 1):
        size = min(size for size in sizes if size >= batch)
        assert size - batch < max(16 if batch > 128 else 8, 1)
        assert batch > 4 or size <= 2 * batch
