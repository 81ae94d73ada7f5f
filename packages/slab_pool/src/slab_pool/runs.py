"""Runs: which pairs of record and slab can move as one strided copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload


class Run(NamedTuple):
    """`num_records` pairs of a record and a slab.

    Pair `i` is record `record + i * record_stride` of the arena and row `row + i * row_stride` of chunk `chunk`, a
    row being one slab. Both strides are at least 1; for a single record both are 1.
    """

    record: int
    record_stride: int
    chunk: int
    row: int
    row_stride: int
    num_records: int


class Runs(Sequence[Run]):
    """A sequence of runs, kept as plain tuples: making thousands of `Run` would cost as much as planning them.

    Attributes:
        last_record: the highest record in it, -1 where it is empty.
        last_slab: the highest slab in it, -1 where it is empty.
        slabs_per_chunk: the slabs of a chunk by which rows are counted.
    """

    __slots__ = ("_plain", "last_record", "last_slab", "slabs_per_chunk")

    def __init__(
        self,
        plain: Sequence[tuple[int, int, int, int, int, int]],
        last_record: int,
        last_slab: int,
        slabs_per_chunk: int,
    ) -> None:
        self._plain = plain
        self.last_record = last_record
        self.last_slab = last_slab
        self.slabs_per_chunk = slabs_per_chunk

    def plain(self) -> Sequence[tuple[int, int, int, int, int, int]]:
        """The fields of every `Run`."""
        return self._plain

    def __len__(self) -> int:
        return len(self._plain)

    def __iter__(self) -> Iterator[Run]:
        return map(Run._make, self._plain)

    @overload
    def __getitem__(self, index: int) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Run, ...]: ...

    def __getitem__(self, index: int | slice) -> Run | tuple[Run, ...]:
        if isinstance(index, slice):
            return tuple(map(Run._make, self._plain[index]))
        return Run._make(self._plain[index])


def plan_runs(
    records: Sequence[int],
    slabs: Sequence[int],
    *,
    slabs_per_chunk: int,
    record_bytes: int,
    slab_bytes: int,
    max_pitch_bytes: int = 2**31 - 1,
) -> Runs:
    """Split the pairs `(records[i], slabs[i])` into the fewest runs, keeping their order.

    Within a run the records rise by one constant stride and the slab numbers by another, all slabs lie in one
    chunk, and neither pitch (stride times `record_bytes`, stride times `slab_bytes`) exceeds
    `max_pitch_bytes`, the most the device's copy engine takes. Extending each run as far as it goes is optimal:
    any part of a run is a run. O(len(records)).

    Raises:
        ValueError: lists of different lengths, or a negative number.
    """
    if len(records) != len(slabs):
        raise ValueError(f"plan_runs: records and slabs must be equally long, got {len(records)} and {len(slabs)}")
    most_records = max_pitch_bytes // record_bytes
    most_slabs = max_pitch_bytes // slab_bytes
    runs: list[tuple[int, int, int, int, int, int]] = []
    # The run that is being extended: its first pair, its length, its strides and, from the second pair on, the pair
    # that would continue it.
    first_record = first_slab = count = 0
    record_stride = slab_stride = 1
    next_record: int | None = None
    next_slab = 0
    chunk = chunk_begin = chunk_end = 0
    for record, slab in zip(records, slabs, strict=True):
        if record == next_record and slab == next_slab and slab < chunk_end:
            count += 1
            next_record = record + record_stride
            next_slab = slab + slab_stride
            continue
        if count == 1:
            step, slab_step = record - first_record, slab - first_slab
            if 0 < step <= most_records and 0 < slab_step <= most_slabs and slab < chunk_end:
                count, record_stride, slab_stride = 2, step, slab_step
                next_record, next_slab = record + step, slab + slab_step
                continue
            runs.append((first_record, 1, chunk, first_slab - chunk_begin, 1, 1))
        elif count:
            runs.append((first_record, record_stride, chunk, first_slab - chunk_begin, slab_stride, count))
            next_record = None
        if record < 0 or slab < 0:
            raise ValueError(f"plan_runs: numbers must be at least 0, got {record} and {slab}")
        first_record, first_slab, count = record, slab, 1
        if not chunk_begin <= slab < chunk_end:
            chunk = slab // slabs_per_chunk
            chunk_begin = chunk * slabs_per_chunk
            chunk_end = chunk_begin + slabs_per_chunk
    if count == 1:
        record_stride = slab_stride = 1
    if count:
        runs.append((first_record, record_stride, chunk, first_slab - chunk_begin, slab_stride, count))
    return Runs(runs, max(records, default=-1), max(slabs, default=-1), slabs_per_chunk)
