"""The command line that all benchmarks share: a trial run, torch's threads, one JSON object."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["command_line", "load", "write_result"]


def command_line(name: str, description: str | None, *, threads: bool = True) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.NAME`; the caller may add options of its own."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats: does it run at all?")
    if threads:
        parser.add_argument("--threads", type=int, default=1, help="torch's threads (default 1)")
    return parser


def load() -> float:
    """Processes that wanted a processor during the last minute, on average."""
    return os.getloadavg()[0]


def write_result(result: Mapping[str, Any], write: Callable[[str], object]) -> None:
    write(json.dumps(result, indent=2))
