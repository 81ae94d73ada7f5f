"""The CUDA copy stream: its order and its events over a fake device, and everything again where there is a GPU."""

import gc
import weakref

import pytest
import torch

from slab_pool import (
    CALLING_THREAD,
    CopyBatch,
    CopyFailed,
    CpuCopyStream,
    CudaCopyStream,
    Direction,
    SlabPool,
    Transport,
    record_copies,
)
from slab_pool.testing import RecordingRegistrar
from slab_pool_fake_cuda import DeviceLost, FakeCuda
from slab_pool_strategies import SLAB, small_pool

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def gpu_test(function):
    for mark in gpu:
        function = mark(function)
    return function


class Bench:
    def __init__(self, **options):
        self.cuda = FakeCuda()
        self.stream = self.new_stream(**options)
        self.pool = small_pool(8)
        self.handles = self.pool.acquire(8)
        self.arena = torch.zeros(8, SLAB, dtype=torch.uint8)
        for index, handle in enumerate(self.handles):
            self.pool.tensor(handle).fill_(index + 1)

    def new_stream(self, enqueue=None, **options):
        enqueue = enqueue or self.cuda.enqueue
        return CudaCopyStream(
            "cpu", transport=Transport("fake", enqueue), contiguous=enqueue, cuda=self.cuda, **options
        )

    def batch(self, pages, direction=Direction.HOST_TO_DEVICE):
        parts = []
        for page in pages:
            runs = self.pool.plan_runs([page], [self.handles[page]], record_bytes=SLAB)
            parts.append((f"page {page}", record_copies(self.pool, self.arena, runs, 0, SLAB)))
        return CopyBatch.of(direction, parts)

    def submit(self, *pages, direction=Direction.HOST_TO_DEVICE):
        return self.stream.submit(self.batch(pages, direction), after=self.cuda.compute)


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.cuda.lost = False
    made.stream.close()
    made.pool.close()


def test_parts_become_ready_as_the_device_gets_to_them(bench):
    ticket = bench.submit(2, 3)
    assert not ticket.part(0).ready()
    assert int(bench.arena.sum()) == 0
    while not ticket.part(0).ready():
        assert bench.cuda.step()
    assert bench.arena[2].unique().tolist() == [3]
    assert not ticket.part(1).ready()
    assert not ticket.done()
    assert bench.stream.poll() == ()
    while not ticket.done():
        assert bench.cuda.step()
    assert bench.stream.poll() == (ticket,)


def test_copies_wait_for_what_the_compute_stream_had_queued(bench):
    """A kernel still writes the page when the batch is submitted: the copy must see what it wrote."""
    bench.cuda.compute_soon(lambda: None)
    bench.cuda.compute_soon(lambda: bench.arena[1].fill_(88))
    ticket = bench.submit(1, direction=Direction.DEVICE_TO_HOST)
    ticket.wait_on(bench.cuda.compute)
    bench.cuda.compute_soon(lambda: bench.arena[1].fill_(99))  # behind the copy, so it is not seen
    bench.cuda.synchronize()
    assert bench.pool.tensor(bench.handles[1]).unique().tolist() == [88]
    assert bench.arena[1].unique().tolist() == [99]


def test_copies_do_not_wait_for_what_came_later_or_elsewhere(bench):
    event = bench.cuda.Event()
    event.record(bench.cuda.compute)
    blocked = bench.cuda.Event()
    blocked.recorded_on = bench.cuda.compute  # never passes
    bench.cuda.compute.wait_event(blocked)
    ticket = bench.stream.submit(bench.batch([1]), after=event)
    ticket.result()
    assert bench.arena[1].unique().tolist() == [2]
    bench.cuda.compute.queue.clear()


def test_the_compute_stream_waits_on_the_device_and_the_caller_does_not(bench):
    seen = []
    ticket = bench.submit(4, 5)
    ticket.part(0).wait_on(bench.stream.compute_stream())
    bench.cuda.compute_soon(lambda: seen.append((int(bench.arena[4, 0]), int(bench.arena[5, 0]))))
    ticket.wait_on(bench.stream.compute_stream())
    bench.cuda.compute_soon(lambda: seen.append((int(bench.arena[4, 0]), int(bench.arena[5, 0]))))
    assert seen == []
    bench.cuda.synchronize()
    assert seen[0][0] == 5
    assert seen[1] == (5, 6)


