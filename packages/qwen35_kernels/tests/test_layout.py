import doctest

import pytest
import torch

from kernel_testing import GuardedBytes
from qwen35_kernels import KernelInputError, KVProfile, PageLayout, StateLayout, layout

# Bytes per token and KV head, keys and values together, head dim 256: the published table of the cache
# design.
ROW_BYTES = {"bf16": 1024, "fp32": 2048, "int8": 528, "fp8": 516, "nvfp4": 288, "k8v4": 402}
MIB = {"bf16": 4.0, "int8": 2.0625, "fp8": 2.015625, "k8v4": 1.5703125, "nvfp4": 1.125}


@pytest.mark.parametrize("profile", list(KVProfile))
def test_page_bytes_are_those_of_the_table(profile: KVProfile) -> None:
    page = PageLayout(profile=profile, num_layers=16, num_kv_heads=4, head_dim=256)
    assert page.page_bytes == 16 * 4 * 64 * ROW_BYTES[profile]
    if profile != KVProfile.FP32:
        assert page.page_bytes / 2**20 == MIB[profile]
    small = PageLayout(profile=profile, num_layers=10, num_kv_heads=2, head_dim=256)
    assert small.page_bytes == 10 * 2 * 64 * ROW_BYTES[profile]


def parts_of(page: PageLayout, arena: torch.Tensor, layer: int) -> list[torch.Tensor]:
    kv = page.kv(arena, layer)
    return [part for part in (kv.k.values, kv.v.values, kv.k.scales, kv.v.scales) if part is not None]


@pytest.mark.parametrize("profile", list(KVProfile))
def test_parts_cover_each_record_once_in_order(profile: KVProfile) -> None:
    page = PageLayout(profile=profile, num_layers=3, num_kv_heads=2, head_dim=64)
    guarded = GuardedBytes(4, page.page_bytes)
    arena = guarded.arena
    arena.zero_()
    used = 0
    previous_end = arena.data_ptr()
    for layer in range(3):
        for part in parts_of(page, arena, layer):
            assert (part.data_ptr() - arena.data_ptr()) % 16 == 0
            assert part.data_ptr() >= previous_end
            size = part[0].numel() * part.element_size()
            previous_end = part.data_ptr() + size
            inside = page.layer_range(layer)
            offset = part.data_ptr() - arena.data_ptr()
            assert inside.begin <= offset < offset + size <= inside.end
            part.view(torch.uint8).add_(1)
            used += size
    assert int((arena == 1).sum()) == 4 * used
    assert int(arena.max()) == 1
    assert page.page_bytes % 256 == 0
    assert used > page.page_bytes - 256 - 3 * 48
    guarded.check()


def test_views_are_no_copies_and_order_is_head_token_dim() -> None:
    page = PageLayout(profile=KVProfile.FP32, num_layers=2, num_kv_heads=2, head_dim=16)
    arena = torch.zeros(3, page.page_bytes, dtype=torch.uint8)
    kv = page.kv(arena, 1)
    kv.k.values[2, 1, 63, 15] = 1.5
    kv.v.values[2, 0, 0, 0] = 2.5
    raw = arena[2].view(torch.float32)
    begin = page.layer_range(1).begin // 4
    assert raw[begin + 2 * 64 * 16 - 1] == 1.5
    assert raw[begin + 2 * 64 * 16] == 2.5
    assert page.layer_range(0).num_bytes == page.layer_range(1).num_bytes


def state_layout(**changes) -> StateLayout:
    arguments = {
        "num_layers": 3,
        "num_value_heads": 2,
        "key_dim": 4,
        "value_dim": 5,
        "conv_channels": 7,
        "conv_width": 4,
        "conv_dtype": torch.bfloat16,
        "hidden_size": 6,
        "hidden_dtype": torch.bfloat16,
    }
    return StateLayout(**{**arguments, **changes})


def test_image_of_the_35b_model() -> None:
    image = state_layout(
        num_layers=30, num_value_heads=32, key_dim=128, value_dim=128, conv_channels=8192, hidden_size=2048
    )
    assert 30 * 32 * 128 * 128 * 4 == 60 * 2**20
    assert image.image_bytes == 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2) + 2048 * 2


def test_image_parts_do_not_overlap() -> None:
    image = state_layout()
    arena = torch.zeros(4, image.image_bytes, dtype=torch.uint8)
    used = 0
    for layer in range(3):
        for part in (image.recurrent(arena, layer), image.conv(arena, layer)):
            offset = part.data_ptr() - arena.data_ptr()
            size = part[0].numel() * part.element_size()
            assert offset % 16 == 0
            assert image.layer_range(layer).begin <= offset < offset + size <= image.layer_range(layer).end
            part.view(torch.uint8).add_(1)
            used += size
    hidden = image.hidden(arena)
    assert hidden.data_ptr() - arena.data_ptr() == image.hidden_range().begin == 3 * image.layer_bytes
    hidden.view(torch.uint8).add_(1)
    used += 12
    assert int((arena == 1).sum()) == 4 * used
    assert int(arena.max()) == 1
    assert image.image_bytes % 256 == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"profile": "int4"}, "profile must be one of .*, got 'int4'"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"head_dim": 24}, "head_dim must be a multiple of 16 for bf16, got 24"),
        ({"profile": "int8", "head_dim": 96}, "head_dim must be a multiple of 64 for int8, got 96"),
        ({"profile": "nvfp4", "head_dim": 48}, "head_dim must be a multiple of 32 for nvfp4, got 48"),
    ],
)
def test_bad_page_layouts_are_refused(changes: dict, message: str) -> None:
    arguments = {"profile": KVProfile.BF16, "num_layers": 1, "num_kv_heads": 1, "head_dim": 64}
    with pytest.raises(KernelInputError, match="PageLayout: " + message):
        PageLayout(**{**arguments, **changes})


def test_bad_state_layouts_are_refused() -> None:
    with pytest.raises(KernelInputError, match="conv_width must be at least 2, got 1"):
        state_layout(conv_width=1)
    with pytest.raises(KernelInputError, match="key_dim must be at least 1, got 0"):
        state_layout(key_dim=0)


def test_bad_arenas_and_layers_are_refused() -> None:
    page = PageLayout(profile=KVProfile.FP32, num_layers=2, num_kv_heads=2, head_dim=16)
    with pytest.raises(KernelInputError, match="arena must be uint8"):
        page.kv(torch.zeros(3, page.page_bytes - 1, dtype=torch.uint8), 0)
    with pytest.raises(KernelInputError, match="arena rows must be dense records"):
        page.kv(torch.zeros(page.page_bytes, 3, dtype=torch.uint8).t(), 0)
    arena = torch.zeros(3, page.page_bytes, dtype=torch.uint8)
    with pytest.raises(KernelInputError, match=r"layer must lie in \[0, 2\), got 2"):
        page.kv(arena, 2)
    shifted = torch.zeros(3 * page.page_bytes + 8, dtype=torch.uint8)[8:].view(3, page.page_bytes)
    with pytest.raises(KernelInputError, match="arena must start at a multiple of 16 bytes"):
        page.kv(shifted, 0)


def test_docstrings_run() -> None:
    results = doctest.testmod(layout, extraglobs={"torch": torch})
    assert results.attempted > 0
    assert results.failed == 0
