"""Chunks of Host memory: mapped exactly, touched without changing them, page-locked once, given back once.

`torch.empty(pin_memory=True)` is not used: its caching allocator rounds large sizes up to powers of two, so that a
pool of 33 GiB would take 64. Here a chunk is an anonymous private mapping of exactly the bytes asked for, and
registering it with the CUDA runtime page-locks just those.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
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
_STEP_BYTES = 4 * MIB  # the kernel holds the lock of this process's memory map for as long as a step takes


class Registrar(Protocol):
    """Page-locks memory for a device. Sizes and addresses are exact; each address is registered once."""

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock memory.

        Raises:
            HostMemoryError: the device's runtime refused.
        """

    def unregister(self, address: int) -> None:
        """Undo `register`.

        Raises:
            HostMemoryError: the device's runtime refused.
        """


class CudaRegistrar:
    """The CUDA runtime's page-locking, through the bindings that torch ships."""

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
    """Anonymous private memory of exactly `num_bytes`. It knows no threads and no slabs.

    The mapping lives until the last view of it is gone, so a view that outlives its pool stays readable. Only the
    page lock ends with `unregister`.

    Attributes:
        memory: the bytes as a memoryview.
        tensor: the same bytes as a uint8 tensor.
    """

    def __init__(self, num_bytes: int) -> None:
        """Map the memory.

        Raises:
            ValueError: `num_bytes` is no positive multiple of 4096.
            HostMemoryError: the system refused it.
        """
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
        """Fault `[begin, end)` in without changing a byte, with the interpreter's lock released.

        Returns:
            False where the kernel cannot do that: then the first use of each page faults it in.

        Raises:
            HostMemoryError: the system has no memory for the range.
        """
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
        """Page-lock the whole chunk.

        Raises:
            RuntimeError: it is page-locked already.
            HostMemoryError: the device's runtime refused.
        """
        if self._registrar is not None:
            raise RuntimeError("HostChunk.register: the chunk is registered already")
        registrar.register(self.tensor.data_ptr(), self.num_bytes)
        self._registrar = registrar

    def unregister(self) -> None:
        """Undo `register`. Does nothing for a chunk that is not page-locked.

        Raises:
            HostMemoryError: the device's runtime refused.
        """
        if self._registrar is not None:
            registrar, self._registrar = self._registrar, None
            registrar.unregister(self.tensor.data_ptr())


ChunkAllocator = Callable[[int], HostChunk]


def host_memory_limit() -> int | None:
    """The most bytes this process may hold: the machine's memory, or its control group's limit if that is less.

    The pool asks before it maps: a kernel that overcommits grants more, and ends the process when it is touched.

    Returns:
        None where neither is known.
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


class ChunkPreparation:
    """Touches chunks in the background, so that starting does not wait for tens of gigabytes.

    One thread faults the chunks in, in order, and page-locks each where a registrar is given. A chunk that is only
    touched may be used at any time, since touching changes no byte. One that is to be page-locked is waited for,
    since copies from it would otherwise not be asynchronous. An error of the thread is raised in the threads that
    wait.

    Attributes:
        num_ready: chunks that are prepared.
        finished: no chunk is left to wait for, and there is no error to raise.
    """

    def __init__(self, chunks: Sequence[HostChunk], registrar: Registrar | None) -> None:
        self._chunks = chunks
        self._registrar = registrar
        self._condition = threading.Condition()
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self.num_ready = 0
        self.finished = False
        # A daemon, so that an interpreter which ends without close() is not held up by page faults.
        self._thread = threading.Thread(target=self._run, name="slab-pool-touch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for chunk in self._chunks:
                for begin in range(0, chunk.num_bytes, _STEP_BYTES):
                    if self._stopped.is_set():
                        return
                    if not chunk.populate(begin, min(begin + _STEP_BYTES, chunk.num_bytes)):
                        break
                if self._registrar is not None:
                    chunk.register(self._registrar)
                with self._condition:
                    self.num_ready += 1
                    self._condition.notify_all()
            self.finished = True
        except BaseException as error:
            with self._condition:
                self._error = error
                self._condition.notify_all()
        finally:
            with self._condition:
                self._stopped.set()
                self._condition.notify_all()

    def wait_for_chunk(self, index: int) -> None:
        """Return once chunk `index` may be used.

        Raises:
            HostMemoryError: the thread failed before that.
            RuntimeError: the preparation was closed before that.
        """
        self._raise_error()
        if self._registrar is None:
            return
        with self._condition:
            self._condition.wait_for(lambda: self.num_ready > index or self._stopped.is_set())
        if self.num_ready <= index:
            self._raise_error()
            raise RuntimeError(f"chunk {index} was asked for after the pool stopped preparing")

    def wait_until_finished(self, timeout: float | None) -> bool:
        """Wait for all chunks.

        Returns:
            False on a timeout.

        Raises:
            HostMemoryError: the thread failed.
        """
        with self._condition:
            self._condition.wait_for(lambda: self.finished or self._stopped.is_set(), timeout)
        self._raise_error()
        return self.finished

    def _raise_error(self) -> None:
        if self._error is None:
            return
        if isinstance(self._error, HostMemoryError):
            raise HostMemoryError(str(self._error), num_bytes=self._error.num_bytes) from self._error
        raise HostMemoryError(
            f"Host memory: preparing the slab pool failed: {self._error!r}", num_bytes=0
        ) from self._error

    def close(self) -> None:
        """End the thread, unlock every chunk it page-locked, forget the chunks.

        Raises:
            HostMemoryError: the first refusal to unlock a chunk, after all others were unlocked.
        """
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        chunks, self._chunks = self._chunks, ()
        first: Exception | None = None
        for chunk in chunks:
            try:
                chunk.unregister()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
