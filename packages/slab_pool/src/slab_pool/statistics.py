"""Frozen counts of a pool and of a copy stream, as of the moment they were asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """`high_water` is the largest `num_used` since the pool was made."""

    num_slabs: int
    slab_bytes: int
    num_used: int
    high_water: int
    num_acquired: int
    num_released: int
    num_chunks: int
    num_chunks_ready: int
    pinned: bool

    @property
    def capacity_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    @property
    def used_bytes(self) -> int:
        return self.num_used * self.slab_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionStatistics:
    """What landed in one direction. `seconds_in_flight` adds up, batch by batch, the time from the first copy's
    start (after the prerequisites) to the last one's landing, by the clock of whoever copied. Failed batches
    are counted, their bytes and seconds are not."""

    num_batches: int = 0
    num_copies: int = 0
    num_bytes: int = 0
    seconds_in_flight: float = 0.0
    num_failed_batches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStatistics:
    """`high_water_bytes` is the most that was in flight at once."""

    host_to_device: DirectionStatistics
    device_to_host: DirectionStatistics
    in_flight_batches: int
    in_flight_bytes: int
    high_water_bytes: int
