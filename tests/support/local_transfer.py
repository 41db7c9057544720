"""A connector whose peers are engines of the same process: for tests, which can slow, freeze and
break it."""

from typing import Any, Literal

from pdserve.configs.transfer import TransferConfig


class LocalTransferConfig(TransferConfig):
    """No YAML can ask for it: `transfer.connector` takes "nixl" only."""

    # a word that users do not have
    connector: Literal["local"] = "local"  # type: ignore[assignment]


def transfer_config(connector: str, **values: Any) -> TransferConfig:
    """Makes the configuration of the connector "local" or "nixl"."""
    return (LocalTransferConfig if connector == "local" else TransferConfig)(**values)


def is_local(config: TransferConfig) -> bool:
    return isinstance(config, LocalTransferConfig)
