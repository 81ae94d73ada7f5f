"""Preparing chunks in the background: in order, waited for only where it matters, errors with the waiter."""

import threading

import pytest

from slab_pool import HostMemoryError
from slab_pool.memory import HostChunk
from slab_pool.preparation import ChunkPreparation
from slab_pool.testing import RecordingRegistrar


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
