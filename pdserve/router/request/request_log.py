"""Writes the log lines about requests, all with the request's id.

There is one line for each prompt that ended and for each call that was refused, and there are other
lines about requests.

The id is the record's field `request_id`, so that structured logs have it apart from the message.
The record's other fields are the line's figures. The lines hold no prompt, no text of an answer, no
key, and no message that may repeat one of these. Knows no handlers: `cluster.deployments.logs` says
where lines go and in which form. Called by `router.request.run_report`, `router.http.endpoints` and
`router.http.answers`.
"""

import logging
from collections.abc import Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import Any

from pdserve.configs.router import LogConfig
from pdserve.router.errors import ApiError
from pdserve.router.request.timeline import LegReport, PromptTimeline
from pdserve.router.times import rounded

logger = logging.getLogger("pdserve.requests")


def log_of(
    to: logging.Logger, level: int, request_id: str, message: str, *args: object, **options: Any
) -> None:
    """Logs a line about a request.

    `options` are those of `Logger.log`, where `extra` gives further fields. The line is written in
    a new context, because a server around this router (Serve) may replace our id with the one of
    its context.
    """
    if to.isEnabledFor(level):
        options["extra"] = {"request_id": request_id} | (options.get("extra") or {})
        Context().run(partial(to.log, level, message, *args, stacklevel=2, **options))


class RequestLog:
    """Writes one line per ended or refused request. `model` is the name that clients use."""

    def __init__(self, model: str, config: LogConfig) -> None:
        self._model = model
        self._config = config

    @property
    def wanted(self) -> bool:
        return self._config.requests and logger.isEnabledFor(logging.INFO)

    def ended(
        self, report: PromptTimeline, finish_reasons: Sequence[str | None], tpot_s: float | None
    ) -> None:
        """Logs the end of a prompt, whatever it was.

        `finish_reasons` has one entry per choice, None where a choice has none. `tpot_s` is the
        mean over the choices.
        """
        prefill = _last(report.legs, "prefill")
        decode = _last(report.legs, "decode", "full")
        first_s = report.first_token_s
        arrivals = [kv for leg in report.legs for kv in leg.kv]
        fields = {
            "model": self._model,
            "prompt": report.prompt,
            "outcome": report.outcome,
            "finish_reasons": list(finish_reasons),
            "prompt_tokens": report.prompt_tokens,
            "cached_tokens": report.cached_tokens,
            "generated_tokens": report.generated_tokens,
            "ttft_s": None if first_s is None else rounded(report.admission_s + first_s),
            "tpot_s": None if tpot_s is None else rounded(tpot_s),
            "total_s": rounded(report.admission_s + report.total_s),
            "queue_s": rounded(sum(leg.queue_s or 0.0 for leg in report.legs)),
            "prefill_worker": None if prefill is None else prefill.worker,
            "decode_worker": None if decode is None else decode.worker,
            "kv_source": arrivals[-1].source if arrivals else None,
            "attempts": len(report.legs),
            "failovers": report.failovers,
        }
        self._write(
            report.request_id, f"request {report.request_id} ended: {report.outcome}", fields
        )

    def refused(self, request_id: str, error: ApiError) -> None:
        """Logs a call that was answered with an error before it became a running prompt."""
        if self.wanted:
            fields = {
                "model": self._model,
                "outcome": "refused",
                "status": error.status,
                "reason": error.reason,
            }
            if error.retry_after is not None:
                fields["retry_after_s"] = error.retry_after
            self._write(request_id, f"request {request_id} refused", {**fields, **error.figures})

    def _write(self, request_id: str, message: str, fields: Mapping[str, object]) -> None:
        if self._config.format == "text":
            message += " " + " ".join(
                f"{name}={_plain(value)}" for name, value in fields.items() if name != "outcome"
            )
        log_of(logger, logging.INFO, request_id, "%s", message, extra=fields)


def _last(legs: Sequence[LegReport], *phases: str) -> LegReport | None:
    return next((leg for leg in reversed(legs) if leg.phase in phases), None)


def _plain(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
