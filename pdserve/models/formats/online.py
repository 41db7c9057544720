"""Checks whether a model's weights may be quantised while they are loaded (model.quantization)."""

from pdserve.configs.engine import OnlineScheme
from pdserve.models.formats.formats import Formats


def check_online(formats: Formats | None, online: OnlineScheme | None) -> None:
    """Raises ValueError if weights that are already quantised should be quantised."""
    if online is not None and formats is not None:
        kinds = " and ".join(map(str, formats.quantised))
        raise ValueError(
            f"model.quantization: {online} quantises 16-bit weights while they are loaded, but the "
            f"weights of this model are already quantised ({formats.place} says {kinds}): leave it "
            "out"
        )


def check_not_quantised(formats: Formats | None, online: OnlineScheme | None) -> None:
    """Raises ValueError if a model of experts with biases, such as gpt-oss, is quantised."""
    if online is not None:
        raise ValueError(
            f"model.quantization={online!r} is not supported for this model: experts with biases "
            "are computed in 16 bits alone; leave it out"
        )
    if formats is not None:
        raise ValueError(
            f"{formats.place}: experts with biases are computed in 16 bits alone: use the model's "
            "16-bit weights"
        )
