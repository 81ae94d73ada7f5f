"""One JSON line per ended request, appended to a file; docs/observability.md lists the fields."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
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

# O_NONBLOCK: a pipe whose reader has stopped costs lines, and does not hold up the end.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK

# Reports that may wait for the writer, some MiB. More come together only where the disk does not answer.
_MOST_WAITING = 10_000

_SECONDS_TO_FLUSH = 10.0


class RequestLog:
    """An engine's ``on_request`` that writes, on a thread of its own and in the order of the reports.

    Each line is one write. What cannot be written, or finds the queue full, is dropped and counted. Thread-safe. Use as
    a context manager, or call ``close``.

    Attributes:
        written: lines in the file, the opening one apart.
        lost: reports that are in no line.
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
                self._append(clock(), {"event": "start", "schema": _SCHEMA})
            except OSError as error:
                raise OptionError(f"the request log {self._path} must be writable, got: {error.strerror}") from error
            on_failure.pop_all()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[float, RequestReport]] = deque()
        self._writing = False
        self._closed = False
        self._writer = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._writer.start()

    def __call__(self, report: RequestReport) -> None:
        """Queue one request's line. Never waits for the file system, nor raises for what it does."""
        with self._changed:
            if self._closed:
                self._lose("it is closed")
            elif len(self._waiting) >= _MOST_WAITING:
                self._lose(f"{_MOST_WAITING} wait to be written")
            else:
                self._waiting.append((self._clock(), report))
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until every report so far is written or lost, but no longer than some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout=_SECONDS_TO_FLUSH)

    def close(self) -> None:
        """Write what waits, and close the file. Where the disk does not answer, what waits is lost. May be called
        twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._writer.join(_SECONDS_TO_FLUSH)
        with self._changed:
            for _ in range(len(self._waiting)):
                self._waiting.popleft()
                self._lose("the disk does not answer")

    def __enter__(self) -> RequestLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        """Write line after line until the log is closed and nothing waits; then close the file."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    break
                ended, report = self._waiting.popleft()
                self._writing = True
            failure: Exception | None = None
            try:
                self._append(ended, _fields(report))
            except Exception as error:  # whatever it is costs this line only
                failure = error
            with self._changed:
                if failure is None:
                    self.written += 1
                else:
                    self._lose(failure)
                self._writing = False
                self._changed.notify_all()
        os.close(self._file)

    def _lose(self, reason: object) -> None:
        self.lost += 1
        if self.lost == 1:
            logger.error("the request log %s lost a line: %s; further ones are counted", self._path, reason)

    def _append(self, ended: float, fields: dict[str, Any]) -> None:
        line = json.dumps({"time": round(ended, 3), **fields}, separators=(",", ":")).encode() + b"\n"
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
