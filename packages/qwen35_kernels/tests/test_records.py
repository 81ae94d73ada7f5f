import functools
import itertools
import os
import random

import pytest
import torch
from torch import Tensor

from kernel_testing import GuardedBytes, assert_same_bits, distant_rows, generator
from qwen35_kernels import KernelInputError, KVProfile, PageLayout, StateLayout
from qwen35_kernels import copy_records as copy_records_of_the_package
from qwen35_kernels.records import consecutive_runs

# Where the backend is forced to Triton, whoever does not ask for the plain copy gets the kernel.
copy_records = functools.partial(
    copy_records_of_the_package, use_kernel=os.environ.get("QWEN35_KERNELS_BACKEND") == "triton"
)


def random_arena(seed: int, rows: int, row_bytes: int) -> GuardedBytes:
    guarded = GuardedBytes(rows, row_bytes)
    shape = guarded.arena.shape
    guarded.arena.copy_(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(seed)))
    return guarded


def expected_copy(source: Tensor, destination: Tensor, pairs: list[tuple[int, int]], begin: int, end: int) -> Tensor:
    out = destination.clone()
    for read, write in pairs:
        for byte in range(begin, end):
            out[write, byte] = source[read, byte]
    return out


@pytest.mark.parametrize("profile", list(KVProfile))
def test_pages_survive_a_round_trip_through_slabs(profile: KVProfile) -> None:
    layout = PageLayout(profile=profile, num_layers=2, num_kv_heads=1, head_dim=64)
    pages = random_arena(90, 9, layout.page_bytes)
    original = pages.arena.clone()
    slabs = random_arena(91, 12, layout.page_bytes + 4096)
    out, back = [3, 4, 5, 8, 1], [7, 2, 3, 4, 0]
    copy_records(
        source=pages.arena,
        destination=slabs.arena,
        source_rows=out,
        destination_rows=back,
        num_bytes=layout.page_bytes,
    )
    pages.arena.fill_(0xEE)
    copy_records(
        source=slabs.arena,
        destination=pages.arena,
        source_rows=back,
        destination_rows=out,
        num_bytes=layout.page_bytes,
    )
    for page in range(9):
        if page in out:
            assert_same_bits(pages.arena[page], original[page])
        else:
            assert bool((pages.arena[page] == 0xEE).all())
    pages.check()
    slabs.check()


def test_a_layer_slice_moves_alone() -> None:
    layout = PageLayout(profile=KVProfile.INT8, num_layers=3, num_kv_heads=1, head_dim=64)
    source, destination = random_arena(92, 6, layout.page_bytes), random_arena(93, 6, layout.page_bytes)
    part = layout.layer_range(1)
    pairs = [(1, 2), (2, 3), (5, 1)]
    expected = expected_copy(source.arena, destination.arena, pairs, part.begin, part.end)
    copy_records(
        source=source.arena,
        destination=destination.arena,
        source_rows=[read for read, _ in pairs],
        destination_rows=[write for _, write in pairs],
        source_begin=part.begin,
        destination_begin=part.begin,
        num_bytes=part.num_bytes,
    )
    assert_same_bits(destination.arena, expected)
    destination.check()


def test_an_image_may_land_at_another_offset() -> None:
    layout = StateLayout(
        num_layers=1,
        num_value_heads=1,
        key_dim=4,
        value_dim=4,
        conv_channels=3,
        conv_width=4,
        conv_dtype=torch.float32,
        hidden_size=4,
        hidden_dtype=torch.float32,
    )
    source = random_arena(94, 3, layout.image_bytes)
    destination = torch.zeros(3, layout.image_bytes + 256, dtype=torch.uint8)
    copy_records(
        source=source.arena, destination=destination, source_rows=[2], destination_rows=[0], destination_begin=256
    )
    assert_same_bits(destination[0, 256:], source.arena[2])
    assert bool((destination[1:] == 0).all())


def test_rows_beyond_two_gibibytes_are_reached() -> None:
    near = random_arena(95, 4, 16384)
    far, first = distant_rows(16384, 4, element_bytes=8)
    rows = [1, 3, 2]
    there = [first + row for row in rows]
    back = torch.zeros(4, 16384, dtype=torch.uint8)
    copy_records(source=near.arena, destination=far, source_rows=rows, destination_rows=there)
    copy_records(source=far, destination=back, source_rows=there, destination_rows=rows)
    assert_same_bits(back[1:], near.arena[1:])


def test_runs_cover_every_pair_once_in_order() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        reads = sorted(rng.sample(range(20), 12)) if seed % 2 else rng.sample(range(20), 12)
        writes = sorted(rng.sample(range(20), 12))
        runs = consecutive_runs(reads, writes)
        pairs = [(read + i, write + i) for read, write, length in runs for i in range(length)]
        assert pairs == list(zip(reads, writes, strict=True)), f"seed {seed}"
        for (read, write, length), (next_read, next_write, _) in itertools.pairwise(runs):
            assert (read + length, write + length) != (next_read, next_write), f"seed {seed}"


def test_bad_input_names_op_constraint_and_value() -> None:
    arena = torch.zeros(4, 256, dtype=torch.uint8)
    good = {"source": arena, "destination": arena.clone(), "source_rows": [1], "destination_rows": [2]}
    for changes, message in (
        ({"source_rows": [4]}, r"source_rows must lie in \[0, 4\), got 4"),
        ({"destination_rows": [-1]}, r"destination_rows must lie in \[0, 4\), got -1"),
        ({"destination_rows": [1, 2]}, "destination_rows must have 1 entries, got 2"),
        ({"source_rows": [1, 2], "destination_rows": [3, 3]}, "destination_rows must be distinct"),
        ({"source_begin": 8}, "source_begin must be a multiple of 16, got 8"),
        ({"num_bytes": 272}, "source records have 256 bytes, got 272"),
        ({"destination_begin": 16}, "destination records have 256 bytes, got 272"),
        ({"source": arena.float()}, "source must be uint8 rows, dense"),
    ):
        with pytest.raises(KernelInputError, match="copy_records: " + message):
            copy_records(**{**good, **changes})
