"""Splits up the time of a request, and rounds times, for several rooms."""

from collections.abc import Collection

from pdserve.protocol.events import LegTimes


def parts_of_time(
    total_s: float, admission_s: float, legs: Collection[LegTimes]
) -> tuple[dict[str, float], float]:
    """Splits `total_s` into parts; returns them and the rest.

    The rest is time that neither admission nor a worker took. A worker knows a request's arrival
    only to half a step, so the rest may be negative.
    """
    device = sum(leg.device_s for leg in legs)
    parts = {
        "admission": admission_s,
        "queue": sum(leg.queue_s for leg in legs),
        "engine_host": sum(leg.prefill_s + leg.decode_s for leg in legs) - device,
        "device": device,
    }
    return parts, total_s - sum(parts.values())


def rounded(seconds: float) -> float:
    """Rounds to a microsecond; finer digits are noise."""
    return round(seconds, 6)
