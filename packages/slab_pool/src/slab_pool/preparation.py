"""Touching and page-locking chunks in the background, so that starting does not wait for tens of gigabytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from slab_pool.errors import HostMemoryError
from slab_pool.memory import MIB, HostChunk, Registrar

_STEP_BYTES = 4 * MIB  # the kernel holds the lock of this process's memory map for as long as a step takes


class ChunkPreparation:
    """One thread that faults chunks in, in order, and page-locks each where a registrar is given.

    A chunk that is only touched may be used at any time, since touching changes no byte; one that is to be
    page-locked is waited for, since copies from it would otherwise not be asynchronous. What the thread could
    not do is raised by whoever waits, in that thread.
    """

    def __init__(self, chunks: Sequence[HostChunk], registrar: Registrar | None) -> None:
        self._chunks = chunks
        self._registrar = registrar
        self._condition = threading.Condition()
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self.num_ready = 0
        self.finished = False  # nothing left to wait for, and nothing to raise
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
        """Return once chunk `index` may be used; raise what went wrong before that."""
        self._raise_error()
        if self._registrar is None:
            return
        with self._condition:
            self._condition.wait_for(lambda: self.num_ready > index or self._stopped.is_set())
        if self.num_ready <= index:
            self._raise_error()
            raise RuntimeError(f"chunk {index} was asked for after the pool stopped preparing")

    def wait_until_finished(self, timeout: float | None) -> bool:
        """Wait for all chunks; False on a timeout."""
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
        """End the thread, unlock every chunk it page-locked, forget the chunks. All are unlocked even where one
        refuses; the first refusal is raised afterwards."""
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
