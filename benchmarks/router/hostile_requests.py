"""The rows of router_stall.py: requests that may harm a router, on purpose or by mistake.

Each row has a name, a short description, and a coroutine that sends the request to a port of
127.0.0.1 and returns the answers. `hostile/` has the rows by subject. This module runs in a process
of its own, so that building and sending megabytes does not disturb the measurement.
"""

from multiprocessing.connection import Connection

import uvloop

from benchmarks.router.hostile import answers, bodies, connections, parameters, prompts
from benchmarks.router.hostile.sending import ROWS, chats, completes

# importing these modules registers their rows in ROWS
SUBJECTS = (prompts, parameters, bodies, answers, connections)


def warm_up(port: int) -> None:
    """Lets a router load and make all that it makes only once, before it is measured."""
    attacks = [completes(prompt="Hi", max_tokens=4, stop=["x"]), chats(max_tokens=4, stream=True)]
    for attack in attacks:
        answers = uvloop.run(attack(port, 10.0))
        assert answers[0].status == 200, answers


def run_sender(pipe: Connection) -> None:
    """Runs the process that sends. It gets a row's name and sends "ready". Then it gets a port and
    sends the answers. None ends it."""
    while (name := pipe.recv()) is not None:
        row_ = ROWS[name]
        attack = ROWS[name].prepare()
        pipe.send("ready")
        pipe.send(uvloop.run(attack(pipe.recv(), row_.limit_s)))
