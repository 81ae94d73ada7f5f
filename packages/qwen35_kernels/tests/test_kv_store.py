import pytest
import torch

from kernel_testing import assert_same_bits, generator, nan_arena
from qwen35_kernels import KernelInputError, KVProfile, PageLayout, store_kv

PLAIN = [KVProfile.BF16, KVProfile.FP32]


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
    store_kv(k=k, v=v, arena=guarded.arena, layout=layout, layer=1, pages=pages, rows=rows)
    expected = nan_arena(layout, 5)
    for t in range(4):
        for x, view in ((k, layout.k(expected.arena, 1)), (v, layout.v(expected.arena, 1))):
            for head in range(3):
                view[int(pages[t]), head, int(rows[t])] = x[t, head].to(view.dtype)
    assert_same_bits(guarded.arena, expected.arena)
    guarded.check()


def test_no_tokens_is_fine() -> None:
    layout = layout_of(KVProfile.BF16)
    empty = torch.zeros(0, dtype=torch.int64)
    arena = nan_arena(layout, 2).arena
    k = torch.zeros(0, 3, 64)
    store_kv(k=k, v=k, arena=arena, layout=layout, layer=0, pages=empty, rows=empty)
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
        "arena": arena,
        "layout": layout,
        "layer": 0,
        "pages": torch.tensor([1, 2]),
        "rows": torch.tensor([0, 0]),
    }
    with pytest.raises(KernelInputError, match="store_kv: " + message):
        store_kv(**{**arguments, **changes})
    assert bool((arena == 0xFF).all())
