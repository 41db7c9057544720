"""The KV pool of blocks that lie on a device. In a file of its own: it needs no LMCache, which a
GPU machine may lack."""

import pytest
import torch
from kvtransfer.pool_peers import CHUNK, SIZE, Engine, prompt
from support.local_pool_backend import LocalPoolServer

from pdserve.kvtransfer.connector import PoolDone


@pytest.mark.gpu
def test_blocks_of_a_device() -> None:
    server = LocalPoolServer()
    writer = Engine(server, device="cuda")
    reader = Engine(server, device="cuda")
    tokens = prompt(3 * CHUNK)
    writer.keep(tokens, [40, 3, 2, 1, 17, 18, 19, 20, 60, 59, 5, 6])
    torch.cuda.synchronize()
    assert isinstance(reader.retrieve(tokens, range(20, 30), skip=2 * SIZE), PoolDone)
    assert reader.holds(tokens, range(20, 30), first=2)
    assert reader.untouched([*range(20), *range(30, 64)])
    writer.close()
    reader.close()
