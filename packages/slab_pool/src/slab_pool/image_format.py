"""The bytes of an image file around the slabs: header, tables, digests, trailer. Pure: no file is opened here.

All numbers little-endian. In order:

    header    magic "SLABPOOL", u32 version, u32 number of tables, u64 slab bytes, u64 number of slabs,
              then per table u64 length and u32 CRC-32, then u32 CRC-32 of everything before it
    tables    the caller's bytes, one after the other; then zeros up to a multiple of 4096
    slabs     each of slab bytes
    trailer   magic "SLABSUMS", u64 number of slabs, a digest of 12 bytes per slab (see `SlabDigest`),
              then u32 CRC-32 of the trailer before it

The digests come last, since they are known last: the file is written in one pass. Every byte is covered by a
checksum or must be zero, and the length of the file follows from the header.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slab_pool.errors import ImageDamaged
from slab_pool.memory import PAGE_BYTES

VERSION = 1
MAX_TABLES = 64
DIGEST_BYTES = 12

_MAGIC = b"SLABPOOL"
_TRAILER_MAGIC = b"SLABSUMS"
_FIXED = struct.Struct("<8sIIQQ")
_TABLE = struct.Struct("<QI")
_TRAILER = struct.Struct("<8sQ")
_CRC = struct.Struct("<I")
_DIGEST = struct.Struct("<QI")
_SECTOR_WORDS = 64

FIXED_BYTES = _FIXED.size


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the header says. Its offsets and sizes follow from that."""

    slab_bytes: int
    num_slabs: int
    table_lengths: tuple[int, ...]
    table_checksums: tuple[int, ...]

    @property
    def header_bytes(self) -> int:
        return header_bytes(len(self.table_lengths))

    @property
    def slabs_begin(self) -> int:
        end = self.header_bytes + sum(self.table_lengths)
        return -(-end // PAGE_BYTES) * PAGE_BYTES

    @property
    def padding_bytes(self) -> int:
        return self.slabs_begin - self.header_bytes - sum(self.table_lengths)

    @property
    def trailer_begin(self) -> int:
        return self.slabs_begin + self.num_slabs * self.slab_bytes

    @property
    def trailer_bytes(self) -> int:
        return _TRAILER.size + self.num_slabs * DIGEST_BYTES + _CRC.size

    @property
    def file_bytes(self) -> int:
        return self.trailer_begin + self.trailer_bytes


def header_bytes(num_tables: int) -> int:
    """Size of a header with so many tables."""
    return _FIXED.size + num_tables * _TABLE.size + _CRC.size


def encode_front(slab_bytes: int, num_slabs: int, tables: Sequence[bytes]) -> tuple[ImageHeader, bytes]:
    """Header, tables and padding: everything before the slabs.

    Raises:
        ValueError: more than 64 tables.
    """
    if len(tables) > MAX_TABLES:
        raise ValueError(f"save_image: at most {MAX_TABLES} tables, got {len(tables)}")
    header = ImageHeader(
        slab_bytes,
        num_slabs,
        tuple(memoryview(table).nbytes for table in tables),
        tuple(zlib.crc32(table) for table in tables),
    )
    front = bytearray(_FIXED.pack(_MAGIC, VERSION, len(tables), slab_bytes, num_slabs))
    for length, checksum in zip(header.table_lengths, header.table_checksums, strict=True):
        front += _TABLE.pack(length, checksum)
    front += _CRC.pack(zlib.crc32(front))
    for table in tables:
        front += table
    front += bytes(header.padding_bytes)
    return header, bytes(front)


def num_tables_of(fixed: bytes) -> int:
    """Check magic and version of the first FIXED_BYTES, and return how many tables the rest of the header lists.

    Raises:
        ImageDamaged: they are not as they were written.
    """
    if len(fixed) != _FIXED.size:
        raise ImageDamaged(f"image header: {len(fixed)} bytes, fewer than {_FIXED.size}")
    magic, version, num_tables, _, _ = _FIXED.unpack(fixed)
    if magic != _MAGIC:
        raise ImageDamaged(f"image header: magic must be {_MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise ImageDamaged(f"image header: version must be {VERSION}, got {version}")
    if num_tables > MAX_TABLES:
        raise ImageDamaged(f"image header: at most {MAX_TABLES} tables, got {num_tables}")
    return int(num_tables)


def decode_header(data: bytes, *, file_bytes: int) -> ImageHeader:
    """The header of a file of `file_bytes`.

    Raises:
        ImageDamaged: it is not as it was written, or the file has another length than it says.
    """
    num_tables = num_tables_of(data[:FIXED_BYTES])
    size = header_bytes(num_tables)
    if len(data) != size:
        raise ImageDamaged(f"image header: {len(data)} bytes, must be {size}")
    (checksum,) = _CRC.unpack_from(data, size - _CRC.size)
    if zlib.crc32(data[: size - _CRC.size]) != checksum:
        raise ImageDamaged(f"image header: checksum must be {checksum:#010x}")
    _, _, _, slab_bytes, num_slabs = _FIXED.unpack_from(data)
    if slab_bytes < PAGE_BYTES or slab_bytes % PAGE_BYTES:
        raise ImageDamaged(f"image header: slab bytes must be a multiple of {PAGE_BYTES}, got {slab_bytes}")
    rows = [_TABLE.unpack_from(data, _FIXED.size + index * _TABLE.size) for index in range(num_tables)]
    header = ImageHeader(
        slab_bytes, num_slabs, tuple(length for length, _ in rows), tuple(checksum for _, checksum in rows)
    )
    if header.file_bytes != file_bytes:
        raise ImageDamaged(f"image file: {file_bytes} bytes, must be {header.file_bytes} by its header")
    return header


def split_tables(header: ImageHeader, data: bytes) -> tuple[bytes, ...]:
    """The tables out of the bytes between header and slabs.

    Raises:
        ImageDamaged: a table or the padding is not as it was written.
    """
    tables = []
    begin = 0
    for index, (length, checksum) in enumerate(zip(header.table_lengths, header.table_checksums, strict=True)):
        table = data[begin : begin + length]
        begin += length
        if zlib.crc32(table) != checksum:
            raise ImageDamaged(f"image table {index}: checksum must be {checksum:#010x}")
        tables.append(table)
    if any(data[begin:]):
        raise ImageDamaged("image file: the padding behind the tables is not zero")
    return tuple(tables)


def encode_trailer(digests: Sequence[bytes]) -> bytes:
    """What follows the slabs: their digests."""
    trailer = _TRAILER.pack(_TRAILER_MAGIC, len(digests)) + b"".join(digests)
    return trailer + _CRC.pack(zlib.crc32(trailer))


def decode_trailer(header: ImageHeader, data: bytes) -> tuple[bytes, ...]:
    """The digest of every slab.

    Raises:
        ImageDamaged: the trailer is not as it was written, or another file's.
    """
    body, (checksum,) = data[: -_CRC.size], _CRC.unpack(data[-_CRC.size :])
    if zlib.crc32(body) != checksum:
        raise ImageDamaged(f"image trailer: checksum must be {checksum:#010x}")
    magic, num_slabs = _TRAILER.unpack_from(body)
    if magic != _TRAILER_MAGIC or num_slabs != header.num_slabs:
        raise ImageDamaged(
            f"image trailer: must be {_TRAILER_MAGIC!r} of {header.num_slabs}, got {magic!r} of {num_slabs}"
        )
    return tuple(body[begin : begin + DIGEST_BYTES] for begin in range(_TRAILER.size, len(body), DIGEST_BYTES))


class SlabDigest:
    """The checksum of slabs of `slab_bytes`: nearly as fast as memory is read, so that it hides behind a disk.

    `zlib.crc32` alone costs more than reading a file from the page cache. So each 512-byte sector is summed first, as
    little-endian 64-bit words modulo 2**64; the digest is the sum of those sums and the CRC-32 of their bytes. Every
    flipped bit changes the first. Sectors that were lost, zeroed, mixed up or replaced change the second. It does not
    see what cancels out within one sector (two words that trade places), and it is no protection against tampering.

    It reuses one buffer: one slab at a time, from one thread at a time.
    """

    def __init__(self, slab_bytes: int) -> None:
        self._sums = torch.empty(slab_bytes // (8 * _SECTOR_WORDS), dtype=torch.int64)
        # The tensor's bytes without numpy; alive as long as this object.
        self._bytes = (ctypes.c_char * (8 * self._sums.numel())).from_address(self._sums.data_ptr())

    def __call__(self, slab: Tensor) -> bytes:
        """The digest of a uint8 tensor of `slab_bytes`."""
        torch.sum(slab.view(torch.int64).view(-1, _SECTOR_WORDS), 1, out=self._sums)
        return _DIGEST.pack(int(self._sums.sum()) & 0xFFFFFFFFFFFFFFFF, zlib.crc32(self._bytes))
