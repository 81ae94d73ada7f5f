"""Statistics are frozen and derived sizes follow from counts."""

import dataclasses

import pytest

from slab_pool import CpuCopyStream, DirectionStatistics
from slab_pool_strategies import SLAB, small_pool


def test_statistics_are_a_picture_of_their_moment():
    with small_pool(4) as pool, CpuCopyStream() as stream:
        before = pool.statistics()
        pool.acquire(2)
        after = pool.statistics()
        assert (before.num_used, after.num_used) == (0, 2)
        assert (after.used_bytes, after.capacity_bytes) == (2 * SLAB, 4 * SLAB)
        with pytest.raises(dataclasses.FrozenInstanceError):
            after.num_used = 3
        assert stream.statistics().host_to_device == DirectionStatistics()
