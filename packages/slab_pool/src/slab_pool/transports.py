"""How the CUDA stream enqueues one strided copy, and how it finds out which way is asynchronous on this machine.

Contiguous copies between page-locked Host memory and the device are asynchronous in every torch. Strided ones
are not, unless torch turns them into one 2-D copy of the copy engine: otherwise `copy_` packs the rows into a
pageable temporary on the Host and waits. So every way is tried once at start, on a stream that is kept busy.
The first that returned early, left no temporary and moved the right bytes is taken.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from slab_pool.batches import Copy, Direction
from slab_pool.memory import MIB, PAGE_BYTES, CudaRegistrar, HostChunk, Registrar

EnqueueCopy = Callable[[Copy, Direction], None]

_MEMCPY_HOST_TO_DEVICE = 1
_MEMCPY_DEVICE_TO_HOST = 2


@dataclass(frozen=True, slots=True)
class Transport:
    """A way to enqueue copies with `rows > 1` on the current stream."""

    name: str
    enqueue: EnqueueCopy


@dataclass(frozen=True, slots=True)
class Trial:
    """What the self-check saw of one transport.

    Attributes:
        reason: why it was not taken, or None where it was.
    """

    name: str
    reason: str | None


def enqueue_with_torch(copy: Copy, direction: Direction) -> None:
    """torch's own `copy_(non_blocking=True)` on the two views."""
    destination, source = copy.views(direction)
    destination.copy_(source, non_blocking=True)


def enqueue_row_by_row(copy: Copy, direction: Direction) -> None:
    """One contiguous asynchronous copy a row: always possible, slow for short rows."""
    destination, source = copy.views(direction)
    if copy.rows == 1:
        destination.copy_(source, non_blocking=True)
        return
    for row in range(copy.rows):
        destination[row].copy_(source[row], non_blocking=True)


def runtime_transport(memcpy_2d_async: Any, current_stream: Callable[[], int]) -> Transport:
    """The CUDA runtime's 2-D copy, called directly.

    `memcpy_2d_async` has the C signature of `cudaMemcpy2DAsync`: destination, its pitch, source, its pitch,
    width, height, kind, stream. `current_stream` gives the raw handle of torch's current stream.
    """

    def enqueue(copy: Copy, direction: Direction) -> None:
        device = copy.device.data_ptr() + copy.device_offset
        host = copy.host.data_ptr() + copy.host_offset
        if direction is Direction.HOST_TO_DEVICE:
            sides = (device, copy.device_pitch, host, copy.host_pitch)
            kind = _MEMCPY_HOST_TO_DEVICE
        else:
            sides = (host, copy.host_pitch, device, copy.device_pitch)
            kind = _MEMCPY_DEVICE_TO_HOST
        code = memcpy_2d_async(*sides, copy.width, copy.rows, kind, current_stream())
        if code != 0:
            raise RuntimeError(
                f"cudaMemcpy2DAsync of {copy.rows} rows of {copy.width} bytes, pitches {copy.device_pitch} and"
                f" {copy.host_pitch}, returned CUDA error {code}"
            )

    return Transport("cudaMemcpy2DAsync", enqueue)


def loaded_cuda_libraries() -> Iterator[Any]:
    """Libraries through which the CUDA runtime that torch uses can be reached.

    First torch's own, whose dependencies the system's linker searches as well, then the process. No other is looked
    for: a second runtime would know nothing of torch's streams.
    """
    own = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    if own.exists():
        yield ctypes.CDLL(str(own))
    with contextlib.suppress(TypeError):  # Windows has no handle of the process
        yield ctypes.CDLL(None)


def find_memcpy_2d_async(libraries: Iterable[Any] | None = None) -> Any | None:
    """`cudaMemcpy2DAsync` out of the first of `libraries` that has it (default: `loaded_cuda_libraries()`), or None."""
    for library in loaded_cuda_libraries() if libraries is None else libraries:
        function = getattr(library, "cudaMemcpy2DAsync", None)
        if function is not None:
            break
    else:
        return None
    function.restype = ctypes.c_int
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    return function


