"""Slabs to a file and back: all of them or none, in one sequential pass."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from slab_pool.errors import ImageCancelled, ImageDamaged, ImageUnsuitable
from slab_pool.image_format import (
    FIXED_BYTES,
    ImageHeader,
    SlabDigest,
    decode_header,
    decode_trailer,
    encode_front,
    encode_trailer,
    header_bytes,
    num_tables_of,
    split_tables,
)
from slab_pool.pool import SlabPool

Progress = Callable[[int, int], None]
"""Called with the number of slabs done and of all; first with 0."""

WriteFunction = Callable[[int, memoryview], int]


@dataclass(frozen=True, slots=True)
class ImageTransfer:
    """What a save or a load moved."""

    num_slabs: int
    num_bytes: int
    seconds: float


def temporary_path(path: str | os.PathLike[str]) -> Path:
    """Where an image for `path` is written before it is complete.

    It is the same each time, so that the next save overwrites what a killed process left behind.
    """
    path = Path(path)
    return path.with_name(path.name + ".tmp")


def save_image(
    path: str | os.PathLike[str],
    pool: SlabPool,
    handles: Sequence[int],
    *,
    tables: Sequence[bytes] = (),
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
    write: WriteFunction = os.write,
) -> ImageTransfer:
    """Write the slabs `handles`, in this order and with the caller's `tables` before them, to `path`.

    The file is written beside it (`temporary_path`), made durable, then renamed over it: until the last moment a file
    that was at `path` stays as it was, and after an error the temporary file is removed. The slabs' copies must have
    landed.

    Args:
        path: of the image.
        pool: where the slabs are.
        handles: of the slabs.
        tables: bytes of the caller's, at most 64 pieces.
        progress: called before every slab and at the end.
        cancelled: asked before every slab and before the rename.
        write: a seam for tests.

    Raises:
        ImageCancelled: `cancelled` became true.
        StaleSlab: a handle names no acquired slab.
        ValueError: more than 64 tables.
        OSError: the disk is full, or the system refused otherwise.
        PoolClosed: the pool is closed.
    """
    path = Path(path)
    temporary = temporary_path(path)
    pool.slab_numbers(handles)
    header, front = encode_front(pool.slab_bytes, len(handles), tables)
    begin = time.perf_counter()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
    try:
        try:
            _write_all(write, descriptor, memoryview(front))
            digests = _write_slabs(write, descriptor, pool, handles, progress, cancelled)
            _write_all(write, descriptor, memoryview(encode_trailer(digests)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _check_cancelled(cancelled, f"save_image {path}")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)
    return ImageTransfer(len(handles), header.file_bytes, time.perf_counter() - begin)


def _write_slabs(
    write: WriteFunction,
    descriptor: int,
    pool: SlabPool,
    handles: Sequence[int],
    progress: Progress | None,
    cancelled: Callable[[], bool] | None,
) -> list[bytes]:
    digest = SlabDigest(pool.slab_bytes)
    digests = []
    for index, handle in enumerate(handles):
        _check_cancelled(cancelled, f"save_image: at slab {index} of {len(handles)}")
        if progress is not None:
            progress(index, len(handles))
        digests.append(digest(pool.tensor(handle)))
        _write_all(write, descriptor, pool.memory(handle))
    if progress is not None:
        progress(len(handles), len(handles))
    return digests


def _write_all(write: WriteFunction, descriptor: int, data: memoryview) -> None:
    while data:
        data = data[write(descriptor, data) :]


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_cancelled(cancelled: Callable[[], bool] | None, what: str) -> None:
    if cancelled is not None and cancelled():
        raise ImageCancelled(f"{what}: cancelled")


class ImageFile:
    """An image file opened for reading.

    Opening reads and checks header, tables and trailer, and no slab: the caller can look at `tables` and choose before
    a byte of a slab is read.

    Attributes:
        tables: the caller's bytes, as they were saved.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open it.

        Raises:
            ImageDamaged: something is not as it was written.
            OSError: it cannot be read (FileNotFoundError where there is none).
        """
        self.path = Path(path)
        self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            self._header = self._read_header()
            between = self._header.slabs_begin - self._header.header_bytes
            self.tables = split_tables(self._header, self._read(self._header.header_bytes, between, "tables"))
            trailer = self._read(self._header.trailer_begin, self._header.trailer_bytes, "trailer")
            self._digests = decode_trailer(self._header, trailer)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._open = True

    def _read_header(self) -> ImageHeader:
        file_bytes = os.fstat(self._descriptor).st_size
        num_tables = num_tables_of(self._read(0, min(FIXED_BYTES, file_bytes), "header"))
        size = header_bytes(num_tables)
        return decode_header(self._read(0, min(size, file_bytes), "header"), file_bytes=file_bytes)

    def _read(self, offset: int, num_bytes: int, what: str) -> bytes:
        data = bytearray(num_bytes)
        self._read_into(offset, memoryview(data), what)
        return bytes(data)

    def _read_into(self, offset: int, memory: memoryview, what: str) -> None:
        while memory:
            got = os.preadv(self._descriptor, [memory], offset)
            if got == 0:
                raise ImageDamaged(f"{self.path}: ends inside {what}")
            offset += got
            memory = memory[got:]

    @property
    def slab_bytes(self) -> int:
        return self._header.slab_bytes

    @property
    def num_slabs(self) -> int:
        return self._header.num_slabs

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._header.file_bytes

    def load(
        self,
        pool: SlabPool,
        *,
        ordinals: Sequence[int] | None = None,
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> tuple[int, ...]:
        """Read slabs (all, or those at `ordinals`, in that order) into newly acquired ones.

        All or nothing: on any error every slab acquired here is free again.

        Returns:
            The handles of the slabs.

        Raises:
            ImageUnsuitable: its slabs have another size than the pool's.
            IndexError: the file has no such ordinal.
            PoolExhausted: the pool has too few free slabs.
            ImageDamaged: a slab that was to be read is not as it was written.
            ImageCancelled: `cancelled`, asked before every slab, became true.
            ValueError: after `close()`.
            OSError: the file cannot be read.
        """
        if not self._open:  # by now the system may have given the descriptor to another file
            raise ValueError(f"load: the image file must be open, got {self.path} after close()")
        if self.slab_bytes != pool.slab_bytes:
            raise ImageUnsuitable(
                f"load: slabs of {self.path} must have {pool.slab_bytes} bytes, got {self.slab_bytes}"
            )
        wanted = range(self.num_slabs) if ordinals is None else ordinals
        for ordinal in wanted:
            if not 0 <= ordinal < self.num_slabs:
                raise IndexError(f"load: ordinals must be below {self.num_slabs}, got {ordinal!r}")
        handles = pool.acquire(len(wanted))
        try:
            self._load_into(pool, handles, wanted, progress, cancelled)
        except BaseException:
            pool.release(handles)
            raise
        return handles

    def _load_into(
        self,
        pool: SlabPool,
        handles: Sequence[int],
        wanted: Sequence[int],
        progress: Progress | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        if hasattr(os, "posix_fadvise"):
            # The system reads ahead while a slab is digested, which is why no thread is needed for that.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        digest = SlabDigest(pool.slab_bytes)
        for index, (handle, ordinal) in enumerate(zip(handles, wanted, strict=True)):
            _check_cancelled(cancelled, f"load {self.path}: at slab {index} of {len(wanted)}")
            if progress is not None:
                progress(index, len(wanted))
            offset = self._header.slabs_begin + ordinal * self.slab_bytes
            self._read_into(offset, pool.memory(handle), f"slab {ordinal}")
            if digest(pool.tensor(handle)) != self._digests[ordinal]:
                raise ImageDamaged(f"{self.path}: slab {ordinal}: digest must be {self._digests[ordinal].hex()}")
        if progress is not None:
            progress(len(wanted), len(wanted))

    def close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
