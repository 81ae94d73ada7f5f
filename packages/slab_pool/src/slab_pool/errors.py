"""The errors of this package.

SlabPoolError
├── HostMemoryError      the system refused Host memory (also a MemoryError)
├── PoolExhausted        fewer free slabs than asked for
├── StaleSlab            a handle that is released, foreign or made up (also a LookupError)
├── PoolClosed           the pool or the copy stream was closed (also a RuntimeError)
├── CopyFailed           a batch of copies did not land; carries the ticket, hence defined in `tickets`
├── WouldBlock           a test double was asked to wait for copies that were not told to land
└── ImageError           an image file
    ├── ImageCancelled   the caller's `cancelled()` said so
    ├── ImageDamaged     length, checksum, magic or version are not what they should be
    └── ImageUnsuitable  a sound file of another geometry

Bad arguments are ValueError or TypeError as everywhere in Python, and the operating system's own refusals of
files stay OSError.
"""

from __future__ import annotations


class SlabPoolError(Exception):
    """Base of every error that this package defines."""


class HostMemoryError(SlabPoolError, MemoryError):
    """The system refused Host memory, never a device's.

    Attributes:
        num_bytes: what was asked for.
    """

    def __init__(self, message: str, *, num_bytes: int) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes


class PoolExhausted(SlabPoolError):
    """`acquire` found fewer free slabs than asked for; nothing was taken."""


class StaleSlab(SlabPoolError, LookupError):
    """A handle that names no acquired slab of this pool: released before, another pool's, or no handle at all."""


class PoolClosed(SlabPoolError, RuntimeError):
    """The pool or copy stream was used after `close()`."""


class WouldBlock(SlabPoolError):
    """A wait that only the waiting thread itself could end (test doubles)."""


class ImageError(SlabPoolError):
    """Base of everything about image files."""


class ImageCancelled(ImageError):
    """The caller's `cancelled()` became true; nothing was left behind."""


class ImageDamaged(ImageError):
    """The file is not what its header, lengths and checksums say; nothing was loaded."""


class ImageUnsuitable(ImageError):
    """An undamaged file whose slabs do not fit the pool."""
