"""Image files: everything or nothing, in both directions, whatever breaks and wherever."""

import errno
import os
import random
import resource
from array import array

import pytest
import torch

from slab_pool import (
    ImageCancelled,
    ImageDamaged,
    ImageFile,
    ImageUnsuitable,
    PoolExhausted,
    StaleSlab,
    save_image,
    temporary_path,
)
from slab_pool.testing import FullDisk
from slab_pool_strategies import SLAB, small_pool

TABLES = (b"the blocks" * 20, b"", b"the snapshots")


def filled(pool, count, seed=3):
    handles = pool.acquire(count)
    generator = torch.Generator().manual_seed(seed)
    for handle in handles:
        pool.tensor(handle).copy_(torch.randint(0, 256, (pool.slab_bytes,), dtype=torch.uint8, generator=generator))
    return handles


def contents(pool, handles):
    return [bytes(pool.memory(handle)) for handle in handles]


@pytest.fixture
def image(tmp_path):
    """A pool with five slabs and their image, slabs in an order of their own."""
    with small_pool(8) as pool:
        handles = filled(pool, 5)
        chosen = [handles[index] for index in (3, 0, 4, 1)]
        path = tmp_path / "cache.image"
        save_image(path, pool, chosen, tables=TABLES)
        yield path, contents(pool, chosen), pool


def test_slabs_and_tables_come_back(image):
    path, saved, _ = image
    with small_pool(4, slabs_per_chunk=3) as pool, ImageFile(path) as file:
        assert file.tables == TABLES
        assert (file.num_slabs, file.slab_bytes, file.num_bytes) == (4, SLAB, path.stat().st_size)
        handles = file.load(pool)
        assert contents(pool, handles) == saved
        assert pool.num_used == 4
    assert not temporary_path(path).exists()


def test_a_choice_of_slabs_is_read_in_its_order(image):
    path, saved, _ = image
    with small_pool(4) as pool, ImageFile(path) as file:
        assert contents(pool, file.load(pool, ordinals=[2, 0])) == [saved[2], saved[0]]
        assert file.load(pool, ordinals=[]) == ()
        with pytest.raises(IndexError, match="ordinals must be below 4, got 4"):
            file.load(pool, ordinals=[4])
        with pytest.raises(IndexError):
            file.load(pool, ordinals=[-1])
        assert pool.num_used == 2


def test_an_image_without_slabs_is_an_image(tmp_path):
    with small_pool(2) as pool:
        transfer = save_image(tmp_path / "empty", pool, [])
        with ImageFile(tmp_path / "empty") as file:
            assert file.load(pool) == ()
            assert file.tables == ()
        assert (transfer.num_slabs, transfer.num_bytes) == (0, (tmp_path / "empty").stat().st_size)


def test_a_bit_flipped_anywhere_is_found_and_nothing_is_loaded(image):
    """Every byte before the slabs and of the trailer, and a sample of the slabs."""
    path, _, _ = image
    whole = path.read_bytes()
    with ImageFile(path) as file:
        front, back = file._header.slabs_begin, file._header.trailer_begin
    seed = 5
    print("seed", seed)
    generator = random.Random(seed)
    samples = [*range(0, front, 7), *range(front - 3, front + 3), *range(back - 3, len(whole))]
    samples += range(400)
    samples += [generator.randrange(front, back) for _ in range(60)]
    damaged_path = path.with_name("damaged")
    damaged_path.write_bytes(whole)
    with small_pool(8) as pool, open(damaged_path, "r+b", buffering=0) as damaged:
        for position in samples:
            flipped = whole[position] ^ (1 << generator.randrange(8))
            os.pwrite(damaged.fileno(), bytes([flipped]), position)
            with pytest.raises(ImageDamaged), ImageFile(damaged_path) as file:
                file.load(pool)
            assert pool.num_used == 0, position
            os.pwrite(damaged.fileno(), whole[position : position + 1], position)
        with ImageFile(damaged_path) as file:
            assert len(file.load(pool)) == 4
        pool.check_invariants()


def test_a_file_cut_anywhere_is_refused(image):
    """At every field of the header, inside the tables, at and around every slab, inside the trailer."""
    path, _, _ = image
    whole = path.read_bytes()
    with ImageFile(path) as file:
        header = file._header
    fields = [0, 1, 8, 12, 16, 24, 32, 40, 44, 52, 56, 64, 68, header.header_bytes, header.header_bytes + 5]
    slabs = [header.slabs_begin + index * SLAB + offset for index in range(4) for offset in (-1, 0, 1, 2000)]
    trailer = [header.trailer_begin + offset for offset in (0, 4, 8, 16, 20)] + [len(whole) - 1]
    cut = path.with_name("cut")
    with small_pool(8) as pool:
        for length in fields + slabs + trailer:
            cut.write_bytes(whole[:length])
            with pytest.raises(ImageDamaged):
                ImageFile(cut)
        for longer in (whole + b"\0", whole + whole[-SLAB:]):
            cut.write_bytes(longer)
            with pytest.raises(ImageDamaged, match="by its header"):
                ImageFile(cut)
        assert pool.num_used == 0


def test_a_file_that_shrinks_while_it_is_read_loads_nothing(image):
    path, _, _ = image
    with small_pool(8) as pool, ImageFile(path) as file:
        os.truncate(path, file._header.slabs_begin + SLAB + 100)
        with pytest.raises(ImageDamaged, match="ends inside slab 1"):
            file.load(pool)
        assert pool.num_used == 0


