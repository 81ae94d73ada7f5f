"""The double lands copies only when told to: what other packages' tests rely on."""

import errno
import os

import pytest
import torch

from slab_pool import CALLING_THREAD, CopyBatch, CopyFailed, Direction, WouldBlock, record_copies
from slab_pool.testing import POISON, FullDisk, ManualCopyStream, RecordingRegistrar, RefusingAllocator
from slab_pool_strategies import SLAB, small_pool


def make_batch(pool, arena, handles, pages, direction=Direction.HOST_TO_DEVICE):
    parts = []
    for page, handle in zip(pages, handles, strict=True):
        runs = pool.plan_runs([page], [handle], record_bytes=SLAB)
        parts.append((f"page {page}", record_copies(pool, arena, runs, 0, SLAB)))
    return CopyBatch.of(direction, parts)


@pytest.fixture
def bench():
    with small_pool(8) as pool:
        handles = pool.acquire(8)
        for index, handle in enumerate(handles):
            pool.tensor(handle).fill_(index + 1)
        yield pool, handles, torch.zeros(8, SLAB, dtype=torch.uint8)


def test_a_part_lands_when_told_to_and_is_poisoned_before(bench):
    pool, handles, arena = bench
    stream = ManualCopyStream()
    ticket = stream.submit(make_batch(pool, arena, handles[:2], [4, 5]), after=CALLING_THREAD)
    assert stream.num_pending_parts == 2
    assert arena[4:6].unique().tolist() == [POISON]
    assert int(arena[:4].sum()) == 0
    assert not ticket.part(0).ready()
    assert stream.land() == 1
    assert arena[4].unique().tolist() == [1]
    assert arena[5].unique().tolist() == [POISON]
    assert (ticket.part(0).ready(), ticket.part(1).ready()) == (True, False)
    assert stream.poll() == ()
    assert stream.land(5) == 1
    assert stream.poll() == (ticket,)
    assert stream.land() == 0
    assert stream.num_pending_parts == 0


def test_poison_waits_until_the_batch_is_at_the_front(bench):
    """The second batch overwrites what the first is still to read: legal, and the first must see it whole."""
    pool, handles, arena = bench
    arena[0].fill_(77)
    stream = ManualCopyStream()
    stream.submit(make_batch(pool, arena, handles[:1], [0], Direction.DEVICE_TO_HOST), after=CALLING_THREAD)
    stream.submit(make_batch(pool, arena, handles[1:2], [0]), after=CALLING_THREAD)
    assert arena[0].unique().tolist() == [77]
    assert pool.tensor(handles[0]).unique().tolist() == [POISON]
    stream.land()
    assert pool.tensor(handles[0]).unique().tolist() == [77]
    assert arena[0].unique().tolist() == [POISON]
    stream.land()
    assert arena[0].unique().tolist() == [2]


def test_poison_can_be_left_out(bench):
    pool, handles, arena = bench
    stream = ManualCopyStream(poison=False)
    stream.submit(make_batch(pool, arena, handles[:1], [0]), after=CALLING_THREAD)
    assert int(arena.sum()) == 0


@pytest.mark.parametrize("failing", range(4))
def test_the_kth_copy_fails_when_told_to(bench, failing):
    pool, handles, arena = bench
    stream = ManualCopyStream()
    first = stream.submit(make_batch(pool, arena, handles[:2], [0, 1]), after=CALLING_THREAD)
    second = stream.submit(make_batch(pool, arena, handles[2:4], [2, 3]), after=CALLING_THREAD)
    stream.fail_copy(failing)
    assert stream.land_all() == {0: 2, 1: 3, 2: 2, 3: 3}[failing]
    bad, good = (first, second) if failing < 2 else (second, first)
    assert good.error is None
    assert good.done()
    with pytest.raises(CopyFailed, match=f"copy {failing} was told to fail"):
        bad.result()
    assert [bad.part(index).ready() for index in range(2)] == [failing % 2 == 1, False]


def test_fail_copy_counts_from_now(bench):
    pool, handles, arena = bench
    stream = ManualCopyStream()
    ticket = stream.submit(make_batch(pool, arena, handles[:4], [0, 1, 2, 3]), after=CALLING_THREAD)
    stream.land(2)
    stream.fail_copy(1)
    assert stream.land_all() == 1
    assert [ticket.part(index).ready() for index in range(4)] == [True, True, True, False]


def test_whatever_would_wait_forever_says_so(bench):
    pool, handles, arena = bench
    stream = ManualCopyStream(max_in_flight_bytes=SLAB)
    ticket = stream.submit(make_batch(pool, arena, handles[:1], [0]), after=CALLING_THREAD)
    for wait in (
        ticket.result,
        ticket.part(0).wait,
        lambda: ticket.wait_on(CALLING_THREAD),
        stream.drain,
        stream.close,
        lambda: stream.submit(make_batch(pool, arena, handles[1:2], [1]), after=CALLING_THREAD),
    ):
        with pytest.raises(WouldBlock):
            wait()
    assert stream.num_pending_parts == 1
    with pytest.raises(TypeError, match="CALLING_THREAD"):
        ticket.wait_on(3)
    stream.land()
    ticket.wait_on(CALLING_THREAD)
    stream.close()


def test_on_wait_land_lands_just_what_is_waited_for(bench):
    pool, handles, arena = bench
    stream = ManualCopyStream(on_wait="land")
    ticket = stream.submit(make_batch(pool, arena, handles[:3], [0, 1, 2]), after=CALLING_THREAD)
    ticket.part(1).wait_on(stream.compute_stream())
    assert [ticket.part(index).ready() for index in range(3)] == [True, True, False]
    stream.close()
    assert ticket.done()


def test_a_batch_waits_for_the_tickets_it_names(bench):
    pool, handles, arena = bench
    writer, reader = ManualCopyStream(), ManualCopyStream()
    arena[0].fill_(50)
    written = writer.submit(make_batch(pool, arena, handles[:1], [0], Direction.DEVICE_TO_HOST), after=CALLING_THREAD)
    restored = reader.submit(make_batch(pool, arena, handles[:1], [1]), after=written)
    assert int(arena[1].sum()) == 0  # not poisoned yet either
    with pytest.raises(WouldBlock, match="tickets of other streams"):
        reader.land()
    writer.land()
    reader.land()
    assert restored.done()
    assert arena[1].unique().tolist() == [50]


def test_a_refusing_allocator_counts_what_is_out():
    allocate = RefusingAllocator(8192)
    allocate(8192)
    with pytest.raises(MemoryError, match="4096 bytes refused"):
        allocate(4096)


def test_the_recording_registrar_refuses_misuse():
    registrar = RecordingRegistrar()
    registrar.register(4096, 1)
    with pytest.raises(AssertionError, match="registered twice"):
        registrar.register(4096, 1)
    registrar.unregister(4096)
    with pytest.raises(AssertionError, match="not registered"):
        registrar.unregister(4096)


def test_a_full_disk_writes_what_still_fits(tmp_path):
    disk = FullDisk(5)
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
    try:
        assert disk(descriptor, memoryview(b"abc")) == 3
        assert disk(descriptor, memoryview(b"abc")) == 2
        with pytest.raises(OSError, match="No space") as caught:
            disk(descriptor, memoryview(b"c"))
        assert caught.value.errno == errno.ENOSPC
    finally:
        os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"abcab"
