"""Writing keys and values into pages."""

from torch import Tensor

from qwen35_kernels.contracts import FLOAT_DTYPES, check_device, check_dtype, check_index, check_shape, refuse
from qwen35_kernels.layout import BLOCK_TOKENS, KVProfile, PageLayout

__all__ = ["store_kv"]


def store_kv(
    *, k: Tensor, v: Tensor, arena: Tensor, layout: PageLayout, layer: int, pages: Tensor, rows: Tensor
) -> None:
    """Scatter token t's keys and values into row rows[t] of page pages[t], for one layer.

    k, v [T, HKV, D] in fp32 or bf16; arena uint8 [P, page_bytes]; pages, rows int64 [T]. Values are rounded
    to the profile's dtype. (page, row) pairs are distinct, except on scratch page 0, where padding may
    collide. Only the named rows are written.
    """
    op = "store_kv"
    layout.check_arena(op, arena)
    tokens = k.shape[0] if k.dim() else 0
    shape = (tokens, layout.num_kv_heads, layout.head_dim)
    for name, x in (("k", k), ("v", v)):
        check_shape(op, name, x, shape)
        check_dtype(op, name, x, FLOAT_DTYPES)
        check_device(op, name, x, arena.device)
    check_index(op, "pages", pages, tokens, begin=0, end=arena.shape[0])
    check_index(op, "rows", rows, tokens, begin=0, end=BLOCK_TOKENS)
    for name, index in (("pages", pages), ("rows", rows)):
        check_device(op, name, index, arena.device)
    if layout.profile not in (KVProfile.BF16, KVProfile.FP32):
        refuse(op, "profile must be bf16 or fp32", layout.profile.value)
    for x, view in ((k, layout.k(arena, layer)), (v, layout.v(arena, layer))):
        view[pages, :, rows] = x.to(view.dtype)
