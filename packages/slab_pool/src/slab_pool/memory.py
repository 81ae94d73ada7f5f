"""One chunk of Host memory: mapped exactly, touched without changing it, page-locked once, given back once.

`torch.empty(pin_memory=True)` is not used on purpose: its caching allocator rounds large sizes up to powers of
two, so that a pool of 33 GiB would take 64. Here a chunk is an anonymous private mapping of exactly the bytes
asked for, and registering it with the CUDA runtime page-locks just those.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slab_pool.errors import HostMemoryError

PAGE_BYTES = 4096
MIB = 1 << 20

_MADV_POPULATE_WRITE = 23  # Linux 5.14: fault pages in writable, contents unchanged
_NO_MEMORY = (errno.ENOMEM, errno.EFAULT)  # what it answers when nothing can back the range
_CUDA_HOST_REGISTER_PORTABLE = 1


class Registrar(Protocol):
    """Page-locks memory for a device. Sizes and addresses are exact; each address is registered once."""

    def register(self, address: int, num_bytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...


class CudaRegistrar:
    """The CUDA runtime's own page-locking, reached through the bindings torch ships."""

    def __init__(self, runtime: Any = None) -> None:
        self._runtime = torch.cuda.cudart() if runtime is None else runtime  # type: ignore[no-untyped-call]

    def register(self, address: int, num_bytes: int) -> None:
        self._check(
            "cudaHostRegister",
            self._runtime.cudaHostRegister(address, num_bytes, _CUDA_HOST_REGISTER_PORTABLE),
            num_bytes,
        )

    def unregister(self, address: int) -> None:
        self._check("cudaHostUnregister", self._runtime.cudaHostUnregister(address), 0)

    @staticmethod
    def _check(call: str, code: Any, num_bytes: int) -> None:
        if int(code) != 0:
            raise HostMemoryError(
                f"pinned Host memory: {call} of {num_bytes / MIB:.1f} MiB returned CUDA error {int(code)}",
                num_bytes=num_bytes,
            )


class HostChunk:
    """Anonymous private memory of exactly `num_bytes`, as a uint8 tensor and as a memoryview of the same bytes.

    The mapping lives until the last view of it is gone, so a view that outlives its pool stays readable; only
    the page lock ends with `unregister`. No threads, no slabs in here.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < PAGE_BYTES or num_bytes % PAGE_BYTES:
            raise ValueError(f"HostChunk: num_bytes must be a positive multiple of {PAGE_BYTES}, got {num_bytes!r}")
        try:
            if hasattr(mmap, "MAP_PRIVATE"):
                mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                mapping = mmap.mmap(-1, num_bytes)
        except (OSError, MemoryError, OverflowError) as error:
            raise HostMemoryError(
                f"Host memory: the system refused a chunk of {num_bytes / MIB:.1f} MiB ({error})",
                num_bytes=num_bytes,
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages serves as well, only slower
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.num_bytes = num_bytes
        self.memory = memoryview(mapping)
        self.tensor: Tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self._registrar: Registrar | None = None

    @property
    def registered(self) -> bool:
        return self._registrar is not None

    def populate(self, begin: int, end: int) -> bool:
        """Fault `[begin, end)` in without changing a byte, the GIL released. False where the kernel cannot:
        then the first use of each page does it."""
        madvise = getattr(_libc(), "madvise", None)
        if madvise is None:
            return False
        address = self.tensor.data_ptr() + begin
        return_code = madvise(
            ctypes.c_void_p(address), ctypes.c_size_t(end - begin), ctypes.c_int(_MADV_POPULATE_WRITE)
        )
        if return_code == 0:
            return True
        code = ctypes.get_errno()
        if code in _NO_MEMORY:
            raise HostMemoryError(
                f"Host memory: the system could not back {(end - begin) / MIB:.1f} MiB of a chunk"
                f" of {self.num_bytes / MIB:.1f} MiB ({os.strerror(code)})",
                num_bytes=end - begin,
            )
        return False

    def register(self, registrar: Registrar) -> None:
        """Page-lock the whole chunk, once."""
        if self._registrar is not None:
            raise RuntimeError("HostChunk.register: the chunk is registered already")
        registrar.register(self.tensor.data_ptr(), self.num_bytes)
        self._registrar = registrar

    def unregister(self) -> None:
        """Undo `register`; nothing to do where it was never done."""
        if self._registrar is not None:
            registrar, self._registrar = self._registrar, None
            registrar.unregister(self.tensor.data_ptr())


ChunkAllocator = Callable[[int], HostChunk]


def host_memory_limit() -> int | None:
    """Bytes this process may hold at most: the machine's memory, or its control group's limit if that is less.

    None where neither is known. An overcommitting kernel maps more without a word and kills the process when it
    is touched, which is why the pool asks first.
    """
    limits = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text().strip()))
    return min(limits, default=None)


def _libc() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except TypeError:  # Windows has no such handle
        return None
