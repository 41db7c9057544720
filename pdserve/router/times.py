"""What several rooms say about time: where it went, and how precisely it is told."""

from collections.abc import Collection

from pdserve.protocol.events import LegTimes


def parts_of_time(
    total_s: float, admission_s: float, legs: Collection[LegTimes]
) -> tuple[dict[str, float], float]:
    """What total_s went into, and what neither admission nor a worker took of it. A worker knows a
    request's arrival to half a step only, so that rest may be negative."""
    device = sum(leg.device_s for leg in legs)
    parts = {
        "admission": admission_s,
        "queue": sum(leg.queue_s for leg in legs),
        "engine_host": sum(leg.prefill_s + leg.decode_s for leg in legs) - device,
        "device": device,
    }
    return parts, total_s - sum(parts.values())


def rounded(seconds: float) -> float:
    """To a microsecond: more is noise."""
    return round(seconds, 6)
