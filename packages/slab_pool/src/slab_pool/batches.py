"""What a copy stream is given: batches of parts, each a list of strided copies described in numbers.

A copy is described in numbers: building a torch view costs the owner's thread microseconds, a tuple does not, and
a copy engine takes addresses and pitches.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slab_pool.pool import SlabPool
from slab_pool.records import record_spans
from slab_pool.runs import Runs


class Direction(enum.Enum):
    """Which way the bytes of a batch go."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"


class Copy(NamedTuple):
    """`rows` rows of `width` bytes between a device arena and a chunk of Host memory, both flat uint8 tensors.

    Row `i` is bytes `offset + i * pitch` to `+ width` on either side. A single row is contiguous; its pitches
    mean nothing.
    """

    device: Tensor
    device_offset: int
    device_pitch: int
    host: Tensor
    host_offset: int
    host_pitch: int
    width: int
    rows: int

    @property
    def num_bytes(self) -> int:
        return self.width * self.rows

    def device_view(self) -> Tensor:
        """The device side as uint8 `[width]` or `[rows, width]`, no copy."""
        return _view(self.device, self.device_offset, self.device_pitch, self.width, self.rows)

    def host_view(self) -> Tensor:
        """The Host side likewise."""
        return _view(self.host, self.host_offset, self.host_pitch, self.width, self.rows)

    def views(self, direction: Direction) -> tuple[Tensor, Tensor]:
        """Destination and source, in that order."""
        if direction is Direction.HOST_TO_DEVICE:
            return self.device_view(), self.host_view()
        return self.host_view(), self.device_view()


def _view(flat: Tensor, offset: int, pitch: int, width: int, rows: int) -> Tensor:
    if rows == 1:
        return flat[offset : offset + width]
    return flat.as_strided((rows, width), (pitch, 1), offset + int(flat.storage_offset()))


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Copies that become visible together; `name` is for error messages and tests."""

    name: str
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Parts in the order in which they are to land. A part may be empty: it lands in its turn."""

    direction: Direction
    parts: tuple[BatchPart, ...]
    num_bytes: int
    num_copies: int

    @classmethod
    def of(cls, direction: Direction, parts: Iterable[tuple[str, Iterable[Copy]]]) -> CopyBatch:
        """A batch of `(name, copies)` parts.

        Raises:
            ValueError: there is no part, hence nothing to wait for.
        """
        made = tuple(BatchPart(name, tuple(copies)) for name, copies in parts)
        if not made:
            raise ValueError("CopyBatch.of: at least one part must be given, got none")
        copies = [copy for part in made for copy in part.copies]
        return cls(direction, made, sum(copy.width * copy.rows for copy in copies), len(copies))


def record_copies(
    pool: SlabPool, arena: Tensor, runs: Runs, begin: int, end: int, *, slab_begin: int = 0
) -> list[Copy]:
    """Bytes `[begin, end)` of every record of `runs`, one copy a run.

    Rows that touch each other on both sides become one contiguous copy.

    Args:
        pool: where the slabs are.
        arena: the device's `uint8[num_records, record_bytes]`, contiguous.
        runs: pairs of records and slabs, from `pool.plan_runs`.
        begin: first byte of every record.
        end: behind the last byte.
        slab_begin: where a record starts in its slab.

    Raises:
        ValueError: another kind of arena, bytes or records outside arena or slab, or runs of a pool of another shape.
    """
    flat, record_bytes = _flat_arena("record_copies", arena)
    if not (0 <= begin < end <= record_bytes and 0 <= slab_begin <= pool.slab_bytes - end):
        raise ValueError(
            f"record_copies: range must lie in a record of {record_bytes} and a slab of {pool.slab_bytes} bytes,"
            f" got [{begin}, {end}) from slab byte {slab_begin}"
        )
    if runs.last_record >= arena.shape[0]:
        raise ValueError(f"record_copies: records must be below {arena.shape[0]}, got {runs.last_record}")
    if runs.last_slab >= pool.num_slabs or runs.slabs_per_chunk != pool.slabs_per_chunk:
        raise ValueError(
            f"record_copies: runs must be planned for a pool of {pool.num_slabs} slabs, {pool.slabs_per_chunk} a chunk,"
            f" got slab {runs.last_slab} with {runs.slabs_per_chunk} a chunk"
        )
    slab_bytes = pool.slab_bytes
    width = end - begin
    copies = []
    for record, record_stride, chunk, row, row_stride, count in runs.plain():
        host = pool.chunk_tensor(chunk)
        device_offset = record * record_bytes + begin
        host_offset = row * slab_bytes + slab_begin + begin
        device_pitch = record_stride * record_bytes
        host_pitch = row_stride * slab_bytes
        if device_pitch == host_pitch == width:
            copies.append(Copy(flat, device_offset, width * count, host, host_offset, width * count, width * count, 1))
        else:
            copies.append(Copy(flat, device_offset, device_pitch, host, host_offset, host_pitch, width, count))
    return copies


def image_copies(pool: SlabPool, arena: Tensor, index: int, handles: Sequence[int], begin: int, end: int) -> list[Copy]:
    """Bytes `[begin, end)` of image `index`, packed over the slabs `handles` in their order.

    `arena` is the device's `uint8[num_images, image_bytes]`, contiguous. Pieces that touch each other, in the image
    and in neighbouring slabs, become one copy.

    Raises:
        ValueError: another kind of arena, an index or bytes outside it, or another number of slabs than an image takes.
        StaleSlab: a handle names no acquired slab.
        PoolClosed: the pool is closed.
    """
    flat, image_bytes = _flat_arena("image_copies", arena)
    if not (0 <= begin <= end <= image_bytes and 0 <= index < arena.shape[0]):
        raise ValueError(
            f"image_copies: index and range must lie in {arena.shape[0]} images of {image_bytes} bytes,"
            f" got index {index} and [{begin}, {end})"
        )
    if len(handles) != -(-image_bytes // pool.slab_bytes):
        raise ValueError(
            f"image_copies: an image of {image_bytes} bytes takes {-(-image_bytes // pool.slab_bytes)} slabs,"
            f" got {len(handles)}"
        )
    numbers = pool.slab_numbers(handles)
    copies: list[Copy] = []
    base = index * image_bytes
    for ordinal, slab_begin, record_begin, length in record_spans(begin, end, pool.slab_bytes):
        chunk, row = divmod(numbers[ordinal], pool.slabs_per_chunk)
        host = pool.chunk_tensor(chunk)
        host_offset = row * pool.slab_bytes + slab_begin
        last = copies[-1] if copies else None
        if last is not None and last.host is host and last.host_offset + last.width == host_offset:
            length += last.width
            copies.pop()
            host_offset = last.host_offset
            record_begin = last.device_offset - base
        copies.append(Copy(flat, base + record_begin, length, host, host_offset, length, length, 1))
    return copies


def _flat_arena(op: str, arena: Tensor) -> tuple[Tensor, int]:
    if arena.dtype != torch.uint8 or arena.dim() != 2 or not arena.is_contiguous():
        raise ValueError(f"{op}: arena must be contiguous uint8[records, bytes], got {arena.dtype}{list(arena.shape)}")
    return arena.view(-1), arena.shape[1]