def test_a_ticket_of_another_stream_orders_on_the_device(bench):
    other = bench.new_stream()
    bench.arena[0].fill_(60)
    written = other.submit(bench.batch([0], Direction.DEVICE_TO_HOST), after=bench.cuda.compute)
    restored = bench.stream.submit(bench.batch([0]), after=written)
    assert not written.done()
    restored.result()
    assert written.done()
    assert bench.arena[0].unique().tolist() == [60]
    other.close()


def test_a_ticket_that_no_device_event_stands_for_is_waited_for(bench):
    with CpuCopyStream() as cpu:
        before = cpu.submit(CopyBatch.of(Direction.HOST_TO_DEVICE, [("none", [])]), after=CALLING_THREAD)
        bench.stream.submit(bench.batch([1]), after=before).result()
        assert before.done()


def test_enqueuing_that_fails_is_the_ticket_s_and_waits_for_what_was_enqueued(bench):
    def refuse_third(copy, direction, count=[0]):  # noqa: B006
        count[0] += 1
        if count[0] == 3:
            raise RuntimeError("invalid pitch")
        bench.cuda.enqueue(copy, direction)

    stream = bench.new_stream(refuse_third)
    ticket = stream.submit(bench.batch([1, 2, 3, 4]), after=bench.cuda.compute)
    assert "invalid pitch" in str(ticket.error)
    assert not ticket.done()  # two copies are still under way
    assert stream.poll() == ()
    while not ticket.done():
        assert bench.cuda.step()
    assert [ticket.part(index).ready() for index in range(4)] == [True, True, False, False]
    assert bench.arena[1:5, 0].tolist() == [2, 3, 0, 0]
    with pytest.raises(CopyFailed, match=r"failed in part 2 \('page 3'\)") as caught:
        stream.poll()
    assert caught.value.ticket is ticket
    with pytest.raises(CopyFailed):
        ticket.part(3).wait_on(bench.cuda.compute)
    behind = stream.submit(bench.batch([5]), after=ticket)
    assert behind.result().num_bytes == SLAB
    stream.close()


def test_a_failed_ticket_is_waited_for_by_result_and_by_the_next_stream(bench):
    def refuse_second(copy, direction, count=[0]):  # noqa: B006
        count[0] += 1
        if count[0] == 2:
            raise RuntimeError("no")
        bench.cuda.enqueue(copy, direction)

    stream = bench.new_stream(refuse_second)
    ticket = stream.submit(bench.batch([1, 2]), after=bench.cuda.compute)
    other = bench.stream.submit(bench.batch([6]), after=ticket)
    other.result()
    assert ticket.done()
    with pytest.raises(CopyFailed, match="no"):
        ticket.result()
    stream.drain()
    with pytest.raises(CopyFailed):
        stream.poll()
    stream.close()


def test_a_lost_device_fails_every_ticket_and_hangs_no_thread(bench):
    first, second = bench.submit(1, 2), bench.submit(3)
    while not first.part(0).ready():
        assert bench.cuda.step()
    bench.cuda.lost = True
    assert first.done()
    assert isinstance(first.error.__cause__, DeviceLost)
    assert [first.part(index).ready() for index in range(2)] == [True, False]
    with pytest.raises(CopyFailed, match="the device is lost"):
        second.result()
    third = bench.submit(4)
    assert third.done()
    bench.stream.drain()
    raised = []
    for _ in range(3):
        with pytest.raises(CopyFailed) as caught:
            bench.stream.poll()
        raised.append(caught.value.ticket)
    assert raised == [first, second, third]
    assert bench.stream.poll() == ()
    statistics = bench.stream.statistics().host_to_device
    assert (statistics.num_batches, statistics.num_failed_batches) == (0, 3)


def test_waiting_for_a_part_on_a_lost_device_raises(bench):
    ticket = bench.submit(1, 2)
    bench.cuda.lost = True
    with pytest.raises(CopyFailed, match="the device is lost"):
        ticket.part(0).wait()


def test_a_device_lost_behind_a_failed_batch_leaves_it_done(bench):
    def refuse_second(copy, direction, count=[0]):  # noqa: B006
        count[0] += 1
        if count[0] == 2:
            raise RuntimeError("no")
        bench.cuda.enqueue(copy, direction)

    stream = bench.new_stream(refuse_second)
    ticket = stream.submit(bench.batch([1, 2]), after=bench.cuda.compute)
    assert not ticket.done()
    bench.cuda.lost = True
    assert ticket.done()
    assert "no" in str(ticket.error)


