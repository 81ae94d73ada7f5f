"""Chunks: exact sizes, contents kept while touching, page-locked once; what the system refuses is *Host* memory.

Prepared in the background: in order, waited for only where it matters, errors with the waiter.
"""

import ctypes
import errno
import resource
import subprocess
import sys
import threading

import pytest
import torch

from slab_pool import HostMemoryError
from slab_pool import memory as memory_module
from slab_pool.memory import ChunkPreparation, CudaRegistrar, HostChunk, host_memory_limit
from slab_pool.testing import RecordingRegistrar


def test_memory_and_tensor_are_the_same_bytes():
    chunk = HostChunk(8192)
    assert len(chunk.memory) == chunk.tensor.numel() == 8192
    chunk.memory[5000] = 77
    assert chunk.tensor[5000] == 77
    chunk.tensor[0] = 9
    assert chunk.memory[0] == 9


def test_addresses_are_page_aligned():
    assert HostChunk(4096).tensor.data_ptr() % 4096 == 0


@pytest.mark.parametrize("num_bytes", [0, 100, 4097, -4096])
def test_sizes_that_are_no_pages_are_refused(num_bytes):
    with pytest.raises(ValueError, match=f"multiple of 4096, got {num_bytes}"):
        HostChunk(num_bytes)


def test_populate_keeps_what_was_written():
    chunk = HostChunk(1 << 20)
    chunk.tensor[::4096] = 123
    populated = chunk.populate(0, 1 << 20)
    assert isinstance(populated, bool)
    assert bool((chunk.tensor[::4096] == 123).all())


def resident_kib() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() // 1024


def test_populate_brings_the_range_in_and_no_more():
    chunk = HostChunk(64 << 20)
    before = resident_kib()
    if not chunk.populate(0, 32 << 20):
        pytest.skip("this kernel cannot populate without writing")
    grown = resident_kib() - before
    assert 30 << 10 <= grown <= 36 << 10


class RefusingLibc:
    def __init__(self, code):
        self.code = code

    def madvise(self, address, length, advice):
        ctypes.set_errno(self.code)
        return -1


def test_populate_reports_missing_memory_as_host_memory(monkeypatch):
    chunk = HostChunk(1 << 20)
    monkeypatch.setattr(memory_module, "_libc", lambda: RefusingLibc(errno.ENOMEM))
    with pytest.raises(HostMemoryError, match=r"Host memory: .* 1\.0 MiB of a chunk") as caught:
        chunk.populate(0, 1 << 20)
    assert caught.value.num_bytes == 1 << 20


def test_populate_goes_without_on_an_old_kernel(monkeypatch):
    chunk = HostChunk(4096)
    monkeypatch.setattr(memory_module, "_libc", lambda: RefusingLibc(errno.EINVAL))
    assert chunk.populate(0, 4096) is False
    monkeypatch.setattr(memory_module, "_libc", lambda: None)
    assert chunk.populate(0, 4096) is False


def test_register_is_exact_and_happens_once():
    registrar = RecordingRegistrar()
    chunk = HostChunk(12288)
    chunk.register(registrar)
    assert registrar.locked == {chunk.tensor.data_ptr(): 12288}
    with pytest.raises(RuntimeError, match="registered already"):
        chunk.register(registrar)
    chunk.unregister()
    assert not registrar.locked
    assert not chunk.registered
    chunk.unregister()  # nothing left to undo


class FakeRuntime:
    def __init__(self, code=0):
        self.code = code
        self.calls = []

    def cudaHostRegister(self, *arguments):
        self.calls.append(("register", *arguments))
        return self.code

    def cudaHostUnregister(self, *arguments):
        self.calls.append(("unregister", *arguments))
        return self.code


def test_the_cuda_registrar_asks_for_exactly_the_chunk():
    runtime = FakeRuntime()
    registrar = CudaRegistrar(runtime)
    registrar.register(4096, 8192)
    registrar.unregister(4096)
    assert runtime.calls == [("register", 4096, 8192, 1), ("unregister", 4096)]


def test_a_refused_registration_is_pinned_host_memory():
    with pytest.raises(HostMemoryError, match=r"pinned Host memory: cudaHostRegister of 2\.0 MiB .* error 2") as caught:
        CudaRegistrar(FakeRuntime(code=2)).register(4096, 2 << 20)
    assert caught.value.num_bytes == 2 << 20
    assert isinstance(caught.value, MemoryError)


