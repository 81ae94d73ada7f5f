"""The laws of every copy stream, whatever copies: the CPU's thread, a CUDA device (also a fake one), the double.

In the fake device and the double, nothing moves unless it is waited for or stepped, so a missing order shows.
"""

import dataclasses
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slab_pool import (
    CopyBatch,
    CopyFailed,
    CpuCopyStream,
    CudaCopyStream,
    Direction,
    DirectionStatistics,
    PoolClosed,
    SlabPool,
    Transport,
    record_copies,
)
from slab_pool.testing import CopyFailures, ManualCopyStream
from slab_pool_fake_cuda import FakeCuda
from slab_pool_strategies import SLAB, small_pool

PAGES = 12
RECORD = 3000
PARTS = [(0, 1000), (1000, 1700), (1700, 3000)]


def make_cpu(failures, **options):
    return CpuCopyStream(copy=failures, **options), "cpu"


def make_manual(failures, **options):
    stream = ManualCopyStream(on_wait="land", **options)
    stream.failures = failures
    return stream, "cpu"


def make_fake_cuda(failures, **options):
    cuda = FakeCuda()

    def enqueue(copy, direction):
        failures((copy,), direction)  # counts and fails at once, as a refused launch does; copies nothing
        cuda.enqueue(copy, direction)

    failures.copy_nothing()
    stream = CudaCopyStream("cpu", transport=Transport("fake", enqueue), contiguous=enqueue, cuda=cuda, **options)
    return stream, "cpu"


def make_cuda(failures, **options):
    stream = CudaCopyStream("cuda", **options)
    strided, contiguous = stream.transport.enqueue, stream._contiguous
    failures.copy_nothing()

    def counted(enqueue):
        return lambda copy, direction: (failures((copy,), direction), enqueue(copy, direction))

    stream.transport = Transport(stream.transport.name, counted(strided))
    stream._contiguous = counted(contiguous)
    return stream, "cuda"


class Failures(CopyFailures):
    def copy_nothing(self):
        self._copy = lambda copies, direction: None


