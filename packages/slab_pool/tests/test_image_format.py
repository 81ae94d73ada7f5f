"""The bytes around the slabs: what is written is read back, anything else is damage."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slab_pool import ImageDamaged
from slab_pool.image_format import (
    FIXED_BYTES,
    MAX_TABLES,
    VERSION,
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
