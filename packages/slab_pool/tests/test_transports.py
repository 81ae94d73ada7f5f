"""Strided copies on CUDA: what each way moves, and that the self-check takes none that waits or packs."""

import ctypes
import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slab_pool import Copy, Direction, Transport
from slab_pool.testing import RecordingRegistrar
from slab_pool.transports import (
    choose_transport,
    enqueue_row_by_row,
    enqueue_with_torch,
    find_memcpy_2d_async,
    loaded_cuda_libraries,
    runtime_transport,
    temporaries_made,
)
from slab_pool_fake_cuda import FakeCuda


def memcpy_2d(calls, code, destination, destination_pitch, source, source_pitch, width, height, kind, stream):
    """`cudaMemcpy2DAsync` for memory of this process."""
    calls.append((width, height, kind, stream))
    for row in range(height):
        ctypes.memmove(destination + row * destination_pitch, source + row * source_pitch, width)
    return code


SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)


class FakeLibrary:
    """A library whose `cudaMemcpy2DAsync` is called through C, as the real one is."""

    def __init__(self, code=0):
        self.calls = []
        self.cudaMemcpy2DAsync = SIGNATURE(functools.partial(memcpy_2d, self.calls, code))


def transports():
    library = FakeLibrary()
    return {
        "torch": enqueue_with_torch,
        "row_by_row": enqueue_row_by_row,
        "runtime": runtime_transport(find_memcpy_2d_async([object(), library]), lambda: 99).enqueue,
    }


@pytest.mark.parametrize("name", transports())
@settings(deadline=None)
@given(
    width=st.integers(1, 40),
    rows=st.integers(1, 5),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    offsets=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    direction=st.sampled_from(Direction),
)
def test_every_transport_moves_its_rows_and_nothing_else(name, width, rows, gaps, offsets, direction):
    device = torch.arange(400).to(torch.uint8)
    host = 255 - device
    copy = Copy(device, offsets[0], width + gaps[0], host, offsets[1], width + gaps[1], width, rows)
    want_device, want_host = device.clone(), host.clone()
    for row in range(rows):
        on_device = slice(offsets[0] + row * (width + gaps[0]), offsets[0] + row * (width + gaps[0]) + width)
        on_host = slice(offsets[1] + row * (width + gaps[1]), offsets[1] + row * (width + gaps[1]) + width)
        if direction is Direction.HOST_TO_DEVICE:
            want_device[on_device] = host[on_host]
        else:
            want_host[on_host] = device[on_device]
    transports()[name](copy, direction)
    assert torch.equal(device, want_device)
    assert torch.equal(host, want_host)


def test_the_runtime_gets_kind_and_stream():
    library = FakeLibrary()
    enqueue = runtime_transport(find_memcpy_2d_async([object(), library]), lambda: 4711).enqueue
    copy = Copy(torch.zeros(40, dtype=torch.uint8), 0, 10, torch.zeros(40, dtype=torch.uint8), 0, 20, 7, 2)
    enqueue(copy, Direction.HOST_TO_DEVICE)
    enqueue(copy, Direction.DEVICE_TO_HOST)
    assert library.calls == [(7, 2, 1, 4711), (7, 2, 2, 4711)]  # cudaMemcpyHostToDevice is 1, the other way 2


def test_an_error_of_the_runtime_is_raised_with_its_arguments():
    enqueue = runtime_transport(find_memcpy_2d_async([FakeLibrary(code=12)]), lambda: 0).enqueue
    copy = Copy(torch.zeros(40, dtype=torch.uint8), 0, 10, torch.zeros(40, dtype=torch.uint8), 0, 20, 7, 2)
    with pytest.raises(RuntimeError, match="2 rows of 7 bytes, pitches 10 and 20, returned CUDA error 12"):
        enqueue(copy, Direction.HOST_TO_DEVICE)


def test_a_process_without_a_cuda_runtime_has_no_such_function():
    assert find_memcpy_2d_async([object()]) is None
    if not torch.cuda.is_available():
        assert find_memcpy_2d_async() is None


def test_a_library_answers_for_its_dependencies():
    """What reaching the CUDA runtime through torch's own library relies on."""
    libraries = Path(torch.__file__).parent / "lib"
    core = libraries / "libc10.so"
    if not core.exists():
        pytest.skip("torch is built differently here")
    assert ctypes.CDLL(str(core)).memmove  # the C library's, not its own
    assert any(True for _ in loaded_cuda_libraries())


def test_temporaries_are_seen_where_torch_makes_them():
    strided = torch.zeros(64, 64, dtype=torch.uint8)[:, :32]
    assert "aten::contiguous" in temporaries_made(lambda: strided.contiguous())
    target = torch.zeros(64, 32, dtype=torch.uint8)
    assert temporaries_made(lambda: target.copy_(strided)) == ()


class Trials:
    """Candidates of every kind over the fake device."""

    def __init__(self):
        self.cuda = FakeCuda()
        self.stream = self.cuda.Stream()
        self.registrar = RecordingRegistrar()

    def honest(self, copy, direction):
        self.cuda.enqueue(copy, direction)

    def waiting(self, copy, direction):
        self.cuda.enqueue(copy, direction)
        self.cuda.current_stream().synchronize()

    def waiting_one_way(self, copy, direction):
        self.cuda.enqueue(copy, direction)
        if direction is Direction.DEVICE_TO_HOST:
            self.cuda.current_stream().synchronize()

    def packing(self, copy, direction):
        torch.empty(copy.num_bytes, dtype=torch.uint8)
        self.cuda.enqueue(copy, direction)

    def wrong(self, copy, direction):
        self.cuda.enqueue(copy._replace(rows=copy.rows - 1), direction)

    def idle(self, copy, direction):
        pass

    def broken(self, copy, direction):
        raise RuntimeError("invalid pitch")

    def choose(self, *names):
        return choose_transport(
            [Transport(name, getattr(self, name)) for name in names],
            device=torch.device("cpu"),
            stream=self.stream,
            cuda=self.cuda,
            registrar=self.registrar,
        )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("waiting", "host_to_device: the call waited for the stream"),
        ("waiting_one_way", "device_to_host: the call waited for the stream"),
        ("packing", "host_to_device: made temporaries ['aten::empty']"),
        ("wrong", "host_to_device: wrong bytes"),
        ("idle", "host_to_device: wrong bytes"),
        ("broken", "raised RuntimeError('invalid pitch')"),
    ],
)
def test_a_transport_with_a_fault_is_passed_over(name, reason):
    trials = Trials()
    chosen, seen = trials.choose(name, "honest")
    assert chosen.name == "honest"
    assert [(trial.name, trial.reason) for trial in seen] == [(name, reason), ("honest", None)]
    assert len(trials.registrar.registered) == 1
    assert not trials.registrar.locked


def test_the_first_honest_one_is_taken():
    trials = Trials()
    chosen, seen = trials.choose("honest", "broken")
    assert chosen.name == "honest"
    assert len(seen) == 1


def test_row_by_row_is_the_last_resort():
    trials = Trials()
    chosen, seen = trials.choose("broken")
    assert chosen.name == "row_by_row"
    assert chosen.enqueue is enqueue_row_by_row
    assert seen[-1].reason is None
    assert not trials.registrar.locked


def test_a_device_without_room_for_the_trial_leaves_no_memory_locked(monkeypatch):
    trials = Trials()
    allocate = torch.empty

    def full(*size, device=None, **options):
        if device is not None:
            raise torch.OutOfMemoryError("no room on the device")
        return allocate(*size, **options)

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(torch.OutOfMemoryError):
        trials.choose("honest")
    assert not trials.registrar.locked
