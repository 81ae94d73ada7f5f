import doctest
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_tour_runs() -> None:
    results = doctest.testfile(str(README), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert results.attempted > 10
    assert results.failed == 0
