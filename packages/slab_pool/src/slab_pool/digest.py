"""The checksum of a slab: nearly as fast as memory is read, so that it hides behind a disk.

`zlib.crc32` alone costs more than reading a file from the page cache. So each 512-byte sector is summed first, as
little-endian 64-bit words modulo 2**64; the digest is the sum of those sums and the CRC-32 of their bytes. Every
flipped bit changes the first, wherever it is; sectors that were lost, zeroed, mixed up or replaced change the second.
What cancels out within one sector (two words that trade places) is not seen, and nobody's malice is.
"""

from __future__ import annotations

import ctypes
import struct
import zlib

import torch
from torch import Tensor

DIGEST_BYTES = 12

_SECTOR_WORDS = 64
_DIGEST = struct.Struct("<QI")


class SlabDigest:
    """Digests slabs of `slab_bytes`. It reuses one buffer: one at a time, from one thread at a time."""

    def __init__(self, slab_bytes: int) -> None:
        self._sums = torch.empty(slab_bytes // (8 * _SECTOR_WORDS), dtype=torch.int64)
        # The tensor's bytes without numpy; alive as long as this object.
        self._bytes = (ctypes.c_char * (8 * self._sums.numel())).from_address(self._sums.data_ptr())

    def __call__(self, slab: Tensor) -> bytes:
        """The digest of a uint8 tensor of `slab_bytes`."""
        torch.sum(slab.view(torch.int64).view(-1, _SECTOR_WORDS), 1, out=self._sums)
        return _DIGEST.pack(int(self._sums.sum()) & 0xFFFFFFFFFFFFFFFF, zlib.crc32(self._bytes))
