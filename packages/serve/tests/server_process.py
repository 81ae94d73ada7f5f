"""A real server process, started for a test and stopped with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS_TO_START = 120
SECONDS_TO_STOP = 30


class Server:
    """A running server. ``banner`` is what it printed before it was ready, ``url`` where it listens."""

    def __init__(self, process: subprocess.Popen[str], url: str, banner: str) -> None:
        self.process = process
        self.url = url
        self.banner = banner

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=SECONDS_TO_STOP)


@contextmanager
def running_server(*arguments: str, model: str = "demo") -> Iterator[Server]:
    """Serve on a free port; on the way out the process is gone, whatever happened."""
    command = [sys.executable, "-m", "qwen35_serve", "--model", model, "--port", "0", "--threads", "1", *arguments]
    # Its own stderr stays the test's, so that a traceback of the server is seen in a failed test.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        yield _wait_for(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _wait_for(process: subprocess.Popen[str]) -> Server:
    """Read the banner: the ``curl`` line comes once the address is taken, before the first request is served; a request
    sent from then on waits in the listening socket."""
    assert process.stdout is not None
    banner = ""
    for line in process.stdout:
        banner += line
        found = re.search(r"curl (http://\S+)/v1/chat/completions", banner)
        if found and line.startswith("  -d "):
            return Server(process, found.group(1), banner)
    raise AssertionError(f"the server ended with {process.wait()} before it was ready:\n{banner}")
