"""Checks the names by which this server is called.

A page in a browser may come from a name that is later made to point to this machine (DNS
rebinding); its requests have that name in Host. A server that listens on loopback is meant for
local programs, which call it by a loopback name. Made and used by `router.http.endpoints`.
"""

import ipaddress
import re
from collections.abc import Sequence

from pdserve.router.errors import ApiError

# a name, an IPv4 address, or an IPv6 address in brackets; then perhaps a port
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^:\[\]]*))(?::\d*)?")


class Hosts:
    """The allowed names of a server.

    `is_loopback` is True if it listens only on loopback. `allowed` are further names in lower case;
    "*" allows any.
    """

    def __init__(self, is_loopback: bool, allowed: Sequence[str] = ()) -> None:
        self._checks = is_loopback and "*" not in allowed
        self._allowed = frozenset(allowed)

    def check(self, header: str | None) -> None:
        """Raises ApiError (403) if the header Host has a name that is none of this server's."""
        if not self._checks:
            return
        match = _HOST.fullmatch(header or "")
        name = (match[1] or match[2]).lower().rstrip(".") if match else ""
        if is_loopback(name) or name in self._allowed:
            return
        raise ApiError(
            f"the header Host names {header!r:.80}, but this server listens on loopback and "
            "answers only to localhost, 127.0.0.1 and [::1]: use one of them in the URL, or add "
            "the name to router.allowed_hosts",
            status=403,
            kind="permission_error",
            code="host_not_allowed",
        )


def is_loopback(host: str) -> bool:
    """True if a name or an address is this machine's own, without any DNS query."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
