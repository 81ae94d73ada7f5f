"""Where this package keeps what it can make again: the user's cache folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """``qwen35`` in ``$XDG_CACHE_HOME`` or ``~/.cache``, made if need be; the system's temporary folder where that
    cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "qwen35"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.gettempdir())
