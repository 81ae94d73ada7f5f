"""The CPU's copy stream: really in the background, really in order, and its waits really wait."""

import gc
import threading
import weakref

import pytest
import torch

from slab_pool import CALLING_THREAD, Copy, CopyBatch, CpuCopyStream, Direction, record_copies
from slab_pool.cpu import HostCompletion, copy_now
from slab_pool.testing import CopyFailures
from slab_pool_strategies import SLAB, small_pool


class GatedCopies:
    """A `copy=` seam that makes one copy per opened gate, and says in which order."""

    def __init__(self):
        self.gate = threading.Semaphore(0)
        self.made = []
        self.threads = set()

    def __call__(self, copies, direction):
        (copy,) = copies
        if not self.gate.acquire(timeout=60):
            raise AssertionError("the gate was not opened")
        copy_now(copies, direction)
        self.made.append(copy.device_offset // copy.device_pitch)
        self.threads.add(threading.get_ident())

    def open(self, count=1):
        self.gate.release(count)


@pytest.fixture
def gated():
    copies = GatedCopies()
    stream = CpuCopyStream(copy=copies)
    with small_pool(8) as pool:
        yield copies, stream, pool
        copies.open(1000)
        stream.close()


def page_batch(pool, arena, handles, pages, direction=Direction.HOST_TO_DEVICE):
    """One part, hence one copy, a page."""
    parts = []
    for page, handle in zip(pages, handles, strict=True):
        runs = pool.plan_runs([page], [handle], record_bytes=arena.shape[1])
        parts.append((f"page {page}", record_copies(pool, arena, runs, 0, arena.shape[1])))
    return CopyBatch.of(direction, parts)


def test_submit_returns_before_anything_is_copied(gated):
    copies, stream, pool = gated
    arena = torch.zeros(4, SLAB, dtype=torch.uint8)
    handles = pool.acquire(2)
    for handle in handles:
        pool.tensor(handle).fill_(7)
    ticket = stream.submit(page_batch(pool, arena, handles, [1, 2]), after=CALLING_THREAD)
    assert not ticket.done()
    assert not ticket.part(0).ready()
    assert stream.poll() == ()
    assert int(arena.sum()) == 0
    copies.open()
    ticket.part(0).wait_on(stream.compute_stream())
    assert int(arena[1].min()) == 7
    assert int(arena[2].sum()) == 0
    assert (ticket.part(0).ready(), ticket.part(1).ready(), ticket.done()) == (True, False, False)
    assert "1 landed of 2" in repr(ticket)
    copies.open()
    assert ticket.result().num_bytes == 2 * SLAB
    assert copies.threads.isdisjoint({threading.get_ident()})


def test_parts_and_batches_are_made_first_in_first_out(gated):
    copies, stream, pool = gated
    arena = torch.zeros(8, SLAB, dtype=torch.uint8)
    handles = pool.acquire(6)
    tickets = [
        stream.submit(page_batch(pool, arena, handles[:2], [5, 1]), after=CALLING_THREAD),
        stream.submit(page_batch(pool, arena, handles[2:5], [7, 0, 3]), after=CALLING_THREAD),
    ]
    copies.open(3)
    tickets[1].part(0).wait()
    assert tickets[0].done()
    assert not tickets[1].done()
    assert stream.poll() == (tickets[0],)
    copies.open(2)
    stream.drain()
    assert copies.made == [5, 1, 7, 0, 3]
    assert len(copies.threads) == 1
    assert stream.poll() == (tickets[1],)


def test_waiting_on_a_later_part_waits_for_it(gated):
    copies, stream, pool = gated
    arena = torch.zeros(4, SLAB, dtype=torch.uint8)
    handles = pool.acquire(3)
    pool.tensor(handles[2]).fill_(9)
    ticket = stream.submit(page_batch(pool, arena, handles, [0, 1, 2]), after=CALLING_THREAD)
    seen = []

    def compute():
        ticket.part(2).wait_on(CALLING_THREAD)
        seen.append(int(arena[2].min()))

    waiter = threading.Thread(target=compute)
    waiter.start()
    copies.open(2)
    ticket.part(1).wait()
    assert seen == []
    copies.open()
    waiter.join(60)
    assert seen == [9]


def test_copies_of_few_and_many_rows_keep_their_order_where_they_overlap():
    host = torch.arange(200).to(torch.uint8)
    device = torch.zeros(100, dtype=torch.uint8)
    copies = [
        Copy(device, 0, 12, host, 100, 12, 12, 1),
        Copy(device, 0, 10, host, 0, 10, 4, 8),  # many rows, over part of the first
        Copy(device, 20, 10, host, 150, 7, 3, 3),  # few rows, over part of the second
    ]
    want = device.clone()
    for copy in copies:
        for row in range(copy.rows):
            to, at = copy.device_offset + row * copy.device_pitch, copy.host_offset + row * copy.host_pitch
            want[to : to + copy.width] = host[at : at + copy.width]
    copy_now(copies, Direction.HOST_TO_DEVICE)
    assert torch.equal(device, want)


def test_waiters_for_different_parts_are_each_woken_in_their_turn():
    completion = HostCompletion()
    done = [threading.Event() for _ in range(4)]

    def waiter(index):
        completion.wait(index + 1) if index < 3 else completion.wait_finished()
        done[index].set()

    threads = [threading.Thread(target=waiter, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for index in range(3):
        assert not any(event.is_set() for event in done[index:])
        completion.land_part()
        assert done[index].wait(60)
    completion.finish()
    assert done[3].wait(60)
    for thread in threads:
        thread.join()


def test_a_failure_wakes_every_waiter():
    completion = HostCompletion()
    threads = [threading.Thread(target=completion.wait, args=(index,)) for index in range(1, 4)]
    for thread in threads:
        thread.start()
    completion.finish(error=OSError("gone"))
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_ticket_of_another_stream_is_waited_for(gated):
    """Write-through and restore of one slab on two streams: the restore sees what was written."""
    copies, slow, pool = gated
    source = torch.full((1, SLAB), 42, dtype=torch.uint8)
    target = torch.zeros(1, SLAB, dtype=torch.uint8)
    handles = pool.acquire(1)
    with CpuCopyStream() as fast:
        written = slow.submit(page_batch(pool, source, handles, [0], Direction.DEVICE_TO_HOST), after=CALLING_THREAD)
        restored = fast.submit(page_batch(pool, target, handles, [0]), after=written)
        assert not restored.done()
        assert fast.poll() == ()
        copies.open()
        restored.result()
        assert int(target.min()) == 42


def test_submit_waits_for_room(gated):
    copies, _, pool = gated
    arena = torch.zeros(4, SLAB, dtype=torch.uint8)
    handles = pool.acquire(3)
    stream = CpuCopyStream(copy=copies, max_in_flight_bytes=2 * SLAB)
    stream.submit(page_batch(pool, arena, handles[:2], [0, 1]), after=CALLING_THREAD)
    assert not stream.fits(1)
    submitted = threading.Event()

    def submit():
        stream.submit(page_batch(pool, arena, handles[2:], [2]), after=CALLING_THREAD)
        submitted.set()

    owner = threading.Thread(target=submit)
    owner.start()
    copies.open()
    assert not submitted.is_set()
    copies.open()
    assert submitted.wait(60)
    owner.join()
    copies.open()
    stream.close()
    assert copies.made == [0, 1, 2]


def test_an_error_in_the_thread_reaches_no_other_stack(gated, recwarn):
    _, _, pool = gated

    def broken(copies, direction):
        raise SystemError("no such memory")

    stream = CpuCopyStream(copy=broken)
    arena = torch.zeros(1, SLAB, dtype=torch.uint8)
    ticket = stream.submit(page_batch(pool, arena, pool.acquire(1), [0]), after=CALLING_THREAD)
    ticket.completion.wait_finished()
    stream.close()
    assert "no such memory" in str(ticket.error)
    assert "failed" in repr(ticket)
    assert not recwarn.list


@pytest.mark.parametrize("failing", [False, True])
def test_a_finished_batch_lets_its_arena_go(failing):
    copies = CopyFailures(*([0] if failing else []))
    with small_pool(2) as pool, CpuCopyStream(copy=copies) as stream:
        arena = torch.zeros(1, SLAB, dtype=torch.uint8)
        gone = weakref.ref(arena.untyped_storage())
        ticket = stream.submit(page_batch(pool, arena, pool.acquire(1), [0]), after=CALLING_THREAD)
        stream.drain()
        del arena
        gc.collect()
        assert gone() is None
        assert (ticket.error is not None) == failing


def test_arenas_made_under_inference_mode_are_copied_into():
    with torch.inference_mode():
        arena = torch.zeros(2, 2 * SLAB, dtype=torch.uint8)
    with small_pool(2, slabs_per_chunk=2) as pool, CpuCopyStream() as stream:
        handles = pool.acquire(2)
        for handle in handles:
            pool.tensor(handle).fill_(5)
        runs = pool.plan_runs([0, 1], handles, record_bytes=2 * SLAB)
        (copy,) = record_copies(pool, arena, runs, 0, 10)
        assert copy.rows == 2
        stream.submit(CopyBatch.of(Direction.HOST_TO_DEVICE, [("part", [copy])]), after=CALLING_THREAD).result()
        assert int(arena.sum()) == 100


def test_a_thread_that_was_refused_is_started_by_the_next_batch(monkeypatch):
    stream = CpuCopyStream()
    arena = torch.ones(2, SLAB, dtype=torch.uint8)
    with small_pool(2) as pool:
        batch = page_batch(pool, arena, pool.acquire(1), [0], Direction.DEVICE_TO_HOST)

        def refuse(thread):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                stream.submit(batch, after=CALLING_THREAD)
        ticket = stream.submit(batch, after=CALLING_THREAD)
        stream.close()
        assert stream.poll() == (ticket,)


def test_a_stream_that_copied_nothing_closes():
    stream = CpuCopyStream()
    stream.close()
    assert stream.poll() == ()


def test_wait_on_takes_nothing_but_the_calling_thread(gated):
    copies, stream, pool = gated
    arena = torch.zeros(1, SLAB, dtype=torch.uint8)
    ticket = stream.submit(page_batch(pool, arena, pool.acquire(1), [0]), after=CALLING_THREAD)
    copies.open()
    with pytest.raises(TypeError, match="wait_on: the compute stream of a CPU is CALLING_THREAD, got None"):
        ticket.wait_on(None)
    assert repr(stream.compute_stream()) == "CALLING_THREAD"


def test_copies_beside_a_busy_compute_thread_arrive_whole():
    """Several hundred batches both ways while another thread computes without pause."""
    seed = 7
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    with small_pool(64, slabs_per_chunk=16) as pool, CpuCopyStream() as down, CpuCopyStream() as up:
        handles = pool.acquire(64)
        arena = torch.randint(0, 256, (64, SLAB), dtype=torch.uint8, generator=generator)
        target = torch.zeros_like(arena)
        stop = threading.Event()
        sums = []

        def compute():
            matrix = torch.ones(64, 64)
            while not stop.is_set():
                sums.append(float((matrix @ matrix).sum()))

        worker = threading.Thread(target=compute)
        worker.start()
        try:
            for turn in range(100):
                pages = torch.randperm(64, generator=generator)[:8].tolist()
                chosen = [handles[page] for page in pages]
                written = down.submit(
                    page_batch(pool, arena, chosen, pages, Direction.DEVICE_TO_HOST), after=CALLING_THREAD
                )
                restored = up.submit(page_batch(pool, target, chosen, pages), after=written)
                if turn % 10 == 9:
                    restored.result()
                    assert torch.equal(target[pages], arena[pages])
            up.drain()
        finally:
            stop.set()
            worker.join()
        assert sums
        assert set(sums) == {64.0**3}
        written_pages = target.sum(dim=1) > 0
        assert torch.equal(target[written_pages], arena[written_pages])