def test_an_address_space_limit_is_reported_as_host_memory():
    program = """
import resource, torch
from slab_pool import HostMemoryError
from slab_pool.memory import HostChunk
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    HostChunk(512 << 20)
except HostMemoryError as error:
    print(error, error.num_bytes)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Host memory: the system refused a chunk of 512.0 MiB")
    assert done.stdout.strip().endswith(str(512 << 20))


def test_the_limit_of_this_process_is_known_here():
    limit = host_memory_limit()
    assert limit is not None
    assert limit > 64 << 20


def test_a_view_outlives_the_chunk():
    chunk = HostChunk(4096)
    view = chunk.tensor[:16]
    view.fill_(3)
    del chunk
    assert torch.equal(view, torch.full((16,), 3, dtype=torch.uint8))


class GatedRegistrar(RecordingRegistrar):
    """Registers one chunk per opened gate."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Semaphore(0)

    def register(self, address, num_bytes):
        self.gate.acquire()
        super().register(address, num_bytes)


class GatedChunk(HostChunk):
    """Touches only when told to, and may refuse."""

    def __init__(self, num_bytes, gate, refuse=None):
        super().__init__(num_bytes)
        self.gate = gate
        self.refuse = refuse
        self.touched = []

    def populate(self, begin, end):
        self.gate.acquire()
        if self.refuse is not None:
            raise self.refuse
        self.touched.append((begin, end))
        return True


def test_a_page_locked_chunk_is_waited_for_and_no_further_one():
    registrar = GatedRegistrar()
    preparation = ChunkPreparation([HostChunk(4096), HostChunk(8192)], registrar)
    got = threading.Event()
    waiter = threading.Thread(target=lambda: (preparation.wait_for_chunk(0), got.set()))
    waiter.start()
    assert not got.is_set()
    registrar.gate.release()
    assert got.wait(60)
    waiter.join()
    assert registrar.registered == [4096]
    assert preparation.num_ready == 1
    registrar.gate.release()
    assert preparation.wait_until_finished(60)
    assert registrar.registered == [4096, 8192]
    preparation.close()


def test_a_chunk_that_is_only_touched_is_not_waited_for():
    gate = threading.Semaphore(0)
    preparation = ChunkPreparation([GatedChunk(4096, gate)], None)
    preparation.wait_for_chunk(0)  # would hang if it waited
    assert preparation.wait_until_finished(0.0) is False
    gate.release()
    assert preparation.wait_until_finished(60)
    preparation.close()


def test_touching_covers_the_chunk_in_steps():
    gate = threading.Semaphore(100)
    chunk = GatedChunk((9 << 20) + 4096, gate)
    preparation = ChunkPreparation([chunk], None)
    assert preparation.wait_until_finished(60)
    assert chunk.touched == [(0, 4 << 20), (4 << 20, 8 << 20), (8 << 20, (9 << 20) + 4096)]
    preparation.close()


def test_an_error_is_raised_by_every_later_wait_and_not_in_the_thread():
    gate = threading.Semaphore(1)
    refusal = HostMemoryError("Host memory: no", num_bytes=4096)
    preparation = ChunkPreparation([GatedChunk(4096, gate, refusal)], None)
    with pytest.raises(HostMemoryError, match="Host memory: no") as caught:
        preparation.wait_until_finished(60)
    assert caught.value.num_bytes == 4096
    with pytest.raises(HostMemoryError):
        preparation.wait_for_chunk(0)
    preparation.close()


def test_any_other_error_is_reported_as_host_memory_too():
    gate = threading.Semaphore(1)
    preparation = ChunkPreparation([GatedChunk(4096, gate, OSError("strange"))], None)
    with pytest.raises(HostMemoryError, match=r"Host memory: preparing .*strange"):
        preparation.wait_until_finished(60)
    preparation.close()


def test_close_stops_between_steps_and_undoes_what_was_locked():
    registrar = RecordingRegistrar()
    gate = threading.Semaphore(1)
    chunks = [HostChunk(4096), GatedChunk(16 << 20, gate)]
    preparation = ChunkPreparation(chunks, registrar)
    preparation.wait_for_chunk(0)
    assert registrar.locked
    closer = threading.Thread(target=preparation.close)
    closer.start()
    preparation._stopped.wait(60)
    gate.release()  # the step under way ends; no other begins
    closer.join(60)
    assert not closer.is_alive()
    assert len(chunks[1].touched) <= 2
    assert not registrar.locked
    with pytest.raises(RuntimeError, match="stopped preparing"):
        preparation.wait_for_chunk(1)


def test_close_unlocks_the_rest_where_one_refuses():
    class Stubborn(RecordingRegistrar):
        def unregister(self, address):
            super().unregister(address)
            if len(self.locked) == 1:
                raise RuntimeError("the first refuses")

    registrar = Stubborn()
    preparation = ChunkPreparation([HostChunk(4096), HostChunk(4096)], registrar)
    assert preparation.wait_until_finished(60)
    with pytest.raises(RuntimeError, match="the first refuses"):
        preparation.close()
    assert not registrar.locked