def test_seconds_run_from_the_first_copy_to_the_last_landing(bench):
    for _ in range(50):
        bench.cuda.compute_soon(lambda: None)  # the prerequisite takes its time: not counted
    ticket = bench.submit(1, 2)
    seconds = ticket.result().seconds
    assert 0 < seconds < 0.020  # the fake clock ticks milliseconds, about one an operation


@pytest.mark.parametrize("failing", [False, True])
def test_memory_is_kept_until_the_device_is_through_with_it(bench, failing):
    def enqueue(copy, direction, count=[0]):  # noqa: B006
        count[0] += 1
        if failing and count[0] == 2:
            raise RuntimeError("no")
        # Like a real device, this one does not know which tensor an address belongs to.
        bench.cuda.current_stream().queue.append(("run", lambda: None))

    stream = bench.new_stream(enqueue)
    arena = torch.zeros(2, SLAB, dtype=torch.uint8)
    gone = weakref.ref(arena.untyped_storage())
    runs = bench.pool.plan_runs([0, 1], bench.handles[:2], record_bytes=SLAB)
    parts = [(str(at), record_copies(bench.pool, arena, runs, at * 100, at * 100 + 10)) for at in range(2)]
    ticket = stream.submit(CopyBatch.of(Direction.HOST_TO_DEVICE, parts), after=bench.cuda.compute)
    del arena, parts
    assert gone() is not None
    assert not ticket.done()
    assert gone() is not None
    bench.cuda.synchronize()
    assert ticket.done()
    gc.collect()
    assert gone() is None
    stream.drain()


def test_waiting_for_one_part_leaves_later_ones_alone(bench):
    ticket = bench.submit(1, 2)
    ticket.part(0).wait()
    assert ticket.part(0).ready()
    assert not ticket.done()


def test_the_self_check_runs_where_no_transport_is_given():
    cuda = FakeCuda()
    registrar = RecordingRegistrar()
    stream = CudaCopyStream("cpu", cuda=cuda, registrar=registrar)
    # Over CPU tensors torch's own copy waits for nothing, and no other candidate is asked.
    assert stream.transport.name == "torch"
    assert [(trial.name, trial.reason) for trial in stream.trials] == [("torch", None)]
    assert not registrar.locked
    stream.close()


@gpu_test
def test_gpu_strided_copies_are_asynchronous_without_a_kernel():
    stream = CudaCopyStream("cuda")
    print([(trial.name, trial.reason) for trial in stream.trials])
    assert stream.transport.name in ("torch", "cudaMemcpy2DAsync")
    stream.close()


@gpu_test
def test_gpu_submission_does_not_wait_for_a_busy_compute_stream():
    pool = SlabPool(budget_bytes=64 << 20, slab_bytes=1 << 20, pinned=True)
    handles = pool.acquire(64)
    arena = torch.randint(0, 256, (64, (1 << 20) - 4096), dtype=torch.uint8, device="cuda")
    stream = CudaCopyStream("cuda")
    runs = pool.plan_runs(list(range(64)), handles, record_bytes=arena.shape[1])
    batch = CopyBatch.of(Direction.DEVICE_TO_HOST, [("all", record_copies(pool, arena, runs, 0, arena.shape[1]))])
    torch.cuda.synchronize()
    asleep = torch.cuda.Event()
    torch.cuda._sleep(500_000_000)
    asleep.record()
    ticket = stream.submit(batch, after=stream.compute_stream())
    assert not asleep.query()
    assert not ticket.done()
    ticket.result()
    assert asleep.query()
    for page in (0, 31, 63):
        assert torch.equal(pool.tensor(handles[page])[: arena.shape[1]], arena[page].cpu())
    stream.close()
    pool.close()


@gpu_test
def test_gpu_pinned_pools_are_seen_as_pinned_and_released():
    pool = SlabPool(budget_bytes=8 << 20, slab_bytes=1 << 20)
    assert pool.pinned
    assert pool.wait_until_ready(60)
    tensor = pool.chunk_tensor(0)
    assert tensor.is_pinned()
    pool.close()
    assert not tensor.is_pinned()
