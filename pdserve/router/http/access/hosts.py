"""By which names this server is asked.

A page in a browser may be served under a name that is then made to point to this machine (DNS
rebinding); its requests bear that name in Host. A server that listens on loopback is meant for
programs here, who know it by a loopback name. Made and used by `router.http.endpoints`.
"""

import ipaddress
import re
from collections.abc import Sequence

from pdserve.router.errors import ApiError

# a name or an IPv4 address, or an IPv6 address in brackets; and a port
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^:\[\]]*))(?::\d*)?")


class Hosts:
    """is_loopback: the server listens there alone. allowed: further names, lower case; "*": any."""

    def __init__(self, is_loopback: bool, allowed: Sequence[str] = ()) -> None:
        self._checks = is_loopback and "*" not in allowed
        self._allowed = frozenset(allowed)

    def check(self, header: str | None) -> None:
        """header: Host. Raises ApiError (403) for a name that is none of this server's."""
        if not self._checks:
            return
        match = _HOST.fullmatch(header or "")
        name = (match[1] or match[2]).lower().rstrip(".") if match else ""
        if is_loopback(name) or name in self._allowed:
            return
        raise ApiError(
            f"the header Host names {header!r:.80}, but this server listens on loopback and is "
            "asked by localhost, 127.0.0.1 or [::1]: use one of them in the URL, or add the name "
            "to router.allowed_hosts",
            status=403,
            kind="permission_error",
            code="host_not_allowed",
        )


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own, without a look into any DNS."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
