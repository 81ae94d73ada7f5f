"""The tour in the package's docstring is what the package does."""

import doctest

import qwen35_engine


def test_the_tour_runs() -> None:
    result = doctest.testmod(qwen35_engine)
    assert result.attempted >= 5
    assert result.failed == 0
