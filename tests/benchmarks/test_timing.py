"""When times are called contended, what a percentile is, and whose turn it is."""

from benchmarks.timing import Spent, Times, percentile, take_turns


def test_a_spread_is_called_contended():
    times = Times(Spent(1.0, 1.0) for _ in range(20))
    assert not times.contended
    times.wall[-4:] = [1.5] * 4
    assert times.contended


def test_a_percentile_has_its_share_below_it():
    values = [float(value) for value in range(100)]
    assert percentile(values, 0.99) == 99
    assert percentile(values, 0.5) == 50
    assert percentile([1.0], 0.99) == 1.0


def test_sides_take_turns_in_being_first():
    assert list(take_turns("ab", 3)) == ["a", "b", "b", "a", "a", "b"]
