"""Ranks that share no files with rank 0, as if on another node."""

import socket

import msgspec
import pytest

from pdserve.parallel import rank_sockets


def part_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody finds rank 0's Unix sockets any more. To be called in rank 0's process."""
    address = rank_sockets._address

    def elsewhere(near: socket.socket, far: socket.socket, word: bytes) -> rank_sockets._Address:
        return msgspec.structs.replace(address(near, far, word), path="/nowhere/rank0")

    monkeypatch.setattr(rank_sockets, "_address", elsewhere)
