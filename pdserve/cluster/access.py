"""Tells who can reach the HTTP port, and whether API keys protect it."""

from pdserve.configs.schema import ClusterConfig


def is_open(host: str) -> bool:
    """True if other machines can reach this host address."""
    return host not in ("localhost", "::1") and not host.startswith("127.")


def has_keys(config: ClusterConfig) -> bool:
    return bool(config.router.api_key_env or config.router.api_keys_file)


def open_door(host: str) -> str:
    return (
        f"http_options.host {host} can be reached from other machines, and no API key is needed: "
        "set router.api_keys_file or router.api_key_env (docs/use/security.md)"
    )
