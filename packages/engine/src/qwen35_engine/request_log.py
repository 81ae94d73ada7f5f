"""One JSON line per ended request, appended to a file; docs/observability.md lists the fields."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import OptionError
from .metrics import RequestReport

__all__ = ["RequestLog"]

logger = logging.getLogger(__name__)

# Moves when a field changes its meaning or goes; not when one is added.
_SCHEMA = 1

# O_NONBLOCK: a pipe whose reader has stopped must not stop the engine's worker.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK


class RequestLog:
    """An engine's ``on_request`` that writes. Each line is one write; what cannot be written is dropped and counted.

    Attributes:
        written: lines in the file, the opening one apart.
        lost: lines that could not be written.
    """

    def __init__(self, path: Path | str, *, clock: Callable[[], float] = time.time) -> None:
        """Open ``path`` for appending and write the line that opens a run. ``clock`` gives seconds since the epoch.

        Raises:
            OptionError: the file cannot be written, or has no room for the first line.
        """
        self._path = Path(path)
        self._clock = clock
        self.written = self.lost = 0
        with contextlib.ExitStack() as on_failure:
            try:
                self._file = os.open(self._path, _FLAGS, 0o644)
                on_failure.callback(os.close, self._file)
                self._append({"event": "start", "schema": _SCHEMA})
            except OSError as error:
                raise OptionError(f"the request log {self._path} must be writable, got: {error.strerror}") from error
            on_failure.pop_all()

    def __call__(self, report: RequestReport) -> None:
        """Append one request. Never raises for what the file system does."""
        try:
            self._append(_fields(report))
            self.written += 1
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                logger.error("the request log %s lost a line: %s; further ones are counted", self._path, error)

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> RequestLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, fields: dict[str, Any]) -> None:
        line = json.dumps({"time": round(self._clock(), 3), **fields}, separators=(",", ":")).encode() + b"\n"
        count = os.write(self._file, line)
        if count < len(line):
            # Half a line would spoil the next one, too.
            os.ftruncate(self._file, os.lseek(self._file, 0, os.SEEK_END) - count)
            raise OSError(0, f"only {count} of {len(line)} bytes were written")


def _fields(report: RequestReport) -> dict[str, Any]:
    usage, reuse, timing = report.usage, report.usage.reuse, report.usage.timing

    def seconds(value: float | None) -> float | None:
        return None if value is None else round(value, 6)

    return {
        "event": "request",
        "request_id": report.request_id,
        "outcome": report.outcome,
        "error": report.error,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "device_tokens": reuse.device_tokens,
        "host_tokens": reuse.host_tokens,
        "matched_tokens": reuse.matched_tokens,
        "restored_bytes": reuse.restored_bytes,
        "reason": reuse.reason,
        "executed": report.executed,
        "taps_taken": usage.taps_taken,
        "taps_skipped": usage.taps_skipped,
        "queued_seconds": seconds(timing.queued_seconds),
        "staged_seconds": seconds(timing.staged_seconds),
        "first_token_seconds": seconds(timing.first_token_seconds),
        "token_seconds": seconds(timing.token_seconds),
        "total_seconds": seconds(timing.total_seconds),
    }
