"""The name of a request on its way through the cluster, and the phase of it that a worker runs."""

import re
from typing import Literal

import msgspec

Phase = Literal["full", "prefill", "decode"]
FinishReason = Literal["stop", "length"]
RequestKind = Literal["generate", "embed"]
LegName = tuple[str, int]  # request id and attempt: names a leg within its session


class RequestKey(msgspec.Struct, frozen=True, array_like=True):
    """Names one Submit.

    Its events go to the event stream (router_id, session). `session` is new whenever a router opens
    a stream to a worker. `attempt` is unique per Submit of a request: P's leg and D's leg of one
    hand-off have different ones.
    """

    router_id: str
    session: int
    request_id: str
    attempt: int = 0

    @property
    def leg(self) -> LegName:
        return self.request_id, self.attempt


_ID = re.compile(r"[\x21-\x7e]{1,256}")


def check_request_id(request_id: str) -> str:
    """Returns the id. Raises ValueError unless it is 1 to 256 printable ASCII characters without
    spaces."""
    if not _ID.fullmatch(request_id):
        raise ValueError("request_id must be 1 to 256 printable ASCII characters without spaces")
    return request_id
