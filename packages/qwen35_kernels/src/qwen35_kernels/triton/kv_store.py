"""Quantising and scattering keys and values. The formulas are those of `qwen35_kernels.quantisation`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qwen35_kernels.layout import BLOCK_TOKENS, LayerKV
from qwen35_kernels.triton.launch import Launch, power_of_2, run

__all__ = ["plan_store_kv", "store_kv"]


@triton.jit
def _divide(x, scale):
    """x / scale correctly rounded, 0 where the scale is 0 (or not a number)."""
    usable = scale > 0
    return tl.where(usable, tl.div_rn(x, tl.where(usable, scale, 1.0)), 0.0)


@triton.jit
def _round_even(x):
    """Nearest integer, ties to even, for |x| < 2^22: what is added pushes the fraction out of the
    mantissa."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _fp4_codes(x):
    """Code of the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6; a midpoint goes to its even neighbour; bit 3 is
    the sign."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    # Of -0.0 too: its bits are negative as an integer.
    return code + tl.where(x.to(tl.int32, bitcast=True) < 0, 8, 0)


@triton.jit
def _e4m3_code(x):
    """Bits of the nearest e4m3 number, ties to even, for |x| <= 448: by integers, so that no cast's rounding
    matters. Below 2^-6 numbers are multiples of 2^-9."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 120 * 8
    small = _round_even(tl.abs(x) * 512.0).to(tl.int32)
    code = tl.where(tl.abs(x) < 0.015625, small, normal)
    return code + tl.where(bits < 0, 128, 0)


@triton.jit
def _e4m3_value(code):
    """The non-negative number behind e4m3 bits."""
    normal = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _bf16_bits(x):
    """Bits of the nearest bfloat16, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def _has_nan(x):
    """Per line: a maximum passes over numbers that are none."""
    return tl.sum(tl.where(x != x, 1, 0), axis=1) > 0


@triton.jit
def store_rows(
    x_ptr,
    values_ptr,
    scales_ptr,
    pages_ptr,
    rows_ptr,
    stride_token,
    stride_head,
    values_page,
    scales_page,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Dims are handled as [GROUPS, GROUP]: one scale a line."""
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page, row = tl.load(pages_ptr + i_t), tl.load(rows_ptr + i_t)
    group = tl.arange(0, GROUPS)
    dim = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = dim < D
    line = i_h * BLOCK + row
    source = x_ptr + i_t * stride_token + i_h * stride_head
    if FORMAT == "plain":
        b_x = tl.load(source + dim, mask=mask, other=0.0)
        out = values_ptr + page * values_page + line * D + dim
        tl.store(out, b_x.to(values_ptr.dtype.element_ty), mask=mask)
    elif FORMAT == "bf16":
        b_x = tl.load(source + dim, mask=mask, other=0.0)
        tl.store(values_ptr + page * values_page + line * D + dim, _bf16_bits(b_x), mask=mask)
    elif FORMAT == "fp4":
        # Low and high nibbles are the two halves of the row, each a whole number of groups.
        half = D // 2
        packed = tl.zeros([GROUPS, GROUP], dtype=tl.int32)
        for part in tl.static_range(2):
            inside = dim < half
            b_x = tl.load(source + part * half + dim, mask=inside, other=0.0).to(tl.float32)
            wanted = tl.div_rn(tl.max(tl.abs(b_x), axis=1), 6.0)
            scale_code = _e4m3_code(tl.minimum(wanted, 448.0))
            scaled = _divide(b_x, _e4m3_value(scale_code)[:, None])
            packed += _fp4_codes(tl.minimum(tl.maximum(scaled, -6.0), 6.0)) << (4 * part)
            scale_out = scales_ptr + page * scales_page + line * (D // GROUP) + part * (half // GROUP) + group
            scale_code = tl.where(_has_nan(b_x), 0x7F, scale_code)
            tl.store(scale_out, scale_code.to(tl.uint8), mask=group < half // GROUP)
        out = values_ptr + page * values_page + line * half + dim
        tl.store(out, packed.to(tl.uint8), mask=dim < half)
    else:
        b_x = tl.load(source + dim, mask=mask, other=0.0).to(tl.float32)
        LARGEST: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
        wanted = tl.div_rn(tl.max(tl.abs(b_x), axis=1), LARGEST)
        b_s = tl.minimum(wanted, 65504.0).to(tl.float16)
        scaled = _divide(b_x, b_s.to(tl.float32)[:, None])
        scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
        out = values_ptr + page * values_page + line * D + dim
        if FORMAT == "int8":
            tl.store(out, _round_even(scaled).to(tl.int8), mask=mask)
        else:
            tl.store(out, _e4m3_code(scaled).to(tl.uint8), mask=mask)
        scale_out = scales_ptr + page * scales_page + line * (D // GROUP) + group
        b_s = tl.where(_has_nan(b_x), float("nan"), b_s.to(tl.float32)).to(tl.float16)
        tl.store(scale_out, b_s, mask=group < D // GROUP)


def plan_store_kv(*, k: Tensor, v: Tensor, kv: LayerKV, pages: Tensor, rows: Tensor) -> tuple[Launch, ...]:
    """k and v dense in their last axis."""
    dim = kv.layout.head_dim
    launches = []
    for x, (rows_format, values, scales) in zip((k, v), (kv.k, kv.v), strict=True):
        form = rows_format.name if scales is not None or x.dtype != values.dtype else "plain"
        form = "plain" if form == "fp32" else form
        group = power_of_2(dim) if scales is None else dim // rows_format.row_scales(dim)
        lines = dim // group // rows_format.values_per_byte if scales is not None else 1
        constants: dict[str, Any] = {
            "D": dim,
            "BLOCK": BLOCK_TOKENS,
            "FORMAT": form,
            "GROUP": group,
            "GROUPS": power_of_2(lines),
        }
        # A format without scales gets the values again, as an argument that is not read.
        scales = values if scales is None else scales
        # Small floats are written as the integers they are.
        values, scales = _as_integers(values, form), _as_integers(scales, form)
        launches.append(
            Launch(
                kernel=store_rows,
                grid=(x.shape[0], kv.layout.num_kv_heads, 1),
                arguments={
                    "x_ptr": x,
                    "values_ptr": values,
                    "scales_ptr": scales,
                    "pages_ptr": pages,
                    "rows_ptr": rows,
                    "stride_token": x.stride(0),
                    "stride_head": x.stride(1),
                    "values_page": values.stride(0),
                    "scales_page": scales.stride(0),
                },
                constants=constants,
                num_warps=1,
            )
        )
    return tuple(launches)


def _as_integers(x: Tensor, form: str) -> Tensor:
    if x.dtype == torch.float8_e4m3fn:
        return x.view(torch.uint8)
    return x.view(torch.int16) if form == "bf16" else x


def store_kv(*, k: Tensor, v: Tensor, kv: LayerKV, pages: Tensor, rows: Tensor) -> None:
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    run(plan_store_kv(k=k, v=v, kv=kv, pages=pages, rows=rows))
