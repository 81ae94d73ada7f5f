"""The slab pool: one budget of Host memory in equal slabs, handed out lowest first.

A slab is the Host unit of bytes. The pool knows nothing about what lies in one; see `records` for that.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Self

import torch
from torch import Tensor

from slab_pool.errors import HostMemoryError, PoolClosed, PoolExhausted, StaleSlab
from slab_pool.memory import (
    MIB,
    PAGE_BYTES,
    ChunkAllocator,
    ChunkPreparation,
    CudaRegistrar,
    HostChunk,
    Registrar,
    host_memory_limit,
)
from slab_pool.runs import Runs, plan_runs

MAX_CHUNK_BYTES = 4 << 30
_GENERATION_BITS = 32
_GENERATION_MASK = (1 << _GENERATION_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """Counts of a pool, as of the moment they were asked for.

    Attributes:
        high_water: the largest `num_used` since the pool was made.
    """

    num_slabs: int
    slab_bytes: int
    num_used: int
    high_water: int
    num_acquired: int
    num_released: int
    num_chunks: int
    num_chunks_ready: int
    pinned: bool

    @property
    def capacity_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    @property
    def used_bytes(self) -> int:
        return self.num_used * self.slab_bytes


class SlabPool:
    """Slabs of `slab_bytes` within `budget_bytes` of Host memory.

    A *handle* is an int: the slab's number above 32 bits of its generation, which moves on with every acquire
    and release. So a handle sorts by place, fits an int64, and is refused once it was released, by any other
    pool, and when it was made up.

    The memory comes in chunks of whole slabs; a slab never crosses one. A thread touches (and page-locks) the chunks
    in order after construction. Only `acquire` of a slab whose chunk is not page-locked yet waits for it.

    Lowest free slabs first, so that what is acquired together lies together. The pool has no owners, no recency, no
    eviction and no idea of contents. It is for one thread at a time, the owner's; only `statistics` may be called
    from others. After `close()` every call that takes or names slabs raises PoolClosed.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        slab_bytes: int,
        image_bytes: int = 0,
        pinned: bool | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        first_generation: int | None = None,
        allocate: ChunkAllocator = HostChunk,
        registrar: Registrar | None = None,
        memory_limit: int | None = None,
    ) -> None:
        """Map the memory, and start to prepare it in the background.

        Args:
            budget_bytes: what may be mapped at most. It must hold one image, the partial record that may belong to
                it, and one record more.
            slab_bytes: size of a slab, a multiple of 4096.
            image_bytes: the largest record that spans slabs (0: none does).
            pinned: whether to page-lock every chunk, until `close()`; the default is whether there is a CUDA device.
            max_chunk_bytes: the most that is mapped as one chunk.
            first_generation: fixes the generations, for tests that compare handles of two pools.
            allocate: a seam for tests, as are `registrar` and `memory_limit`.

        Raises:
            ValueError: sizes that do not fit together.
            HostMemoryError: the system has less, or gives less.
        """
        if slab_bytes < PAGE_BYTES or slab_bytes % PAGE_BYTES:
            raise ValueError(f"SlabPool: slab_bytes must be a positive multiple of {PAGE_BYTES}, got {slab_bytes!r}")
        if image_bytes < 0:
            raise ValueError(f"SlabPool: image_bytes must be at least 0, got {image_bytes!r}")
        if not slab_bytes <= max_chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(
                f"SlabPool: max_chunk_bytes must be between slab_bytes ({slab_bytes}) and {MAX_CHUNK_BYTES},"
                f" got {max_chunk_bytes!r}"
            )
        self.slab_bytes = slab_bytes
        self.image_slabs = -(-image_bytes // slab_bytes)
        self.num_slabs = budget_bytes // slab_bytes
        minimum_slabs = self.image_slabs + 2 if image_bytes else 1
        if self.num_slabs < minimum_slabs:
            minimum_mib = -(-minimum_slabs * slab_bytes // MIB)
            raise ValueError(
                f"SlabPool: budget_bytes must hold {minimum_slabs} slabs of {slab_bytes} bytes"
                f" (at least {minimum_mib} MiB), got {budget_bytes!r}"
            )
        limit = host_memory_limit() if memory_limit is None else memory_limit
        if limit is not None and self.capacity_bytes > limit:
            raise HostMemoryError(
                f"Host memory: a slab pool of {self.capacity_bytes / MIB:.1f} MiB exceeds the"
                f" {limit / MIB:.1f} MiB this process may use",
                num_bytes=self.capacity_bytes,
            )
        self.pinned = torch.cuda.is_available() if pinned is None else pinned
        self.slabs_per_chunk = min(max_chunk_bytes // slab_bytes, self.num_slabs)
        if self.pinned and registrar is None:
            registrar = CudaRegistrar()
        self._chunks = self._allocate_chunks(allocate)
        self._tensors = [chunk.tensor for chunk in self._chunks]

        start = secrets.randbits(_GENERATION_BITS) if first_generation is None else first_generation
        # Per slab its handle while it is acquired, and ~(its next handle), a negative number, while it is free. So
        # one comparison tells a good handle from one that is stale, foreign or made up.
        start &= _GENERATION_MASK
        self._current = [~(slab << _GENERATION_BITS | start) for slab in range(self.num_slabs)]
        self._free = list(range(self.num_slabs))
        self._fewest_free = self.num_slabs
        self._num_acquired = 0
        self._num_released = 0
        self._closed = False
        self._preparation = ChunkPreparation(self._chunks, registrar if self.pinned else None)
        # Also runs when the pool is forgotten, and at exit: page-locked memory must not be unmapped as it is.
        self._finish = weakref.finalize(self, self._preparation.close)

    def _allocate_chunks(self, allocate: ChunkAllocator) -> list[HostChunk]:
        chunks: list[HostChunk] = []
        remaining = self.num_slabs
        try:
            while remaining:
                slabs = min(self.slabs_per_chunk, remaining)
                chunks.append(allocate(slabs * self.slab_bytes))
                remaining -= slabs
        except (HostMemoryError, MemoryError, OSError) as error:
            got_mib = sum(chunk.num_bytes for chunk in chunks) / MIB
            raise HostMemoryError(
                f"Host memory: the system refused {self.capacity_bytes / MIB:.1f} MiB for the slab pool"
                f" after {got_mib:.1f} MiB: {error}",
                num_bytes=self.capacity_bytes,
            ) from error
        return chunks

    # -- acquire and release ---------------------------------------------------------------------------------

    def acquire(self, count: int = 1) -> tuple[int, ...]:
        """Take the `count` lowest free slabs, in rising order: all of them, or none.

        Raises:
            PoolExhausted: fewer are free.
            HostMemoryError: a chunk could not be touched or page-locked.
            ValueError: `count` is negative.
            PoolClosed: after `close()`.
        """
        free = self._free
        if not 0 <= count <= len(free) or self._closed:
            self._refuse_acquire(count)
        current = self._current
        if count == 1:  # the most frequent call by far
            slab = heappop(free)
            current[slab] = handle = ~current[slab]
            handles: tuple[int, ...] = (handle,)
        else:
            slabs = [heappop(free) for _ in range(count)]
            handles = tuple([~current[slab] for slab in slabs])
            for slab, handle in zip(slabs, handles, strict=True):
                current[slab] = handle
        self._num_acquired += count
        if len(free) < self._fewest_free:
            self._fewest_free = len(free)
        if not self._preparation.finished and count:
            self._wait_for_memory(handles)
        return handles

    def _wait_for_memory(self, handles: tuple[int, ...]) -> None:
        try:
            self._preparation.wait_for_chunk((handles[-1] >> _GENERATION_BITS) // self.slabs_per_chunk)
        except BaseException:
            self.release(handles)
            raise

    def _refuse_acquire(self, count: int) -> None:
        self._check_open("acquire")
        if count < 0:
            raise ValueError(f"acquire: count must be at least 0, got {count!r}")
        raise PoolExhausted(f"acquire: {count} slabs asked for, {len(self._free)} of {self.num_slabs} are free")

    def release(self, handles: Iterable[int]) -> None:
        """Give slabs back: all of them, or none. Their handles are refused from here on.

        Raises:
            StaleSlab: a handle names no acquired slab, or two name the same.
            PoolClosed: after `close()`.
        """
        handles = list(handles)
        if len(handles) == 1 and not self._closed:  # the most frequent call by far, when it is a good one
            (handle,) = handles
            slab = handle >> _GENERATION_BITS
            if 0 <= slab < self.num_slabs and self._current[slab] == handle:
                self._current[slab] = ~(slab << _GENERATION_BITS | (handle + 1) & _GENERATION_MASK)
                heappush(self._free, slab)
                self._num_released += 1
                return
        slabs = self._slab_numbers("release", handles)
        if len(slabs) > 1 and len(set(slabs)) != len(slabs):
            raise StaleSlab(f"release: the same slab twice in one call, got {handles!r}")
        current = self._current
        free = self._free
        for slab, handle in zip(slabs, handles, strict=True):
            current[slab] = ~(slab << _GENERATION_BITS | (handle + 1) & _GENERATION_MASK)
            heappush(free, slab)
        self._num_released += len(slabs)

    def _slab_numbers(self, op: str, handles: Sequence[int]) -> list[int]:
        """The numbers of slabs that are acquired under exactly these handles; StaleSlab otherwise."""
        if self._closed:
            self._check_open(op)
        handles = list(handles)
        numbers = [handle >> _GENERATION_BITS for handle in handles]
        try:
            good = list(map(self._current.__getitem__, numbers)) == handles
        except IndexError:
            good = False
        if not good or (numbers and min(numbers) < 0):
            self._refuse_handles(op, handles)
        return numbers

    def _refuse_handles(self, op: str, handles: Sequence[int]) -> None:
        for handle in handles:
            number = handle >> _GENERATION_BITS
            if not 0 <= number < self.num_slabs:
                raise StaleSlab(f"{op}: handle {handle!r} names slab {number}, the pool has {self.num_slabs}")
            if self._current[number] != handle:
                raise StaleSlab(f"{op}: handle {handle!r} of slab {number} was released, or is not this pool's")

    # -- places ----------------------------------------------------------------------------------------------

    def slab_numbers(self, handles: Sequence[int]) -> list[int]:
        """Each slab's place in the pool, 0 first.

        Raises:
            StaleSlab: a handle names no acquired slab.
            PoolClosed: after `close()`.
        """
        return self._slab_numbers("slab_numbers", handles)

    def tensor(self, handle: int) -> Tensor:
        """The slab's bytes as a uint8 tensor of `slab_bytes`, no copy.

        Raises:
            StaleSlab: the handle names no acquired slab.
            PoolClosed: after `close()`.
        """
        chunk, begin = self.place(self._slab_numbers("tensor", (handle,))[0])
        return chunk.tensor[begin : begin + self.slab_bytes]

    def memory(self, handle: int) -> memoryview:
        """The slab's bytes as a writable memoryview, no copy.

        Raises:
            StaleSlab: the handle names no acquired slab.
            PoolClosed: after `close()`.
        """
        chunk, begin = self.place(self._slab_numbers("memory", (handle,))[0])
        return chunk.memory[begin : begin + self.slab_bytes]

    def place(self, slab_number: int) -> tuple[HostChunk, int]:
        """The chunk that a slab lies in, by the slab's number, and its first byte there.

        Raises:
            PoolClosed: after `close()`.
            IndexError: no such slab.
        """
        index, row = divmod(slab_number, self.slabs_per_chunk)
        try:
            return self._chunks[index], row * self.slab_bytes
        except IndexError:
            self._check_open("place")
            raise

    def chunk_tensor(self, index: int) -> Tensor:
        """All bytes of one chunk, uint8.

        Raises:
            PoolClosed: after `close()`.
            IndexError: no such chunk.
        """
        try:
            return self._tensors[index]
        except IndexError:
            self._check_open("chunk_tensor")
            raise

    def plan_runs(
        self, records: Sequence[int], handles: Sequence[int], *, record_bytes: int, max_pitch_bytes: int = 2**31 - 1
    ) -> Runs:
        """`runs.plan_runs` for slabs of this pool, given by handle. `record_bytes` is the arena's record.

        Raises:
            StaleSlab: a handle names no acquired slab.
            ValueError: lists of different lengths, or a negative record.
            PoolClosed: after `close()`.
        """
        return plan_runs(
            records,
            self._slab_numbers("plan_runs", handles),
            slabs_per_chunk=self.slabs_per_chunk,
            record_bytes=record_bytes,
            slab_bytes=self.slab_bytes,
            max_pitch_bytes=max_pitch_bytes,
        )

    # -- facts -----------------------------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Bytes the pool maps when all of it is touched; never above the budget."""
        return self.num_slabs * self.slab_bytes

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slabs - len(self._free)

    def statistics(self) -> PoolStatistics:
        """Counts as of now. Any thread may ask."""
        return PoolStatistics(
            num_slabs=self.num_slabs,
            slab_bytes=self.slab_bytes,
            num_used=self.num_used,
            high_water=self.num_slabs - self._fewest_free,
            num_acquired=self._num_acquired,
            num_released=self._num_released,
            num_chunks=len(self._chunks),
            pinned=self.pinned,
            num_chunks_ready=self._preparation.num_ready,
        )

    def check_invariants(self) -> None:
        """Derive the accounting again and compare. O(n).

        Raises:
            AssertionError: they differ; it shows the internals.
        """
        free = self._free
        numbers = set(free)
        out = [number for number, handle in enumerate(self._current) if handle >= 0]
        state = f"free {len(free)}, out {len(out)}, slabs {self.num_slabs}"
        if len(numbers) != len(free):
            raise AssertionError(f"a slab is free twice: {state}")
        if not numbers.isdisjoint(out):
            raise AssertionError(f"slabs free and out: {sorted(numbers.intersection(out))[:8]}: {state}")
        if len(free) + len(out) != self.num_slabs or numbers - set(range(self.num_slabs)):
            raise AssertionError(f"slabs lost or made up: {state}")
        if any(free[(i - 1) >> 1] > free[i] for i in range(1, len(free))):
            raise AssertionError(f"the free slabs are no heap: {state}")
        for number, handle in enumerate(self._current):
            if (handle if handle >= 0 else ~handle) >> _GENERATION_BITS != number:
                raise AssertionError(f"slab {number} has the handle {handle!r} of another: {state}")
        if self._num_acquired - self._num_released != len(out) or self._fewest_free > len(free):
            raise AssertionError(
                f"acquired {self._num_acquired} - released {self._num_released} and fewest free"
                f" {self._fewest_free} do not fit: {state}"
            )
        if sum(chunk.num_bytes for chunk in self._chunks) != (0 if self._closed else self.capacity_bytes):
            raise AssertionError(f"chunks do not add up: {[chunk.num_bytes for chunk in self._chunks]}")

    # -- life ------------------------------------------------------------------------------------------------

    def wait_until_ready(self, timeout: float | None = None) -> bool:
        """Wait until every chunk is touched (and page-locked).

        Returns:
            False on a timeout.

        Raises:
            HostMemoryError: the system refused one.
            PoolClosed: after `close()`.
        """
        self._check_open("wait_until_ready")
        return self._preparation.wait_until_finished(timeout)

    def close(self) -> None:
        """Stop touching, unlock what was page-locked, let the memory go. Twice does nothing.

        Copies must have landed before: the pool does not know of them.

        Raises:
            HostMemoryError: a chunk could not be unlocked; all others were.
        """
        if self._closed:
            return
        self._closed = True
        self._chunks = []
        self._tensors = []
        self._finish()

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise PoolClosed(f"{op}: the slab pool is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
