"""What record and image copies touch: exactly the bytes of their range, and no view of anything else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slab_pool import CopyBatch, Direction, image_copies, record_copies
from slab_pool.cpu import copy_now
from slab_pool_strategies import SLAB, page_slab_pairs, small_pool

RECORD = SLAB - 96


def noise(*shape, seed=1):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(page_slab_pairs(max_pages=20, max_slabs=24), st.data())
def test_record_copies_move_their_range_and_nothing_else(pairs, data):
    begin = data.draw(st.integers(0, RECORD - 1))
    end = data.draw(st.integers(begin + 1, RECORD))
    slab_begin = data.draw(st.integers(0, SLAB - end))
    direction = data.draw(st.sampled_from(Direction))
    with small_pool(24, slabs_per_chunk=7) as pool:
        handles = pool.acquire(24)
        arena = noise(20, RECORD)
        slabs = noise(24, SLAB, seed=2)
        for handle, content in zip(handles, slabs, strict=True):
            pool.tensor(handle).copy_(content)
        want_arena, want_slabs = arena.clone(), slabs.clone()
        for page, slab in pairs:
            inside = slice(slab_begin + begin, slab_begin + end)
            if direction is Direction.HOST_TO_DEVICE:
                want_arena[page, begin:end] = want_slabs[slab, inside]
            else:
                want_slabs[slab, inside] = want_arena[page, begin:end]
        runs = pool.plan_runs([page for page, _ in pairs], [handles[slab] for _, slab in pairs], record_bytes=RECORD)
        copies = record_copies(pool, arena, runs, begin, end, slab_begin=slab_begin)
        copy_now(copies, direction)
        assert torch.equal(arena, want_arena)
        assert torch.equal(torch.stack([pool.tensor(handle) for handle in handles]), want_slabs)
        assert sum(copy.num_bytes for copy in copies) == len(pairs) * (end - begin)
        assert len(copies) == len(runs)


def test_whole_records_that_touch_are_one_contiguous_copy():
    with small_pool(8, slabs_per_chunk=8) as pool:
        handles = pool.acquire(5)
        arena = torch.zeros(8, SLAB, dtype=torch.uint8)
        runs = pool.plan_runs([1, 2, 3, 4, 5], handles, record_bytes=SLAB)
        (copy,) = record_copies(pool, arena, runs, 0, SLAB)
        assert (copy.rows, copy.width) == (1, 5 * SLAB)
        (part,) = record_copies(pool, arena, runs, 0, SLAB - 1)
        assert (part.rows, part.width) == (5, SLAB - 1)


@settings(deadline=None)
@given(st.permutations(range(8)), st.integers(2 * SLAB + 1, 3 * SLAB), st.data())
def test_image_copies_pack_the_range_over_the_slabs_in_their_order(order, image_bytes, data):
    begin = data.draw(st.integers(0, image_bytes))
    end = data.draw(st.integers(begin, image_bytes))
    direction = data.draw(st.sampled_from(Direction))
    slot = data.draw(st.integers(0, 2))
    with small_pool(8, slabs_per_chunk=5) as pool:
        handles = pool.acquire(8)
        chosen = [handles[index] for index in order[:3]]
        arena = noise(3, image_bytes)
        slabs = noise(8, SLAB, seed=2)
        for handle, content in zip(handles, slabs, strict=True):
            pool.tensor(handle).copy_(content)
        want_arena, want_slabs = arena.clone(), slabs.clone()
        packed = torch.cat([want_slabs[index] for index in order[:3]])
        if direction is Direction.HOST_TO_DEVICE:
            want_arena[slot, begin:end] = packed[begin:end]
        else:
            packed[begin:end] = want_arena[slot, begin:end]
            for position, index in enumerate(order[:3]):
                want_slabs[index] = packed[position * SLAB : (position + 1) * SLAB]
        copies = image_copies(pool, arena, slot, chosen, begin, end)
        copy_now(copies, direction)
        assert torch.equal(arena, want_arena)
        assert torch.equal(torch.stack([pool.tensor(handle) for handle in handles]), want_slabs)
        assert sum(copy.num_bytes for copy in copies) == end - begin


def test_an_image_over_adjacent_slabs_is_one_copy_a_chunk():
    with small_pool(8, slabs_per_chunk=5) as pool:
        handles = pool.acquire(8)
        arena = torch.zeros(2, 6 * SLAB - 10, dtype=torch.uint8)
        copies = image_copies(pool, arena, 1, handles[1:7], 0, 6 * SLAB - 10)
        assert [copy.width for copy in copies] == [4 * SLAB, 2 * SLAB - 10]
        assert len(image_copies(pool, arena, 1, handles[6:0:-1], 0, 6 * SLAB - 10)) == 6


def test_a_batch_counts_its_bytes_and_copies():
    with small_pool(4, slabs_per_chunk=4) as pool:
        handles = pool.acquire(4)
        arena = torch.zeros(8, SLAB, dtype=torch.uint8)
        runs = pool.plan_runs([0, 1, 5, 2], handles, record_bytes=SLAB)
        assert len(runs) == 3
        batch = CopyBatch.of(
            Direction.HOST_TO_DEVICE,
            [
                ("prelude", []),
                ("layer 0", record_copies(pool, arena, runs, 0, 100)),
                ("layer 1", record_copies(pool, arena, runs, 100, 300)),
            ],
        )
        assert batch.num_bytes == 4 * 300
        assert batch.num_copies == 6
        assert [part.name for part in batch.parts] == ["prelude", "layer 0", "layer 1"]


def test_a_batch_without_parts_is_refused():
    with pytest.raises(ValueError, match="at least one part"):
        CopyBatch.of(Direction.HOST_TO_DEVICE, [])


@pytest.mark.parametrize(
    "arena",
    [
        torch.zeros(4, SLAB, dtype=torch.int8),
        torch.zeros(4 * SLAB, dtype=torch.uint8),
        torch.zeros(4, 2 * SLAB, dtype=torch.uint8)[:, :SLAB],
    ],
)
def test_arenas_of_another_form_are_refused(arena):
    with small_pool(4) as pool:
        handles = pool.acquire(1)
        runs = pool.plan_runs([0], handles, record_bytes=SLAB)
        with pytest.raises(ValueError, match="record_copies: arena must be contiguous uint8"):
            record_copies(pool, arena, runs, 0, 1)
        with pytest.raises(ValueError, match="image_copies: arena must be contiguous uint8"):
            image_copies(pool, arena, 0, handles, 0, 1)


@pytest.mark.parametrize(
    ("begin", "end", "slab_begin"), [(-1, 5, 0), (5, 5, 0), (0, RECORD + 1, 0), (0, RECORD, 97), (0, 1, -1)]
)
def test_record_ranges_outside_are_refused(begin, end, slab_begin):
    with small_pool(4) as pool:
        runs = pool.plan_runs([0], pool.acquire(), record_bytes=RECORD)
        arena = torch.zeros(4, RECORD, dtype=torch.uint8)
        with pytest.raises(ValueError, match="range must lie in a record"):
            record_copies(pool, arena, runs, begin, end, slab_begin=slab_begin)


def test_records_beyond_the_arena_are_refused():
    with small_pool(4) as pool:
        runs = pool.plan_runs([2, 3, 4], pool.acquire(3), record_bytes=RECORD)
        with pytest.raises(ValueError, match="records must be below 4, got 4"):
            record_copies(pool, torch.zeros(4, RECORD, dtype=torch.uint8), runs, 0, 1)


@pytest.mark.parametrize(("slabs", "slabs_per_chunk"), [(8, 4), (4, 2)])
def test_runs_of_a_pool_of_another_shape_are_refused(slabs, slabs_per_chunk):
    with small_pool(4, slabs_per_chunk=4) as pool, small_pool(slabs, slabs_per_chunk=slabs_per_chunk) as other:
        runs = other.plan_runs(range(slabs), other.acquire(slabs), record_bytes=RECORD)
        with pytest.raises(ValueError, match="must be planned for a pool of 4 slabs, 4 a chunk, got slab"):
            record_copies(pool, torch.zeros(8, RECORD, dtype=torch.uint8), runs, 0, 1)


@pytest.mark.parametrize(("slot", "begin", "end"), [(-1, 0, 1), (2, 0, 1), (0, -1, 1), (0, 2, 1), (0, 0, SLAB + 2)])
def test_image_ranges_outside_are_refused(slot, begin, end):
    with small_pool(4) as pool:
        arena = torch.zeros(2, SLAB + 1, dtype=torch.uint8)
        with pytest.raises(ValueError, match="index and range must lie in 2 images"):
            image_copies(pool, arena, slot, pool.acquire(2), begin, end)


def test_an_image_with_too_few_slabs_is_refused():
    with small_pool(4) as pool:
        arena = torch.zeros(2, SLAB + 1, dtype=torch.uint8)
        with pytest.raises(ValueError, match=f"image of {SLAB + 1} bytes takes 2 slabs, got 1"):
            image_copies(pool, arena, 0, pool.acquire(1), 0, 1)


def test_views_of_an_arena_inside_a_larger_storage_are_right():
    storage = noise(3 * SLAB)
    arena = storage[SLAB:].view(2, SLAB)
    with small_pool(4) as pool:
        runs = pool.plan_runs([0, 1], pool.acquire(2), record_bytes=SLAB)
        (copy,) = record_copies(pool, arena, runs, 10, 20)
        assert torch.equal(copy.device_view(), arena[:, 10:20])
        assert copy.host_view().shape == (2, 10)
