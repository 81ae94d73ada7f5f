"""Writing keys and values into pages."""

import torch
from torch import Tensor

from qwen35_kernels.contracts import FLOAT_DTYPES, check_device, check_dtype, check_index, check_shape
from qwen35_kernels.dispatch import triton_for
from qwen35_kernels.layout import BLOCK_TOKENS, LayerKV
from qwen35_kernels.quantisation import quantise_rows

__all__ = ["store_kv"]


def store_kv(*, k: Tensor, v: Tensor, kv: LayerKV, pages: Tensor, rows: Tensor) -> None:
    """Scatter token t's keys and values into row rows[t] of page pages[t], for one layer.

    k, v [T, HKV, D] in fp32 or bf16; pages, rows int64 [T]. Values are rounded to the profile's dtype.
    (page, row) pairs are distinct, except on scratch page 0, where padding may collide. Only the named rows
    of `kv` are written.
    """
    op = "store_kv"
    tokens = k.shape[0] if k.dim() else 0
    shape = (tokens, kv.layout.num_kv_heads, kv.layout.head_dim)
    for name, x in (("k", k), ("v", v)):
        check_shape(op, name, x, shape)
        check_dtype(op, name, x, FLOAT_DTYPES)
        check_device(op, name, x, kv.device)
    check_index(op, "pages", pages, tokens, begin=0, end=kv.num_pages)
    check_index(op, "rows", rows, tokens, begin=0, end=BLOCK_TOKENS)
    for name, index in (("pages", pages), ("rows", rows)):
        check_device(op, name, index, kv.device)
    backend = triton_for(k)
    if backend is not None:
        backend.kv_store.store_kv(k=k, v=v, kv=kv, pages=pages, rows=rows)
        return
    for x, plane in zip((k, v), (kv.k, kv.v), strict=True):
        values, scales = quantise_rows(x, plane.rows)
        _scatter(plane.values, pages, rows, values)
        if scales is not None and plane.scales is not None:
            _scatter(plane.scales, pages, rows, scales)


def _scatter(view: Tensor, pages: Tensor, rows: Tensor, values: Tensor) -> None:
    # Moved as bytes of a plain integer type: indexed stores do not exist for every float8 dtype.
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()]
    view, values = view.view(plain), values.contiguous().view(plain)
    if pages.shape[0] == 1 and pages.device.type == "cpu":
        view[int(pages), :, int(rows)].copy_(values[0])
    else:
        view[pages, :, rows] = values
