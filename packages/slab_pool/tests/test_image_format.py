"""The bytes around the slabs: what is written is read back, anything else is damage. The digest of a slab sees every
flipped bit, and sectors that are not where they were.
"""

import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slab_pool import ImageDamaged
from slab_pool.image_format import (
    DIGEST_BYTES,
    FIXED_BYTES,
    MAX_TABLES,
    VERSION,
    SlabDigest,
    decode_header,
    decode_trailer,
    encode_front,
    encode_trailer,
    num_tables_of,
    split_tables,
)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(0, 5), st.lists(st.binary(max_size=6000), max_size=4))
def test_what_is_encoded_is_decoded(pages, num_slabs, tables):
    slab_bytes = 4096 * pages
    header, front = encode_front(slab_bytes, num_slabs, tables)
    assert len(front) == header.slabs_begin
    assert len(front) % 4096 == 0
    assert header.file_bytes == len(front) + num_slabs * slab_bytes + header.trailer_bytes
    assert num_tables_of(front[:FIXED_BYTES]) == len(tables)
    assert decode_header(front[: header.header_bytes], file_bytes=header.file_bytes) == header
    assert split_tables(header, front[header.header_bytes :]) == tuple(tables)
    digests = tuple(bytes([index]) * 12 for index in range(num_slabs))
    assert decode_trailer(header, encode_trailer(digests)) == digests


def test_the_layout_is_frozen():
    """A file written today must be readable tomorrow: the first bytes, spelled out."""
    _, front = encode_front(4096, 2, [b"ab", b""])
    assert front[:40] == struct.pack("<8sIIQQQ", b"SLABPOOL", VERSION, 2, 4096, 2, 2)
    assert VERSION == 1
    assert front[60:62] == b"ab"
    assert encode_trailer([b"d" * 12])[:28] == struct.pack("<8sQ12s", b"SLABSUMS", 1, b"d" * 12)


def test_too_many_tables_are_refused():
    with pytest.raises(ValueError, match=f"at most {MAX_TABLES} tables, got {MAX_TABLES + 1}"):
        encode_front(4096, 0, [b""] * (MAX_TABLES + 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda front: front[: FIXED_BYTES - 1], f"fewer than {FIXED_BYTES}"),
        (lambda front: b"SLABPOOM" + front[8:], "magic must be b'SLABPOOL', got b'SLABPOOM'"),
        (lambda front: front[:8] + struct.pack("<I", 2) + front[12:], "version must be 1, got 2"),
        (lambda front: front[:12] + struct.pack("<I", 65) + front[16:], "at most 64 tables, got 65"),
    ],
)
def test_a_header_is_refused_by_field(change, message):
    _, front = encode_front(4096, 2, [b"ab"])
    with pytest.raises(ImageDamaged, match=message):
        num_tables_of(change(front)[:FIXED_BYTES])


def test_lengths_and_sizes_are_checked():
    header, front = encode_front(4096, 2, [b"ab"])
    head = front[: header.header_bytes]
    with pytest.raises(ImageDamaged, match="must be"):
        decode_header(head[:-1], file_bytes=header.file_bytes)
    with pytest.raises(ImageDamaged, match=f"{header.file_bytes - 1} bytes, must be {header.file_bytes}"):
        decode_header(head, file_bytes=header.file_bytes - 1)
    odd, odd_front = encode_front(1000, 2, [])
    with pytest.raises(ImageDamaged, match="slab bytes must be a multiple of 4096, got 1000"):
        decode_header(odd_front[: odd.header_bytes], file_bytes=odd.file_bytes)


def test_a_trailer_of_another_file_is_refused():
    header, _ = encode_front(4096, 2, [])
    with pytest.raises(ImageDamaged, match="of 2, got"):
        decode_trailer(header, encode_trailer([bytes(12)] * 3))


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
