import pytest
import torch

from kernel_testing import (
    assert_close,
    assert_same_bits,
    distant_rows,
    generator,
    nan_arena,
    store,
    store_sequence,
    stored_sequence,
)
from qwen35_kernels import KernelInputError, KVProfile, PageLayout, reference

PLAIN = [KVProfile.BF16, KVProfile.FP32]
QUANTISED = [KVProfile.INT8, KVProfile.FP8, KVProfile.NVFP4, KVProfile.K8V4]


def layout_of(profile: KVProfile) -> PageLayout:
    return PageLayout(profile=profile, num_layers=2, num_kv_heads=3, head_dim=64)


@pytest.mark.parametrize("profile", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_the_named_rows_and_nothing_else(profile: KVProfile, dtype: torch.dtype) -> None:
    layout = layout_of(profile)
    guarded = nan_arena(layout, 5)
    rng = generator(40)
    k, v = (torch.randn(4, 3, 64, generator=rng).to(dtype) for _ in range(2))
    pages, rows = torch.tensor([3, 1, 3, 4]), torch.tensor([0, 63, 5, 17])
    store(k=k, v=v, kv=layout.kv(guarded.arena, 1), pages=pages, rows=rows)
    expected = nan_arena(layout, 5)
    for t in range(4):
        for x, view in ((k, layout.kv(expected.arena, 1).k.values), (v, layout.kv(expected.arena, 1).v.values)):
            for head in range(3):
                view[int(pages[t]), head, int(rows[t])] = x[t, head].to(view.dtype)
    assert_same_bits(guarded.arena, expected.arena)
    guarded.check()


@pytest.mark.parametrize("profile", QUANTISED)
def test_quantised_rows_are_the_nearest_codes(profile: KVProfile) -> None:
    layout = layout_of(profile)
    guarded = nan_arena(layout, 3)
    rng = generator(41)
    k, v = (torch.randn(5, 3, 64, generator=rng) * torch.tensor([1.0, 30.0, 0.02])[:, None] for _ in range(2))
    k[1, 0] = 0.0
    v[2, 1, :16] = torch.tensor([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -6, -5, -3.5, -2.5, -1.75, -1.25, 0, -0.25])
    table = torch.tensor([2])
    store_sequence(guarded.arena, layout, 1, table, k, v, base=59)
    stored = stored_sequence(guarded.arena, layout, 1, table, 64)
    for x, back, rows in ((k, stored[0], layout.k_format), (v, stored[1], layout.v_format)):
        for t in range(5):
            for head in range(3):
                expected = reference.quantised_row(x[t, head].tolist(), rows.name)
                assert_close(back[59 + t, head], torch.tensor(expected, dtype=torch.float64), atol=0.0, rtol=1e-12)
    before = nan_arena(layout, 3)
    for view, untouched in zip(parts(layout, guarded.arena), parts(layout, before.arena), strict=True):
        view[2, :, 59:].view(torch.uint8).fill_(0xFF)
        assert_same_bits(view, untouched)
    guarded.check()


def parts(layout: PageLayout, arena: torch.Tensor) -> list[torch.Tensor]:
    kv = layout.kv(arena, 1)
    return [part for part in (kv.k.values, kv.v.values, kv.k.scales, kv.v.scales) if part is not None]


# Half a step of the coarsest code, relative to the largest number that shares the scale, with the scale's
# rounding.
ERROR = {"int8": 0.5 / 127 + 2**-11, "fp8": 2**-4 + 2**-11, "fp4": 1 / 6 + 2**-4}


@pytest.mark.parametrize("profile", QUANTISED)
def test_quantisation_error_is_bounded_by_the_format(profile: KVProfile) -> None:
    layout = layout_of(profile)
    arena = nan_arena(layout, 3).arena
    rng = generator(42)
    k, v = (torch.randn(64, 3, 64, generator=rng) * 3 for _ in range(2))
    store_sequence(arena, layout, 1, torch.tensor([1]), k, v)
    back = stored_sequence(arena, layout, 1, torch.tensor([1]), 64)
    for x, y, rows in ((k, back[0], layout.k_format), (v, back[1], layout.v_format)):
        groups = rows.row_scales(64)
        error = (x.double() - y).abs().view(64, 3, groups, -1).amax(-1)
        largest = x.double().abs().view(64, 3, groups, -1).amax(-1)
        assert float((error / largest).max()) <= ERROR[rows.name]
        assert float((error / largest).max()) > ERROR[rows.name] / 8


@pytest.mark.parametrize("profile", QUANTISED)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_the_batch(profile: KVProfile, threads: int, set_threads) -> None:
    set_threads(threads)
    layout = layout_of(profile)
    whole, single = nan_arena(layout, 4).arena, nan_arena(layout, 4).arena
    rng = generator(43)
    k, v = (torch.randn(130, 3, 64, generator=rng).bfloat16() for _ in range(2))
    table = torch.tensor([3, 1, 2])
    store_sequence(whole, layout, 0, table, k, v)
    for begin, end in ((0, 1), (1, 77), (77, 130)):
        store_sequence(single, layout, 0, table, k[begin:end], v[begin:end], base=begin)
    assert_same_bits(whole, single)


@pytest.mark.parametrize("profile", [KVProfile.FP32, KVProfile.K8V4])
def test_pages_beyond_two_gibibytes_are_reached(profile: KVProfile) -> None:
    layout = layout_of(profile)
    near = nan_arena(layout, 3).arena
    far, first = distant_rows(layout.page_bytes, 3, element_bytes=layout.v_format.value_dtype.itemsize)
    far[first:].fill_(0xFF)
    k, v = (torch.randn(2, 3, 64, generator=generator(45)) for _ in range(2))
    pages, rows = torch.tensor([2, 1]), torch.tensor([5, 63])
    store(k=k, v=v, kv=layout.kv(near, 1), pages=pages, rows=rows)
    store(k=k, v=v, kv=layout.kv(far, 1), pages=pages + first, rows=rows)
    assert_same_bits(far[first:], near)


def test_numbers_that_are_not_finite_stay_visible() -> None:
    for profile in QUANTISED:
        layout = layout_of(profile)
        arena = nan_arena(layout, 2).arena
        k = torch.randn(1, 3, 64, generator=generator(44))
        k[0, 1, 5] = float("nan")
        store_sequence(arena, layout, 0, torch.tensor([1]), k, k)
        for back in stored_sequence(arena, layout, 0, torch.tensor([1]), 1):
            assert bool(back[0, 1].isnan().any())
            assert bool(torch.isfinite(back[0, [0, 2]]).all())


def test_no_tokens_is_fine() -> None:
    layout = layout_of(KVProfile.BF16)
    empty = torch.zeros(0, dtype=torch.int64)
    arena = nan_arena(layout, 2).arena
    k = torch.zeros(0, 3, 64)
    store(k=k, v=k, kv=layout.kv(arena, 0), pages=empty, rows=empty)
    assert bool((arena == 0xFF).all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pages": torch.tensor([1, 5])}, r"pages must lie in \[0, 5\), got 5"),
        ({"rows": torch.tensor([64, 0])}, r"rows must lie in \[0, 64\), got 64"),
        ({"rows": torch.tensor([0])}, r"rows must have shape \(2,\), got \(1,\)"),
        ({"pages": torch.tensor([1, 2]).int()}, "pages must be int64, got 'int32'"),
        ({"k": torch.zeros(2, 2, 64)}, r"k must have shape \(2, 3, 64\), got \(2, 2, 64\)"),
        ({"v": torch.zeros(2, 3, 64).half()}, "v must be float32 or bfloat16, got 'float16'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(changes: dict, message: str) -> None:
    layout = layout_of(KVProfile.BF16)
    arena = nan_arena(layout, 5).arena
    arguments = {
        "k": torch.zeros(2, 3, 64),
        "v": torch.zeros(2, 3, 64),
        "kv": layout.kv(arena, 0),
        "pages": torch.tensor([1, 2]),
        "rows": torch.tensor([0, 0]),
    }
    op = "store_kv" if message[0] in "kv" else "TokenRows"
    with pytest.raises(KernelInputError, match=f"{op}: {message}"):
        store(**{**arguments, **changes})
    assert bool((arena == 0xFF).all())
