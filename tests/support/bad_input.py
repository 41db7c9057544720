"""Requests that are wrong, each in its own way, and how a router must answer. Used by the soak."""

import json
from dataclasses import dataclass
from typing import Any

from support.served import MODEL

GOOD: dict[str, Any] = {"model": MODEL, "prompt": [9, 10, 11], "max_tokens": 4}


@dataclass(frozen=True)
class Bad:
    """A bad request. The error message must say `names`, so that its sender can fix it."""

    body: bytes
    names: str
    path: str = "/v1/completions"
    method: str = "POST"
    status: int = 400


def _with(names: str, status: int = 400, **fields: Any) -> Bad:
    return Bad(json.dumps({**GOOD, **fields}).encode(), names, status=status)


BAD: list[Bad] = [
    Bad(b"", "JSON"),
    Bad(b"{", "JSON"),
    Bad(b"[" * 50_000, "JSON"),
    Bad(b"\xff\xfe", "JSON"),
    Bad(json.dumps({"model": MODEL}).encode(), "prompt"),
    _with("model", 404, model="no-such-model"),
    _with("prompt", prompt=[]),
    _with("prompt", prompt=[1 << 40]),
    _with("prompt", prompt=[3.5]),
    _with("tokens", prompt=[9] * 100_000),
    _with("max_tokens", max_tokens=-1),
    _with("max_tokens", max_tokens=1 << 20),
    _with("temperature", temperature="hot"),
    _with("temperature", temperature=-1),
    _with("top_p", top_p=2),
    _with("n", n=1 << 30),
    _with("logprobs", logprobs=10_000),
    _with("logit_bias", logit_bias={"-5": 1}),
    _with("logit_rules", logit_rules={"nonsense": 1}),
    _with("stop", stop=[{"a": 1}]),
    _with("unknown_field", unknown_field=1),
    Bad(b"{}", "/v1/nothing", path="/v1/nothing", status=404),
    Bad(b"", "method", method="GET", status=405),
]
