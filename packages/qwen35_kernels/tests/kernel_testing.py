"""Helpers shared by this package's tests: seeded inputs, guarded buffers, poisoned arenas, bit comparison."""

import collections
import contextlib
import functools
import math
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from qwen35_kernels import (
    BLOCK_TOKENS,
    DecodePages,
    DecodeStates,
    LayerKV,
    PageLayout,
    PrefillPages,
    PrefillStates,
    StateTap,
    TokenRows,
    causal_conv1d_prefill,
    causal_conv1d_step,
    gated_delta_rule_prefill,
    gated_delta_rule_step,
    paged_attention_decode,
    paged_attention_prefill,
    store_kv,
)
from qwen35_kernels.quantisation import quantise_rows

# What `torch.empty` is outside tests.
_plain_empty = torch.empty
GUARD_BYTES = 512
# A guard's bytes by turns: NaN in every float dtype of two bytes and more, and not what poisons the inside.
_GUARD = (0xC5, 0x7F)


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


def _guards(whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a guard holds, and the guards before and after a buffer of bytes."""
    pattern = torch.tensor(_GUARD, dtype=torch.uint8, device=whole.device).repeat(GUARD_BYTES // len(_GUARD))
    return pattern, whole[:GUARD_BYTES], whole[-GUARD_BYTES:]


def _guarded(size_bytes: int, device: Any) -> Tensor:
    """Bytes that read as NaN (0xFF is NaN in every float dtype used, -1 in int8) between two guards."""
    whole = _plain_empty(size_bytes + 2 * GUARD_BYTES, dtype=torch.uint8, device=device).fill_(0xFF)
    pattern, before, after = _guards(whole)
    before.copy_(pattern)
    after.copy_(pattern)
    return whole


def _check_guards(whole: Tensor) -> None:
    pattern, before, after = _guards(whole)
    assert torch.equal(before, pattern), "bytes before a buffer were written"
    assert torch.equal(after, pattern), "bytes after a buffer were written"


class GuardedMemory:
    """Hands out buffers that read as NaN, each between two guards that do so too.

    `check` fails when something wrote past either end of a buffer. What was handed out longest ago is checked and let
    go of as soon as a limit of bytes is reached.
    """

    _KEPT_BYTES = 2**25
    # Larger buffers are only touched in places, so that they need no memory: they stay as they come.
    _LARGEST_BYTES = 2**28

    def __init__(self) -> None:
        self._kept: collections.deque[Tensor] = collections.deque()
        self._kept_bytes = 0

    def empty(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Tensor:
        """In place of `torch.empty`."""
        plain = functools.partial(_plain_empty, device=device or torch.get_default_device())
        dtype = dtype or torch.get_default_dtype()
        shape = plain(*size, dtype=torch.bool, device="meta").shape
        size_bytes = shape.numel() * dtype.itemsize
        if more or size_bytes > self._LARGEST_BYTES or torch.device(plain.keywords["device"]).type == "meta":
            return plain(*size, dtype=dtype, **more)
        whole = _guarded(size_bytes, plain.keywords["device"])
        inside = whole[GUARD_BYTES : GUARD_BYTES + size_bytes]
        self._kept.append(whole)
        self._kept_bytes += len(whole)
        while self._kept_bytes > self._KEPT_BYTES:
            self._check_oldest()
        return inside.view(dtype).view(shape)

    def empty_like(self, x: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """In place of `torch.empty_like`."""
        assert memory_format is torch.contiguous_format
        return self.empty(x.shape, dtype=x.dtype, device=x.device)

    def check(self) -> None:
        while self._kept:
            self._check_oldest()

    def _check_oldest(self) -> None:
        whole = self._kept.popleft()
        self._kept_bytes -= len(whole)
        _check_guards(whole)


# Arguments that span more bytes are not copied: arenas touched only in places.
_LARGEST_SPAN_BYTES = 2**24


@contextlib.contextmanager
def guarded_arguments(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of a launch with every tensor, read or written, in a copy between guards.

    Tensors that share memory share a copy. Whatever lies between their elements there (the rest of a row of a view,
    other layers, other parts of a record) reads as NaN, as the guards do: a load past a mask shows in the result, and
    a store outside of the arguments' elements fails at the end. The results are copied back.
    """
    shared: dict[int, list[str]] = {}
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.numel():
            shared.setdefault(x.untyped_storage().data_ptr(), []).append(name)
    copies: dict[str, Tensor] = {}
    wholes = []
    for names in shared.values():
        tensors = [arguments[name] for name in names]
        begin = min(x.data_ptr() for x in tensors) // 16 * 16
        size_bytes = max(x.data_ptr() + _span_bytes(x) for x in tensors) - begin
        if size_bytes > _LARGEST_SPAN_BYTES:
            continue
        wholes.append(whole := _guarded(size_bytes, tensors[0].device))
        for name, x in zip(names, tensors, strict=True):
            offset = (GUARD_BYTES + x.data_ptr() - begin) // x.element_size()
            copies[name] = _plain_empty(0, dtype=x.dtype, device=x.device).set_(
                whole.untyped_storage(), offset, x.shape, x.stride()
            )
            copies[name].copy_(x)
    yield arguments | copies
    for name, copy in copies.items():
        if 0 not in copy.stride():
            arguments[name].copy_(copy)
    for copy in copies.values():
        copy.view(_INTEGERS[copy.element_size()]).fill_(-1)
    for whole in wholes:
        _check_guards(whole)
        assert bool((whole[GUARD_BYTES:-GUARD_BYTES] == 0xFF).all()), "bytes between a tensor's elements were written"


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _span_bytes(x: Tensor) -> int:
    """From a tensor's first byte to its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


class GuardedBytes:
    """Records that read as NaN, between guards of their own."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self._memory = GuardedMemory()
        self.arena = self._memory.empty(rows, row_bytes, dtype=torch.uint8)

    def check(self) -> None:
        self._memory.check()


def distant_rows(row_bytes: int, count: int, *, element_bytes: int) -> tuple[Tensor, int]:
    """An arena whose last `count` rows begin beyond 2^31 elements, and the number of the first of them.

    Rows that are not touched take no memory; where not even their addresses can be had, the test is skipped.
    """
    first = 2**31 * element_bytes // row_bytes + 1
    try:
        return torch.empty(first + count, row_bytes, dtype=torch.uint8), first
    except RuntimeError as error:
        pytest.skip(f"{first * row_bytes} bytes of addresses: {error}")


def nan_arena(layout: PageLayout, num_pages: int) -> GuardedBytes:
    """A page arena that reads as NaN everywhere."""
    return GuardedBytes(num_pages, layout.page_bytes)


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
    store(k=k, v=v, kv=layout.kv(arena, layer), pages=pages, rows=rows)


def place_sequence(arena: Tensor, layout: PageLayout, layer: int, table: Tensor, k: Tensor, v: Tensor) -> None:
    """The same without the op: for tests of attention that need pages, not of what fills them."""
    kv = layout.kv(arena, layer)
    for x, (rows_format, view, scales_view) in ((k, kv.k), (v, kv.v)):
        values, scales = quantise_rows(x, rows_format)
        for t in range(x.shape[0]):
            page, row = int(table[t // BLOCK_TOKENS]), t % BLOCK_TOKENS
            view[page, :, row] = values[t]
            if scales is not None and scales_view is not None:
                scales_view[page, :, row] = scales[t]


def stored_sequence(arena: Tensor, layout: PageLayout, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The k, v [length, HKV, D] an arena holds, in float64, read row by row with its own arithmetic."""
    kv = layout.kv(arena, layer)
    k, v = (
        torch.stack(
            [_read_row(view, scales, rows.name, int(table[t // BLOCK_TOKENS]), t % BLOCK_TOKENS) for t in range(length)]
        )
        for rows, view, scales in (kv.k, kv.v)
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


# -- ops with a plan of their own, as one layer alone would make it ------------------------------------------------


def prefill_states(
    arena: Tensor, slots: Sequence[int], cu_seqlens: Sequence[int], bases: Sequence[int], taps: Sequence[StateTap] = ()
) -> PrefillStates:
    return PrefillStates(slots=slots, cu_seqlens=cu_seqlens, bases=bases, taps=taps, num_slots=len(arena))


def conv_prefill(*, x: Tensor, weight: Tensor, history: Tensor, **where: Any) -> Tensor:
    return causal_conv1d_prefill(x=x, weight=weight, history=history, states=prefill_states(history, **where))


def conv_step(*, x: Tensor, weight: Tensor, history: Tensor, slots: Tensor) -> Tensor:
    states = DecodeStates(slots=slots, num_slots=len(history))
    return causal_conv1d_step(x=x, weight=weight, history=history, states=states)


def delta_prefill(
    *,
    state: Tensor,
    slots: Sequence[int],
    cu_seqlens: Sequence[int],
    bases: Sequence[int],
    taps: Sequence[StateTap] = (),
    **inputs: Any,
) -> Tensor:
    states = prefill_states(state, slots, cu_seqlens, bases, taps)
    return gated_delta_rule_prefill(**inputs, state=state, states=states)


def delta_step(*, state: Tensor, slots: Tensor, **inputs: Tensor) -> Tensor:
    return gated_delta_rule_step(**inputs, state=state, states=DecodeStates(slots=slots, num_slots=len(state)))


def attention_prefill(
    *, kv: LayerKV, block_tables: Tensor, cu_seqlens: Sequence[int], bases: Sequence[int], **inputs: Any
) -> Tensor:
    pages = PrefillPages(block_tables=block_tables, cu_seqlens=cu_seqlens, bases=bases, num_pages=kv.num_pages)
    return paged_attention_prefill(**inputs, kv=kv, pages=pages)


def attention_decode(*, kv: LayerKV, block_tables: Tensor, lengths: Tensor, **inputs: Any) -> Tensor:
    pages = DecodePages(block_tables=block_tables, lengths=lengths, num_pages=kv.num_pages)
    return paged_attention_decode(**inputs, kv=kv, pages=pages)


def store(*, k: Tensor, v: Tensor, kv: LayerKV, pages: Tensor, rows: Tensor) -> None:
    store_kv(k=k, v=v, kv=kv, rows=TokenRows(pages=pages, rows=rows, num_pages=kv.num_pages))