def temporaries_made(work: Callable[[], None]) -> tuple[str, ...]:
    """Names of the tensor-making operators that torch ran inside `work`, in the calling thread."""
    with profile(use_device=None) as recorded:
        work()
    makers = ("aten::empty", "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::zeros")
    return tuple(event.name for event in recorded.function_events if event.name.startswith(makers))


def choose_transport(
    candidates: Sequence[Transport],
    *,
    device: torch.device,
    stream: Any,
    cuda: Any = torch.cuda,
    registrar: Registrar | None = None,
) -> tuple[Transport, tuple[Trial, ...]]:
    """The first candidate that copies strided rows asynchronously in both directions, and what was seen.

    Row by row is the last resort and is not tried: it consists of contiguous copies only.
    """
    fallback = Transport("row_by_row", enqueue_row_by_row)
    trials = []
    bench = _TrialBench(device=device, stream=stream, cuda=cuda, registrar=registrar)
    try:
        for candidate in candidates:
            try:
                reason = bench.objection(candidate)
            except Exception as error:  # for any reason: this way is not available
                reason = f"raised {error!r}"
            trials.append(Trial(candidate.name, reason))
            if reason is None:
                return candidate, tuple(trials)
    finally:
        bench.close()
    trials.append(Trial(fallback.name, None))
    return fallback, tuple(trials)


class _TrialBench:
    """Page-locked memory, an arena and a busy stream to try transports on."""

    _ROWS = 16
    _WIDTH = MIB // 4
    _HOST_PITCH = _WIDTH + PAGE_BYTES
    _DEVICE_PITCH = _WIDTH + 2 * PAGE_BYTES
    _BUSY_CYCLES = 200_000_000  # about a tenth of a second: far longer than any honest enqueue takes

    def __init__(self, *, device: torch.device, stream: Any, cuda: Any, registrar: Registrar | None) -> None:
        self._cuda = cuda
        self._stream = stream
        self._chunk = HostChunk(self._ROWS * self._HOST_PITCH)
        self._arena = torch.empty(self._ROWS * self._DEVICE_PITCH, dtype=torch.uint8, device=device)
        self._pattern = (torch.arange(self._WIDTH * self._ROWS, dtype=torch.int64) * 167 % 251).to(torch.uint8)
        self._pattern = self._pattern.view(self._ROWS, self._WIDTH)
        self._copy = Copy(
            self._arena, 0, self._DEVICE_PITCH, self._chunk.tensor, 0, self._HOST_PITCH, self._WIDTH, self._ROWS
        )
        # Last, so that it need not be undone where the device refuses the arena.
        self._chunk.register(CudaRegistrar(cuda.cudart()) if registrar is None else registrar)

    def objection(self, transport: Transport) -> str | None:
        for direction in Direction:
            destination, source = self._copy.views(direction)
            source.copy_(self._pattern)
            destination.zero_()
            self._cuda.synchronize()
            asleep = self._cuda.Event()

            def enqueue(direction: Direction = direction) -> None:
                transport.enqueue(self._copy, direction)

            with self._cuda.stream(self._stream):
                # The recorded call comes first: it may load modules, and starting the recorder takes long.
                temporaries = temporaries_made(enqueue)
                self._stream.synchronize()
                self._cuda._sleep(self._BUSY_CYCLES)
                asleep.record(self._stream)
                enqueue()
                early = not asleep.query()
            self._stream.synchronize()
            if temporaries:
                return f"{direction.value}: made temporaries {sorted(set(temporaries))}"
            if not early:
                return f"{direction.value}: the call waited for the stream"
            if not torch.equal(destination.cpu(), self._pattern):
                return f"{direction.value}: wrong bytes"
        return None

    def close(self) -> None:
        self._stream.synchronize()
        self._chunk.unregister()
