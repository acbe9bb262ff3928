"""Logs as JSON lines on standard error. What a request says, ``extra={"fields": {…}}``, never holds its text."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec


class JsonLines(logging.Formatter):
    """One object per record: time (UTC), level, logger, message, then the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


@contextlib.contextmanager
def json_logs(level: int) -> Iterator[None]:
    """What nanoserve and uvicorn log from ``level`` on goes to standard error as JSON lines; afterwards as before."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    loggers = [logging.getLogger(name) for name in ("nanoserve", "uvicorn")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers[:] = [handler]
        logger.setLevel(level if logger.name == "nanoserve" else max(level, logging.WARNING))
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (handlers, old_level, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:] = handlers
            logger.setLevel(old_level)
            logger.propagate = propagate
