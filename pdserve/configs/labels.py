"""Labels of Ray's nodes that a replica asks for, checked as Ray would."""

import re
from typing import Annotated

from pydantic import AfterValidator

# What Ray takes: Kubernetes' label syntax, and selectors `value`, `!value`, `in(a, b)`, `!in(a,
# b)`.
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"(?:[A-Za-z0-9][A-Za-z0-9_.-]{{0,252}}/)?{_LABEL}")
_LABEL_SELECTOR = re.compile(rf"!?{_LABEL}|!?in\({_LABEL}(?:, ?{_LABEL})*\)")


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_SELECTOR.fullmatch(value):
            raise ValueError(
                f"{key}: {value!r} is no label selector: write a node's label, as zone: a, or one "
                "of zone: '!a', zone: 'in(a, b)', zone: '!in(a, b)'"
            )
    # Ray 2.60 takes a space, and then looks for a value that begins with it.
    return {key: value.replace(" ", "") for key, value in labels.items()}


Labels = Annotated[dict[str, str], AfterValidator(_check_labels)]
