"""Writing keys and values into pages."""

import torch
from torch import Tensor

from qwen35_kernels.contracts import FLOAT_DTYPES, check_device, check_dtype, check_shape, refuse
from qwen35_kernels.dispatch import triton_for
from qwen35_kernels.layout import LayerKV
from qwen35_kernels.plans import TokenRows
from qwen35_kernels.quantisation import quantise_rows

__all__ = ["store_kv"]


def store_kv(*, k: Tensor, v: Tensor, kv: LayerKV, rows: TokenRows) -> None:
    """Scatter each token's keys and values into its row of its page, for one layer.

    k, v [T, HKV, D] in fp32 or bf16. Values are rounded to the profile's dtype. Only the named rows of `kv`
    are written.

    Raises:
        KernelInputError: a shape, dtype or device that does not fit, or rows of another number of tokens or pages.
    """
    op = "store_kv"
    shape = (rows.num_tokens, kv.layout.num_kv_heads, kv.layout.head_dim)
    for name, x in (("k", k), ("v", v)):
        check_shape(op, name, x, shape)
        check_dtype(op, name, x, FLOAT_DTYPES)
        check_device(op, name, x, kv.device)
    check_device(op, "rows", rows.pages, kv.device)
    if kv.num_pages != rows.num_pages:
        refuse(op, f"kv must have the rows' {rows.num_pages} pages", kv.num_pages)
    backend = triton_for(k)
    if backend is not None:
        backend.kv_store.store_kv(k=k, v=v, kv=kv, pages=rows.pages, rows=rows.rows)
        return
    for x, plane in zip((k, v), (kv.k, kv.v), strict=True):
        values, scales = quantise_rows(x, plane.rows)
        _scatter(plane.values, rows, values)
        if scales is not None and plane.scales is not None:
            _scatter(plane.scales, rows, scales)


def _scatter(view: Tensor, rows: TokenRows, values: Tensor) -> None:
    # Moved as bytes of a plain integer type: indexed stores do not exist for every float8 dtype.
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()]
    view, values = view.view(plain), values.contiguous().view(plain)
    if rows.only is not None:
        page, row = rows.only
        view[page, :, row].copy_(values[0])
    else:
        view[rows.pages, :, rows.rows] = values
