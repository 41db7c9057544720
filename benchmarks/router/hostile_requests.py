"""What somebody may send to a router who wishes it ill, or does not know better: the rows of
router_stall.py.

Each row is a name, what it is in a few words, and a coroutine that sends it to a port of 127.0.0.1
and says what came back; `hostile/` has them by subject. Runs in a process of its own, so that
building and sending megabytes holds up nobody who measures.
"""

from multiprocessing.connection import Connection

import uvloop

from benchmarks.router.hostile import answers, bodies, connections, parameters, prompts
from benchmarks.router.hostile.sending import ROWS, chats, completes

# their rows are in ROWS once they are imported
SUBJECTS = (prompts, parameters, bodies, answers, connections)


def warm_up(port: int) -> None:
    """What a router loads and makes once, it has loaded and made before it is measured."""
    attacks = [completes(prompt="Hi", max_tokens=4, stop=["x"]), chats(max_tokens=4, stream=True)]
    for attack in attacks:
        answers = uvloop.run(attack(port, 10.0))
        assert answers[0].status == 200, answers


def run_sender(pipe: Connection) -> None:
    """The process that sends: a row's name in, "ready" out; then a port in, the answers out; None
    ends it."""
    while (name := pipe.recv()) is not None:
        row_ = ROWS[name]
        attack = ROWS[name].prepare()
        pipe.send("ready")
        pipe.send(uvloop.run(attack(pipe.recv(), row_.limit_s)))