KINDS = [
    pytest.param(make_cpu, id="cpu"),
    pytest.param(make_manual, id="manual"),
    pytest.param(make_fake_cuda, id="fake-cuda"),
    pytest.param(
        make_cuda,
        id="cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
every_kind = pytest.mark.parametrize("make", KINDS)


def noise(*shape, seed):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Bench:
    """A pool of 16 slabs, an arena of 12 records and a stream; `batch` copies pages to slabs or back, in parts."""

    def __init__(self, make, *failing, **options):
        self.failures = Failures(*failing)
        self.stream, device = make(self.failures, **options)
        self.pool = SlabPool(budget_bytes=16 * SLAB, slab_bytes=SLAB, max_chunk_bytes=6 * SLAB, pinned=device == "cuda")
        self.handles = self.pool.acquire(16)
        self.arena = noise(PAGES, RECORD, seed=1).to(device)
        for index, handle in enumerate(self.handles):
            self.pool.tensor(handle).copy_(noise(SLAB, seed=100 + index))

    def batch(self, direction, pages, slabs, parts=PARTS):
        runs = self.pool.plan_runs(pages, [self.handles[slab] for slab in slabs], record_bytes=RECORD)
        return CopyBatch.of(
            direction,
            [
                (f"layer {index}", record_copies(self.pool, self.arena, runs, begin, end))
                for index, (begin, end) in enumerate(parts)
            ],
        )

    def submit(self, *arguments, **options):
        return self.stream.submit(self.batch(*arguments, **options), after=self.stream.compute_stream())

    def slabs(self):
        return torch.stack([self.pool.tensor(handle) for handle in self.handles])

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.stream.close()
        self.pool.close()


@every_kind
@settings(deadline=None, max_examples=25)
@given(
    batches=st.lists(
        st.tuples(
            st.sampled_from(Direction),
            st.lists(
                st.tuples(st.integers(0, PAGES - 1), st.integers(0, 15)),
                max_size=6,
                unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
            ),
        ),
        max_size=6,
    )
)
def test_batches_leave_the_bytes_of_one_after_the_other(make, batches):
    with Bench(make) as bench:
        arena, slabs = bench.arena.cpu().clone(), bench.slabs()
        tickets = []
        for direction, pairs in batches:
            tickets.append(bench.submit(direction, [page for page, _ in pairs], [slab for _, slab in pairs]))
            for page, slab in pairs:
                if direction is Direction.HOST_TO_DEVICE:
                    arena[page] = slabs[slab, :RECORD]
                else:
                    slabs[slab, :RECORD] = arena[page]
        bench.stream.drain()
        assert torch.equal(bench.arena.cpu(), arena)
        assert torch.equal(bench.slabs(), slabs)
        assert bench.stream.poll() == tuple(tickets)
        assert bench.stream.poll() == ()
        for ticket, (_, pairs) in zip(tickets, batches, strict=True):
            assert ticket.done()
            assert ticket.result().num_bytes == len(pairs) * RECORD


@every_kind
@pytest.mark.parametrize("failing", range(9))
def test_a_copy_that_fails_at_any_place(make, failing):
    """Three batches of three parts of one copy each; copy `failing` fails."""
    with Bench(make, failing) as bench:
        before = bench.arena.cpu().clone()
        want = bench.slabs()
        tickets = [bench.submit(Direction.HOST_TO_DEVICE, [page], [page + 4]) for page in (1, 3, 5)]
        bench.stream.drain()
        bad, part = divmod(failing, 3)
        for index, ticket in enumerate(tickets):
            assert ticket.done()
            ready = [ticket.part(i).ready() for i in range(3)]
            if index != bad:
                assert ready == [True] * 3
                assert ticket.error is None
                ticket.result()
                continue
            assert ready == [i < part for i in range(3)]
            assert ticket.error.ticket is ticket
            assert "told to fail" in str(ticket.error.__cause__)
            with pytest.raises(CopyFailed, match=rf"failed in part {part} \('layer {part}'\) of 3"):
                ticket.result()
            with pytest.raises(CopyFailed):
                ticket.part(part).wait()
            with pytest.raises(CopyFailed):
                ticket.wait_on(bench.stream.compute_stream())
            if part:
                ticket.part(part - 1).wait_on(bench.stream.compute_stream())
        arena = bench.arena.cpu()
        for index, page in enumerate((1, 3, 5)):
            for number, (begin, end) in enumerate(PARTS):
                if index == bad and number == part:
                    continue  # what a failed copy left is not defined
                landed = index != bad or number < part
                expected = want[page + 4, begin:end] if landed else before[page, begin:end]
                if landed or not isinstance(bench.stream, ManualCopyStream):
                    assert torch.equal(arena[page, begin:end], expected)

        landed = []
        raised = []
        for _ in range(4):
            try:
                landed += bench.stream.poll()
            except CopyFailed as failure:
                raised.append(failure.ticket)
                assert landed == tickets[:bad]
        assert raised == [tickets[bad]]
        assert landed == tickets[:bad] + tickets[bad + 1 :]
        statistics = bench.stream.statistics().host_to_device
        assert (statistics.num_batches, statistics.num_failed_batches) == (2, 1)
        assert statistics.num_bytes == 2 * RECORD
        assert statistics.num_copies == 6


@every_kind
def test_a_part_without_copies_lands_in_its_turn(make):
    with Bench(make) as bench:
        batch = CopyBatch.of(Direction.HOST_TO_DEVICE, [("prelude", []), ("rest", [])])
        ticket = bench.stream.submit(batch, after=bench.stream.compute_stream())
        assert ticket.result().num_bytes == 0
        assert ticket.part(1).ready()


@every_kind
def test_room_is_made_by_waiting_for_the_oldest(make):
    with Bench(make, max_in_flight_bytes=2 * RECORD) as bench:
        first = bench.submit(Direction.HOST_TO_DEVICE, [0, 1], [0, 1])
        assert bench.stream.statistics().high_water_bytes == 2 * RECORD
        second = bench.submit(Direction.HOST_TO_DEVICE, [2], [2])
        assert first.done()
        third = bench.submit(Direction.HOST_TO_DEVICE, [3], [3])
        big = bench.submit(Direction.HOST_TO_DEVICE, [0, 1, 2, 3], [4, 5, 6, 7])
        assert second.done()
        assert third.done()
        bench.stream.drain()
        assert big.done()
        assert bench.stream.fits(1 << 40)
        statistics = bench.stream.statistics()
        assert statistics.high_water_bytes == 4 * RECORD
        assert (statistics.in_flight_bytes, statistics.in_flight_batches) == (0, 0)


@every_kind
def test_statistics_tell_the_directions_apart(make):
    with Bench(make) as bench:
        bench.submit(Direction.HOST_TO_DEVICE, [0, 2], [0, 1])
        bench.submit(Direction.DEVICE_TO_HOST, [5], [5])
        bench.stream.drain()
        statistics = bench.stream.statistics()
        down, up = statistics.host_to_device, statistics.device_to_host
        assert (down.num_batches, down.num_bytes, down.num_copies) == (1, 2 * RECORD, 3)
        assert (up.num_batches, up.num_bytes, up.num_copies) == (1, RECORD, 3)
        assert down.seconds_in_flight >= 0
        assert up.num_failed_batches == 0


@every_kind
def test_a_prerequisite_must_be_named_and_known(make):
    with Bench(make) as bench:
        batch = bench.batch(Direction.HOST_TO_DEVICE, [0], [0])
        with pytest.raises(TypeError, match="after"):
            bench.stream.submit(batch)
        for unknown in (None, object(), (bench.stream.compute_stream(), 3)):
            with pytest.raises(TypeError, match=r"submit: after must be .*, got"):
                bench.stream.submit(batch, after=unknown)
        with pytest.raises(ValueError, match="at least one prerequisite"):
            bench.stream.submit(batch, after=())
        assert bench.stream.statistics().in_flight_batches == 0


@every_kind
def test_a_ticket_is_a_prerequisite_also_a_failed_one(make):
    with Bench(make, 0) as bench:
        first = bench.submit(Direction.HOST_TO_DEVICE, [0], [0])
        batch = bench.batch(Direction.HOST_TO_DEVICE, [1], [1])
        second = bench.stream.submit(batch, after=(bench.stream.compute_stream(), first))
        assert second.result().num_bytes == RECORD
        assert first.done()
        assert first.error is not None


@every_kind
def test_a_closed_stream_refuses_batches_and_still_answers(make):
    with Bench(make) as bench:
        ticket = bench.submit(Direction.HOST_TO_DEVICE, [0], [0])
        bench.stream.close()
        assert ticket.done()
        bench.stream.close()
        with pytest.raises(PoolClosed, match="submit: the copy stream is closed"):
            bench.submit(Direction.HOST_TO_DEVICE, [0], [0])
        assert bench.stream.poll() == (ticket,)


@every_kind
def test_copies_beside_other_work_on_the_same_device(make):
    """A compute thread's work and copies both ways, interleaved, each over memory of its own: both come out right."""
    with Bench(make) as bench:
        slabs = bench.slabs()
        device = bench.arena.device
        matrix = torch.randint(-3, 4, (96, 96), device=device).float()
        expected = (matrix @ matrix).cpu()
        products = []
        for turn in range(20):
            pages = [(turn + i) % 8 for i in range(3)]
            bench.submit(Direction.HOST_TO_DEVICE, pages, pages)
            products.append(matrix @ matrix)
            bench.submit(Direction.DEVICE_TO_HOST, pages, [page + 8 for page in pages])
        bench.stream.drain()
        assert all(torch.equal(product.cpu(), expected) for product in products)
        assert torch.equal(bench.slabs()[:8], slabs[:8])
        assert torch.equal(bench.slabs()[8:16, :RECORD], slabs[:8, :RECORD])
        assert len(bench.stream.poll()) == 40


def test_a_stream_needs_room_for_something():
    with pytest.raises(ValueError, match="max_in_flight_bytes must be at least 1, got 0"):
        CpuCopyStream(max_in_flight_bytes=0)


def test_statistics_are_a_picture_of_their_moment():
    with small_pool(4) as pool, CpuCopyStream() as stream:
        before = pool.statistics()
        pool.acquire(2)
        after = pool.statistics()
        assert (before.num_used, after.num_used) == (0, 2)
        assert (after.used_bytes, after.capacity_bytes) == (2 * SLAB, 4 * SLAB)
        with pytest.raises(dataclasses.FrozenInstanceError):
            after.num_used = 3
        assert stream.statistics().host_to_device == DirectionStatistics()


class AskedMidway:
    """A completion that, asked by another thread whether its batch is done, lets the owner poll before it answers."""

    def __init__(self, completion):
        self._completion = completion
        self._owner = threading.current_thread()
        self.asked = threading.Event()
        self.polled = threading.Event()

    def finished(self):
        finished = self._completion.finished()
        if threading.current_thread() is not self._owner:
            self.asked.set()
            assert self.polled.wait(10)
        return finished

    def __getattr__(self, name):
        return getattr(self._completion, name)


def test_another_thread_reads_statistics_while_the_owner_polls():
    with Bench(make_manual) as bench:
        first, second = (bench.submit(Direction.DEVICE_TO_HOST, [page], [page]) for page in (0, 1))
        bench.stream.land(3)
        first.completion = midway = AskedMidway(first.completion)
        seen = []
        reader = threading.Thread(target=lambda: seen.append(bench.stream.statistics()))
        reader.start()
        assert midway.asked.wait(10)
        assert bench.stream.poll() == (first,)
        midway.polled.set()
        reader.join()
        (statistics,) = seen
        assert (statistics.in_flight_batches, statistics.in_flight_bytes) == (1, RECORD)
        assert (statistics.device_to_host.num_batches, statistics.device_to_host.num_bytes) == (1, RECORD)
        assert bench.stream.poll() == ()
        bench.stream.land_all()
        assert bench.stream.poll() == (second,)


@every_kind
def test_statistics_of_any_moment_add_up_and_move_nothing(make):
    with Bench(make) as bench:
        ended = threading.Event()
        seen = []

        def read():
            while not ended.is_set():
                seen.append(bench.stream.statistics())

        reader = threading.Thread(target=read)
        reader.start()
        polled, tickets = [], []
        try:
            for turn in range(200):
                tickets.append(bench.submit(Direction.DEVICE_TO_HOST, [turn % PAGES], [turn % 16]))
                polled += bench.stream.poll()
            bench.stream.drain()
        finally:
            ended.set()
            reader.join()
        polled += bench.stream.poll()
        assert polled == tickets
        landed = [statistics.device_to_host.num_batches for statistics in seen]
        assert landed == sorted(landed)
        for statistics in seen:
            assert statistics.device_to_host.num_bytes == statistics.device_to_host.num_batches * RECORD
            assert statistics.in_flight_bytes == statistics.in_flight_batches * RECORD
            assert statistics.device_to_host.num_batches + statistics.in_flight_batches <= len(tickets)
