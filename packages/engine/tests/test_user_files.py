"""The cache folder is the user's, or a temporary one."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen35_engine.user_files import cache_folder


def test_it_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not there yet"))
    assert cache_folder() == tmp_path / "not there yet" / "qwen35"
    assert cache_folder().is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "qwen35"


def test_where_it_cannot_be_written_a_temporary_folder_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert cache_folder() == tmp_path
