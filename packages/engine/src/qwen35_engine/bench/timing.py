"""Times of one thing, and whether they can be trusted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

__all__ = ["Spent", "Times", "percentile", "spent"]

_SPREAD = 0.3


class Spent(NamedTuple):
    """Seconds on the clock, and seconds of processor time of the one thread that did the work."""

    wall: float
    cpu: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.cpu - other.cpu)

    @staticmethod
    def now() -> Spent:
        """Both clocks of the calling thread."""
        return Spent(time.perf_counter(), time.thread_time())


def spent(work: Callable[[], object]) -> Spent:
    """What one call took in this thread."""
    begin = Spent.now()
    work()
    return Spent.now() - begin


class Times:
    """What one thing took, again and again."""

    def __init__(self, all_: Iterable[Spent] = ()) -> None:
        self.all = list(all_)

    @property
    def median(self) -> float:
        """Of the seconds on the clock."""
        return statistics.median(each.wall for each in self.all)

    @property
    def cpu_median(self) -> float:
        return statistics.median(each.cpu for each in self.all)

    @property
    def contended(self) -> bool:
        """Whether the middle four fifths differ by more than 30 % of the median: then they tell of the neighbours."""
        walls = [each.wall for each in self.all]
        return percentile(walls, 0.9) - percentile(walls, 0.1) > _SPREAD * self.median


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of the values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
