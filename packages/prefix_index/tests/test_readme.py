"""The README's tour runs."""

from __future__ import annotations

import doctest
from pathlib import Path


def test_the_readme_is_true() -> None:
    results = doctest.testfile(
        str(Path(__file__).parent.parent / "README.md"), module_relative=False, encoding="utf-8", report=True
    )
    assert results.attempted > 40
    assert results.failed == 0
