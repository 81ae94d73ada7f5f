"""Coalescing: which pairs of record and slab can move as one strided copy."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import torch
from torch import Tensor


class Run(NamedTuple):
    """`num_records` pairs: record `record + i * record_stride` of the arena and row `row + i * row_stride` of chunk
    `chunk`, a row being one slab.

    Both strides are at least 1; for a single record both are 1.
    """

    record: int
    record_stride: int
    chunk: int
    row: int
    row_stride: int
    num_records: int


@dataclass(frozen=True, slots=True)
class Runs(Sequence[Run]):
    """A sequence of runs, kept by column: a plan of thousands costs its owner's thread less than a millisecond."""

    records: Sequence[int]
    record_strides: Sequence[int]
    chunks: Sequence[int]
    rows: Sequence[int]
    row_strides: Sequence[int]
    lengths: Sequence[int]

    def columns(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """The fields of every `Run`, as plain tuples."""
        return zip(
            self.records,
            self.record_strides,
            self.chunks,
            self.rows,
            self.row_strides,
            self.lengths,
            strict=True,
        )

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Run]:
        return map(Run._make, self.columns())

    @overload
    def __getitem__(self, index: int) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Run, ...]: ...

    def __getitem__(self, index: int | slice) -> Run | tuple[Run, ...]:
        return tuple(self)[index]


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
    any part of a run is a run.

    Raises ValueError for lists of different lengths or negative numbers. O(len(records)).
    """
    if len(records) != len(slabs):
        raise ValueError(f"plan_runs: records and slabs must be equally long, got {len(records)} and {len(slabs)}")
    if not records:
        return Runs((), (), (), (), (), ())
    record = torch.frombuffer(array("q", records), dtype=torch.int64)
    slab = torch.frombuffer(array("q", slabs), dtype=torch.int64)
    smallest = int(record.min()), int(slab.min())
    if min(smallest) < 0:
        raise ValueError(f"plan_runs: numbers must be at least 0, got {smallest[0]} and {smallest[1]}")
    chunk = slab.div(slabs_per_chunk, rounding_mode="floor")
    record_step = record.diff()
    slab_step = slab.diff()
    possible = (record_step > 0) & (record_step <= max_pitch_bytes // record_bytes)
    possible &= (slab_step > 0) & (slab_step <= max_pitch_bytes // slab_bytes)
    possible &= chunk[1:] == chunk[:-1]
    # One number stands for both steps from a pair to the next; 0 where no run may make them.
    key = torch.where(possible, record_step << 32 | slab_step, 0)
    starts = array("q", _starts(key))
    start = torch.frombuffer(starts, dtype=torch.int64)
    length = torch.cat((start[1:], torch.tensor([len(records)]))) - start
    # A run of one record makes no step; its strides are 1 whatever follows it.
    single = length == 1
    first_step = start.clamp(max=max(len(key) - 1, 0))
    return Runs(
        record[start].tolist(),
        _strides(record_step, first_step, single),
        chunk[start].tolist(),
        (slab[start] % slabs_per_chunk).tolist(),
        _strides(slab_step, first_step, single),
        length.tolist(),
    )


def _strides(steps: Tensor, first_step: Tensor, single: Tensor) -> list[int]:
    if not len(steps):
        return [1] * len(single)
    return torch.where(single, 1, steps[first_step]).tolist()


def _starts(key: Tensor) -> list[int]:
    """The pairs at which a run starts, given the steps between neighbours. Goes from stretch to stretch of equal
    steps."""
    changes = ((key[1:] != key[:-1]).nonzero().view(-1) + 1).tolist()
    borders = [0, *changes, len(key)]
    stretch_keys = key[borders[:-1]].tolist() if len(key) else []
    starts: list[int] = []
    position = 0  # the first pair that is in no run yet
    for end, stretch_key in zip(borders[1:], stretch_keys, strict=False):
        if not stretch_key:
            starts.extend(range(position, end))
            position = end
        elif end > position:
            # Pairs `position` to `end` step alike. (Where the stretch is a single step and its first pair already ends
            # the run before, nothing is left of it.)
            starts.append(position)
            position = end + 1
    if position <= len(key):
        starts.append(position)
    return starts
