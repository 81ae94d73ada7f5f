"""Coalescing: which pairs of record and slab can move as one strided copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import sub
from typing import NamedTuple


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


def plan_runs(
    records: Sequence[int],
    slabs: Sequence[int],
    *,
    slabs_per_chunk: int,
    record_bytes: int,
    slab_bytes: int,
    max_pitch_bytes: int = 2**31 - 1,
) -> tuple[Run, ...]:
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
        return ()
    if min(records) < 0 or min(slabs) < 0:
        raise ValueError(f"plan_runs: numbers must be at least 0, got {min(records)} and {min(slabs)}")
    max_record_stride = max_pitch_bytes // record_bytes
    max_row_stride = max_pitch_bytes // slab_bytes
    # Whole lists at a time: a Python statement a pair would take three times as long.
    chunks = [slab // slabs_per_chunk for slab in slabs]
    record_steps = list(map(sub, records[1:], records))
    slab_steps = list(map(sub, slabs[1:], slabs))
    # One number stands for both steps from a pair to the next; 0 where no run may make them.
    keys = [
        record_step << 32 | slab_step
        if 0 < record_step <= max_record_stride and 0 < slab_step <= max_row_stride and chunk == next_chunk
        else 0
        for record_step, slab_step, chunk, next_chunk in zip(record_steps, slab_steps, chunks, chunks[1:], strict=False)
    ]
    starts = [0]
    current = -1  # the steps of the run being extended; -1 while it has one record and may take any
    for index, key in enumerate(keys, 1):
        if key == current:
            continue
        if current == -1 and key:
            current = key
            continue
        starts.append(index)
        current = -1
    lengths = list(map(sub, [*starts[1:], len(records)], starts))
    columns = (
        [records[start] for start in starts],
        [record_steps[start] if length > 1 else 1 for start, length in zip(starts, lengths, strict=True)],
        [chunks[start] for start in starts],
        [slabs[start] % slabs_per_chunk for start in starts],
        [slab_steps[start] if length > 1 else 1 for start, length in zip(starts, lengths, strict=True)],
        lengths,
    )
    return tuple(map(_make_run, zip(*columns, strict=True)))


_make_run = partial(tuple.__new__, Run)  # a fifth of the time of Run(...), whose constructor is Python code
