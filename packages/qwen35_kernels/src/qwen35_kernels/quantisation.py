"""How rows of keys and values become the bytes of a KV profile, and back.

A row is one token of one head. With s the stored scale of a group of dims, rounded to its own dtype first:

    int8   s = fp16(max|x| / 127) per 64 dims       q = round(x / s) in [-127, 127]
    fp8    s = fp16(max|x| / 448) per row           q = e4m3(x / s), saturating
    fp4    s = e4m3(max|x| / 6) per 16 dims         q = nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign

Ties go to the even code. A group whose scale rounds to zero is stored as zeros; scales saturate at their
dtype's largest number. fp4 has no second scale per tensor (the record has no bytes for one), so groups
below max|x| = 0.006 vanish and numbers above 2,688 saturate: keys and values of normed models lie well
inside. Packed nibbles hold dim i in the low half and dim i + D/2 in the high half of byte i.
"""

import torch
from torch import Tensor

from qwen35_kernels.layout import PlaneFormat

__all__ = ["dequantise_rows", "quantise_rows"]

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.uint8: 6.0}
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantise_rows(x: Tensor, rows: PlaneFormat) -> tuple[Tensor, Tensor | None]:
    """(values, scales) of x [..., D] as `rows` stores them: [..., D or D/2] and [..., scales], or None."""
    if rows.scale_dtype is None:
        return x.to(rows.value_dtype), None
    dim = x.shape[-1]
    grouped = x.float().reshape(*x.shape[:-1], rows.row_scales(dim), -1)
    largest = _LARGEST[rows.value_dtype]
    wanted = grouped.abs().amax(-1, keepdim=True).div_(largest)
    scales = wanted.clamp_(max=torch.finfo(rows.scale_dtype).max).to(rows.scale_dtype)
    divisor = scales.float()
    scaled = torch.where(divisor > 0, grouped / divisor, 0.0).clamp_(-largest, largest).flatten(-2)
    if rows.value_dtype == torch.int8:
        values = scaled.round_().to(torch.int8)
    elif rows.value_dtype == torch.float8_e4m3fn:
        values = scaled.to(torch.float8_e4m3fn)
    else:
        codes = _fp4_codes(scaled)
        values = codes[..., : dim // 2] | (codes[..., dim // 2 :] << 4)
    return values, scales.squeeze(-1)


def _fp4_codes(x: Tensor) -> Tensor:
    """Codes 0..7 by counting the midpoints below |x| (a midpoint itself goes to its even neighbour), plus
    8."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    for midpoint, even_is_above in ((0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += (size >= midpoint) if even_is_above else (size > midpoint)
    return code + torch.signbit(x).to(torch.uint8) * 8


def dequantise_rows(values: Tensor, scales: Tensor | None, rows: PlaneFormat) -> Tensor:
    """float32 [..., D] of stored values and scales; exact, as every product fits float32."""
    if scales is None:
        return values.float()
    if rows.values_per_byte == 2:
        table = torch.tensor(_FP4_VALUES + tuple(-x for x in _FP4_VALUES), device=values.device)
        codes = torch.cat([values & 15, values >> 4], dim=-1).int()
        plain = table.index_select(0, codes.flatten()).view(codes.shape)
    else:
        plain = values.float()
    grouped = plain.view(*scales.shape, -1)
    return grouped.mul_(scales.float().unsqueeze(-1)).flatten(-2)
