"""Times of one thing, sides that take turns, and whether the times can be trusted."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

__all__ = ["Spent", "Times", "frozen_heap", "percentile", "spent", "take_turns"]

Side = TypeVar("Side")

_CONTENDED_SPREAD = 0.3


class Spent(NamedTuple):
    """Seconds on the clock, and seconds of processor time of what did the work."""

    wall: float
    cpu: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.cpu - other.cpu)

    @staticmethod
    def now(cpu_clock: Callable[[], float] = time.thread_time) -> Spent:
        """Both clocks; the processor's is the calling thread's unless another is given."""
        return Spent(time.perf_counter(), cpu_clock())


def spent(work: Callable[[], object], cpu_clock: Callable[[], float] = time.thread_time) -> Spent:
    """What one call took."""
    begin = Spent.now(cpu_clock)
    work()
    return Spent.now(cpu_clock) - begin


class Times:
    """What one thing took, again and again.

    Attributes:
        wall: seconds on the clock.
        cpu: seconds of processor time, where they were measured as well.
    """

    def __init__(self, all_: Iterable[Spent] = ()) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.add(*all_)

    def add(self, *all_: Spent) -> None:
        self.wall += [each.wall for each in all_]
        self.cpu += [each.cpu for each in all_]

    def since(self, begin: float) -> None:
        """Add what went by since `begin`, by `time.perf_counter()` alone: another clock would show in microseconds."""
        self.wall.append(time.perf_counter() - begin)

    @property
    def median(self) -> float:
        """Of the seconds on the clock."""
        return statistics.median(self.wall)

    @property
    def median_us(self) -> float:
        """`median` in microseconds."""
        return self.median * 1e6

    @property
    def cpu_median(self) -> float:
        return statistics.median(self.cpu)

    @property
    def best(self) -> float:
        return min(self.wall)

    @property
    def spread(self) -> float:
        """How far the middle four fifths lie apart, as a share of the median."""
        return (percentile(self.wall, 0.9) - percentile(self.wall, 0.1)) / self.median

    @property
    def contended(self) -> bool:
        """Whether the spread exceeds 30 %: then the times tell more of the machine's other work than of this one."""
        return self.spread > _CONTENDED_SPREAD


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def take_turns(sides: Sequence[Side], turns: int) -> Iterator[Side]:
    """Every side once a turn; a turn begins with the side that ended the one before."""
    order = list(sides)
    for _ in range(turns):
        yield from order
        order.reverse()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep the collector away from what exists now: a collection would walk everything that torch has imported."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
