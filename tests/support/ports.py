"""Ports of this machine that nobody listens at."""

import socket
from contextlib import suppress
from random import SystemRandom

FIRST, LAST = 20_000, 32_000
"""Between the ports of Ray's workers and those that Linux gives to whoever asks for any. So nobody
is given a port that a test has found and not bound yet."""


def free_port() -> int:
    while True:
        port = SystemRandom().randint(FIRST, LAST)  # tests of two processes have the same seed
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