def test_slabs_that_changed_places_are_found(image):
    path, _, _ = image
    whole = bytearray(path.read_bytes())
    with ImageFile(path) as file:
        begin = file._header.slabs_begin
    first, second = slice(begin, begin + SLAB), slice(begin + SLAB, begin + 2 * SLAB)
    whole[first], whole[second] = whole[second], whole[first]
    path.write_bytes(whole)
    with small_pool(8) as pool, ImageFile(path) as file:
        with pytest.raises(ImageDamaged, match="slab 0: digest"):
            file.load(pool)
        assert pool.num_used == 0


def test_another_slab_size_is_unsuitable_not_damaged(image):
    path, _, _ = image
    with small_pool(4, slab_bytes=8192) as pool, ImageFile(path) as file:
        with pytest.raises(ImageUnsuitable, match="must have 8192 bytes, got 4096"):
            file.load(pool)
        assert pool.num_used == 0


def test_too_small_a_pool_takes_nothing(image):
    path, _, _ = image
    with small_pool(3) as pool, ImageFile(path) as file:
        with pytest.raises(PoolExhausted):
            file.load(pool)
        assert pool.num_used == 0


def test_a_missing_file_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        ImageFile(tmp_path / "nothing")


@pytest.mark.parametrize("room", [0, 3000, 4096 + 10, 4096 + 2 * SLAB, 4096 + 4 * SLAB + 3])
def test_a_full_disk_leaves_the_previous_file_and_no_other(image, room):
    path, saved, pool = image
    before = path.read_bytes()
    handles = filled(pool, 3, seed=9)
    with pytest.raises(OSError, match="No space left") as caught:
        save_image(path, pool, handles * 2, tables=[b"new"], write=FullDisk(room))
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
    with small_pool(4) as other, ImageFile(path) as file:
        assert contents(other, file.load(other)) == saved


def test_a_refusal_of_the_system_itself_leaves_the_previous_file(image):
    path, _, pool = image
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + SLAB, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_image(path, pool, filled(pool, 3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_short_writes_are_continued(tmp_path):
    with small_pool(3) as pool:
        handles = filled(pool, 3)
        save_image(tmp_path / "short", pool, handles, write=lambda descriptor, data: os.write(descriptor, data[:1000]))
        save_image(tmp_path / "whole", pool, handles)
        assert (tmp_path / "short").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("stop_at", range(5))
def test_a_cancelled_save_leaves_the_previous_file_and_no_other(image, stop_at):
    """Before each of four slabs, and before the rename."""
    path, _, pool = image
    before = path.read_bytes()
    asked = iter(range(100))
    seen = []
    with pytest.raises(ImageCancelled):
        save_image(
            path,
            pool,
            filled(pool, 2) * 2,
            progress=lambda done, total: seen.append((done, total)),
            cancelled=lambda: next(asked) == stop_at,
        )
    assert seen == [(done, 4) for done in range(min(stop_at, 4) + (stop_at == 4))]
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("stop_at", range(4))
def test_a_cancelled_load_loads_nothing(image, stop_at):
    path, _, _ = image
    asked = iter(range(100))
    with small_pool(8) as pool, ImageFile(path) as file:
        with pytest.raises(ImageCancelled):
            file.load(pool, cancelled=lambda: next(asked) == stop_at)
        assert pool.num_used == 0


def test_progress_counts_from_none_to_all(image):
    path, _, pool = image
    seen = []
    with ImageFile(path) as file:
        file.load(pool, ordinals=[0, 1], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_progress_that_raises_undoes_everything(image):
    path, _, pool = image
    before = path.read_bytes()
    used = pool.num_used

    def progress(done, total):
        if done == 1:
            raise KeyboardInterrupt

    with ImageFile(path) as file, pytest.raises(KeyboardInterrupt):
        file.load(pool, ordinals=[0, 1, 2], progress=progress)
    assert pool.num_used == used
    with pytest.raises(KeyboardInterrupt):
        save_image(path, pool, filled(pool, 3), progress=progress)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_what_a_killed_save_left_behind_is_overwritten(image):
    path, _, pool = image
    temporary_path(path).write_bytes(b"half of an image" * 10_000)
    with ImageFile(path) as file:
        assert file.num_slabs == 4  # the old file still serves
    save_image(path, pool, filled(pool, 1, seed=8))
    assert os.listdir(path.parent) == [path.name]
    with ImageFile(path) as file:
        assert file.num_slabs == 1


def test_stale_handles_are_refused_before_a_file_is_touched(tmp_path):
    with small_pool(2) as pool:
        handles = pool.acquire(2)
        pool.release(handles[:1])
        with pytest.raises(StaleSlab):
            save_image(tmp_path / "image", pool, handles)
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_an_os_error(tmp_path):
    with small_pool(2) as pool, pytest.raises(FileNotFoundError):
        save_image(tmp_path / "no" / "image", pool, pool.acquire(1))


def test_a_closed_image_reads_no_file_that_took_its_descriptor(image, tmp_path):
    path, _, pool = image
    file = ImageFile(path)
    file.close()
    save_image(tmp_path / "other", pool, pool.acquire(2))
    used = pool.num_used
    with ImageFile(tmp_path / "other"), pytest.raises(ValueError, match="must be open"):
        file.load(pool)
    assert pool.num_used == used


def test_a_table_may_be_a_buffer_of_wider_items(image):
    path, _, pool = image
    numbers = array("i", range(5))
    save_image(path, pool, [], tables=[memoryview(numbers)])
    with ImageFile(path) as file:
        assert file.tables == (numbers.tobytes(),)


def test_closing_twice_is_harmless(image):
    path, _, _ = image
    file = ImageFile(path)
    file.close()
    file.close()
    with ImageFile(path) as again:
        assert again.num_slabs == 4
