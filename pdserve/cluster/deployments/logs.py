"""Decides where pdserve's log lines go, and in which form.

Serve writes and formats the lines of its replicas (routers and worker shells) into its files. An
engine's process is no replica, so its lines get a handler here: they go to standard error, and
their JSON has the same keys. Used by `cluster.app` (Serve's settings),
`cluster.deployments.router_replica` and `cluster.deployments.engine_actor`.
"""

import json
import logging
import sys
from logging.handlers import MemoryHandler
from typing import Any, TextIO

from pdserve.configs.router import LogConfig

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def serve_logging(config: LogConfig) -> dict[str, Any]:
    """Returns Serve's `logging_config` for a deployment.

    Format text is Serve's own default, which its environment may change.
    """
    encoding = {"encoding": "JSON"} if config.format == "json" else {}
    # One access-log line costs more than the call that it logs.
    return {"log_level": config.level, "enable_access_log": False} | encoding


def log_as_serve_does() -> None:
    """Called in a replica: sends pdserve's lines where Serve's go, at Serve's level."""
    logging.getLogger("pdserve").parent = logging.getLogger("ray.serve")


def own_file() -> str | None:
    """Called in a replica: returns the file that its lines go to, or None."""
    for handler in logging.getLogger("ray.serve").handlers:
        target = handler.target if isinstance(handler, MemoryHandler) else handler
        if isinstance(target, logging.FileHandler):
            return target.baseFilename
    return None


def log_to_stderr(config: LogConfig, worker_id: str, stream: TextIO | None = None) -> None:
    """Called in an engine's process, whose standard error Ray keeps in a file."""
    handler = logging.StreamHandler(stream or sys.stderr)
    text = logging.Formatter(f"%(levelname)s %(asctime)s {worker_id} %(message)s")
    handler.setFormatter(JsonFormatter({"worker": worker_id}) if config.format == "json" else text)
    ours = logging.getLogger("pdserve")
    ours.handlers[:] = [handler]
    ours.setLevel(config.level)
    ours.propagate = False


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line: Serve's keys, the given fields, and the record's own
    fields."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            "filename": record.filename,
            "lineno": record.lineno,
            "process": record.process,
        }
        if record.exc_info:
            line["exc_text"] = self.formatException(record.exc_info)
        line |= self._fields | {
            name: value for name, value in record.__dict__.items() if name not in _STANDARD
        }
        return json.dumps(line, default=str)
