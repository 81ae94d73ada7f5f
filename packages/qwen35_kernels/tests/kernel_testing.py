"""Helpers shared by this package's tests: seeded inputs, guarded buffers, poisoned arenas, bit comparison."""

import math
import os
import random

import torch
from torch import Tensor

from qwen35_kernels import BLOCK_TOKENS, PageLayout, store_kv
from qwen35_kernels.quantisation import quantise_rows

GUARD_BYTES = 256
GUARD = 0xA5


def generator(seed: int) -> torch.Generator:
    """A generator on the device under test; the seed is printed, so that a failure names it."""
    print(f"seed={seed}")
    return torch.Generator(device=torch.get_default_device()).manual_seed(seed)


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals NaN, 0.0 differs from -0.0."""
    return x.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_same_bits(a: Tensor, b: Tensor, message: str = "") -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    differing = int((bits(a) != bits(b)).sum())
    assert differing == 0, f"{differing} bytes differ {message}"


def assert_close(actual: Tensor, expected: Tensor, *, atol: float, rtol: float) -> None:
    """Every element is finite and within atol + rtol * |expected| of a float64 oracle."""
    assert actual.shape == expected.shape
    assert expected.dtype == torch.float64
    assert bool(torch.isfinite(actual).all()), "the result holds NaN, inf or was not written"
    error = (actual.double() - expected).abs() - rtol * expected.abs()
    assert float(error.max()) <= atol if error.numel() else True, f"error {float(error.max())} above {atol}"


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """What one rounding to the dtype, and fp32 arithmetic before it, may cost."""
    return {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 8e-3}


def state_tolerance(dtype: torch.dtype) -> dict[str, float]:
    """For recurrent states: float32's own, except that the kernels multiply bf16 inputs as bf16
    throughout."""
    kernels = os.environ.get("QWEN35_KERNELS_BACKEND") == "triton"
    return tolerance(dtype) if kernels else tolerance(torch.float32)


class GuardedBytes:
    """A byte buffer between two guards; `check()` fails when something wrote past either end."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        size = rows * row_bytes
        self._whole = torch.full((size + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8)
        self.arena = self._whole[GUARD_BYTES : GUARD_BYTES + size].view(rows, row_bytes)

    def check(self) -> None:
        assert bool((self._whole[:GUARD_BYTES] == GUARD).all()), "bytes before the buffer were written"
        assert bool((self._whole[-GUARD_BYTES:] == GUARD).all()), "bytes after the buffer were written"


def nan_arena(layout: PageLayout, num_pages: int) -> GuardedBytes:
    """A page arena that reads as NaN everywhere (0xFF is NaN in every float dtype used, -1 in int8)."""
    guarded = GuardedBytes(num_pages, layout.page_bytes)
    guarded.arena.fill_(0xFF)
    return guarded


def shuffled_tables(seed: int, lengths: list[int], *, spare: int = 3) -> tuple[Tensor, int]:
    """Block tables [N, max_blocks] over shuffled distinct pages, unused entries 0; and the number of
    pages."""
    blocks = [math.ceil(length / BLOCK_TOKENS) for length in lengths]
    num_pages = 1 + sum(blocks) + spare
    pages = list(range(1, num_pages))
    random.Random(seed).shuffle(pages)
    tables = torch.zeros(len(lengths), max([1, *blocks]), dtype=torch.int64)
    for i, count in enumerate(blocks):
        tables[i, :count] = torch.tensor([pages.pop() for _ in range(count)], dtype=torch.int64)
    return tables, num_pages


def store_sequence(
    arena: Tensor, layout: PageLayout, layer: int, table: Tensor, k: Tensor, v: Tensor, *, base: int = 0
) -> None:
    """Store k, v [T, HKV, D] at positions base.. of the sequence with this block table."""
    positions = torch.arange(base, base + k.shape[0])
    pages, rows = table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
    store_kv(k=k, v=v, arena=arena, layout=layout, layer=layer, pages=pages, rows=rows)


def place_sequence(arena: Tensor, layout: PageLayout, layer: int, table: Tensor, k: Tensor, v: Tensor) -> None:
    """The same without the op: for tests of attention that need pages, not of what fills them."""
    for x, view, scales_view, rows_format in (
        (k, layout.k(arena, layer), layout.k_scales(arena, layer), layout.k_format),
        (v, layout.v(arena, layer), layout.v_scales(arena, layer), layout.v_format),
    ):
        values, scales = quantise_rows(x, rows_format)
        for t in range(x.shape[0]):
            page, row = int(table[t // BLOCK_TOKENS]), t % BLOCK_TOKENS
            view[page, :, row] = values[t]
            if scales is not None and scales_view is not None:
                scales_view[page, :, row] = scales[t]


def stored_sequence(arena: Tensor, layout: PageLayout, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The k, v [length, HKV, D] an arena holds, in float64, read row by row with its own arithmetic."""
    planes = (
        (layout.k(arena, layer), layout.k_scales(arena, layer), layout.k_format.name),
        (layout.v(arena, layer), layout.v_scales(arena, layer), layout.v_format.name),
    )
    k, v = (
        torch.stack(
            [_read_row(view, scales, name, int(table[t // BLOCK_TOKENS]), t % BLOCK_TOKENS) for t in range(length)]
        )
        for view, scales, name in planes
    )
    return k, v


def _read_row(view: Tensor, scales: Tensor | None, name: str, page: int, row: int) -> Tensor:
    stored = view[page, :, row]
    if name == "fp4":
        levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        codes = torch.cat([stored % 16, stored // 16], dim=-1).long()
        values = levels[codes % 8] * (1 - 2 * (codes // 8))
    else:
        values = stored.double()
    if scales is None:
        return values
    scale = scales[page, :, row].double()
    return values * scale.repeat_interleave(values.shape[-1] // scale.shape[-1], dim=-1)
