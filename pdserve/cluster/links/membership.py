"""Knows which workers of a deployment this process may call right now, and tells listeners when
that changes.

There is one board for the whole process. Serve builds its request routers by itself, on its own
threads, and gives nobody a reference to them. Written by `cluster.links.addressing`, read by
`cluster.links.serve_links`. Knows no Ray.
"""

import threading
from collections import defaultdict
from collections.abc import Callable

Members = frozenset[str]
Listener = Callable[[Members], None]

_lock = threading.Lock()
_members: dict[str, Members] = {}
_listeners: dict[str, list[Listener]] = defaultdict(list)


def publish(deployment: str, members: Members) -> None:
    """Sets the worker ids of a deployment (`app#name`).

    Listeners are called on this thread, one after the other.
    """
    with _lock:
        if _members.get(deployment) == members:
            return
        _members[deployment] = members
        for listener in _listeners[deployment]:
            listener(members)


def listen(deployment: str, listener: Listener) -> Callable[[], None]:
    """Calls `listener` with the present members and with every later set, in order.

    Returns a function that ends this. A listener must not block, and must not call this module.
    """
    with _lock:
        _listeners[deployment].append(listener)
        listener(_members.get(deployment, frozenset()))

    def stop() -> None:
        with _lock:
            _listeners[deployment].remove(listener)

    return stop
