"""The digest of a slab sees every flipped bit, and sectors that are not where they were."""

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slab_pool.digest import DIGEST_BYTES, SlabDigest

SLAB = 8192


def noise(seed):
    return torch.randint(0, 256, (SLAB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def naive(data):
    """The definition, in plain Python."""
    sums = []
    for begin in range(0, len(data), 512):
        words = [int.from_bytes(data[at : at + 8], "little") for at in range(begin, begin + 512, 8)]
        sums.append(sum(words) % 2**64)
    packed = b"".join(value.to_bytes(8, "little") for value in sums)
    return (sum(sums) % 2**64).to_bytes(8, "little") + zlib.crc32(packed).to_bytes(4, "little")


@pytest.mark.parametrize("seed", range(3))
def test_the_digest_is_as_defined(seed):
    slab = noise(seed)
    assert SlabDigest(SLAB)(slab) == naive(bytes(slab.tolist()))
    assert len(naive(bytes(slab.tolist()))) == DIGEST_BYTES


@settings(deadline=None, max_examples=300)
@given(st.integers(0, SLAB - 1), st.integers(0, 7), st.sampled_from([0, 255, None]))
def test_every_flipped_bit_is_seen(position, bit, filling):
    digest = SlabDigest(SLAB)
    slab = noise(1) if filling is None else torch.full((SLAB,), filling, dtype=torch.uint8)
    before = digest(slab)
    slab[position] ^= 1 << bit
    assert digest(slab)[:8] != before[:8]


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 15), (3, 11)])
def test_sectors_that_changed_places_are_seen(first, second):
    digest = SlabDigest(SLAB)
    slab = noise(2)
    before = digest(slab)
    sectors = slab.view(-1, 512)
    sectors[[first, second]] = sectors[[second, first]]
    assert digest(slab) != before


def test_a_lost_sector_is_seen():
    digest = SlabDigest(SLAB)
    slab = noise(2)
    before = digest(slab)
    slab[512:1024] = 0
    assert digest(slab) != before
