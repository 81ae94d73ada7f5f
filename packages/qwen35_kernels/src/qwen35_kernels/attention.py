"""Attention over pages: many queries (prefill), one query a lane (decode), and the output gate.

o = softmax(q k^T * D**-0.5) v over the keys a query may see, in fp32. Query heads are grouped: H // HKV
consecutive ones share a KV head. Only pages named by a block table count, and of a partial page only its
valid rows: whatever lies in the others, NaN included, has no effect.

A sequence is computed by itself, page by page or tile by tile in an order that its own length fixes, so
that its bits do not depend on the rest of the batch or on the number of threads.
"""

import itertools
from typing import cast

import torch
from torch import Tensor

from qwen35_kernels.attention_tiles import LayerPages, attend_chunk, attend_lanes
from qwen35_kernels.contracts import (
    FLOAT_DTYPES,
    check_device,
    check_dtype,
    check_inner_contiguous,
    check_rank,
    check_shape,
    refuse,
    rounded,
)
from qwen35_kernels.dispatch import triton_for
from qwen35_kernels.elementwise import sigmoid
from qwen35_kernels.layout import LayerKV
from qwen35_kernels.plans import DecodePages, PrefillPages, check_tokens
from qwen35_kernels.workspace import Workspace

__all__ = [
    "attention_gate",
    "merge_attention_states",
    "paged_attention_decode",
    "paged_attention_prefill",
]


def attention_gate(*, o: Tensor, gate: Tensor) -> Tensor:
    """o * sigmoid(gate), elementwise in fp32, in o's dtype. One shape; fp32 or bf16; returns a new tensor.

    Raises:
        KernelInputError: a shape, dtype or device that does not fit.
    """
    check_dtype("attention_gate", "o", o, FLOAT_DTYPES)
    check_dtype("attention_gate", "gate", gate, FLOAT_DTYPES)
    check_shape("attention_gate", "gate", gate, tuple(o.shape))
    check_device("attention_gate", "gate", gate, o.device)
    backend = triton_for(o)
    if backend is not None and o.dim() >= 2:
        return cast(Tensor, backend.rows.attention_gate(o=o, gate=gate))
    return rounded(sigmoid(gate).mul_(o), o.dtype)


def _check(op: str, q: Tensor, kv: LayerKV, pages: PrefillPages | DecodePages) -> None:
    layout, device = kv.layout, kv.device
    check_rank(op, "q", q, 3)
    check_dtype(op, "q", q, FLOAT_DTYPES)
    check_device(op, "q", q, device)
    check_inner_contiguous(op, "q", q)
    if q.shape[2] != layout.head_dim:
        refuse(op, f"q must have head dim {layout.head_dim}", q.shape[2])
    if q.shape[1] < 1 or q.shape[1] % layout.num_kv_heads:
        refuse(op, f"query heads must be a multiple of the {layout.num_kv_heads} KV heads", q.shape[1])
    check_tokens(op, "q", q, pages.num_tokens)
    check_device(op, "block_tables", pages.block_tables, device)
    if kv.num_pages != pages.num_pages:
        refuse(op, f"kv must have the plan's {pages.num_pages} pages", kv.num_pages)


def _check_lse(op: str, lse: Tensor | None, q: Tensor) -> None:
    if lse is not None:
        check_shape(op, "lse", lse, tuple(q.shape[:2]))
        check_dtype(op, "lse", lse, (torch.float32,))
        check_device(op, "lse", lse, q.device)


def paged_attention_prefill(
    *,
    q: Tensor,
    kv: LayerKV,
    pages: PrefillPages,
    lse: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Causal attention of N chunks over their histories and themselves.

    q [T, H, D] in fp32 or bf16, its rows the tokens of `pages`. The chunk's own keys and values are in the
    pages already (`store_kv` ran before): query j of a sequence sees keys 0 .. base + j. Returns o [T, H, D]
    in q's dtype, new and contiguous. Where `lse` (float32 [T, H]) is given, the log of the sum of exp(scaled
    scores) is written to it; nothing else is written.

    Raises:
        KernelInputError: a shape, dtype, stride or device that does not fit, or pages of another number of tokens or
            pages.
    """
    op = "paged_attention_prefill"
    _check(op, q, kv, pages)
    _check_lse(op, lse, q)
    backend = triton_for(q)
    if backend is not None and backend.attention.supported(kv.layout):
        return cast(Tensor, backend.attention.prefill(q=q, kv=kv, pages=pages, lse=lse))
    cache = LayerPages(kv, workspace or Workspace())
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for i, (begin, end) in enumerate(itertools.pairwise(pages.cu_seqlens)):
        if end > begin:
            sums = None if lse is None else lse[begin:end]
            attend_chunk(q[begin:end], cache, pages, i, o[begin:end], sums)
    return o


def paged_attention_decode(
    *,
    q: Tensor,
    kv: LayerKV,
    pages: DecodePages,
    lse: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Attention of one query a lane over the first lengths[b] keys of its pages, its new one included.

    q [B, H, D] in fp32 or bf16. Split over keys in 64-token tiles, one a page, whatever the batch. Returns o
    [B, H, D] in q's dtype, new and contiguous. Where `lse` (float32 [B, H]) is given, the log of the sum of
    exp(scaled scores) is written to it; nothing else is written.

    Raises:
        KernelInputError: a shape, dtype, stride or device that does not fit, or pages of another number of lanes or
            pages.
    """
    op = "paged_attention_decode"
    _check(op, q, kv, pages)
    _check_lse(op, lse, q)
    backend = triton_for(q)
    if backend is not None and backend.attention.supported(kv.layout):
        return cast(Tensor, backend.attention.decode(q=q, kv=kv, pages=pages, lse=lse))
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    if pages.num_tokens:
        attend_lanes(q, LayerPages(kv, workspace or Workspace()), pages, o, lse)
    return o


def merge_attention_states(*, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets, from the attention over each.

    o [P, T, H, D] in fp32 or bf16 and lse float32 [P, T, H] of P partitions of the keys, in any order. With
    m = max(lse): (sum of exp(lse_i - m) o_i / sum of exp(lse_i - m), m + log of that sum). An lse of -inf
    marks a partition without keys, whose o is not read; where all are, o is 0 and lse -inf. Computed in
    fp32. Returns new tensors (o [T, H, D] in o's dtype, lse [T, H]); a token's bits depend on that token
    only.

    Raises:
        KernelInputError: a shape, dtype or device that does not fit, or no partition.
    """
    op = "merge_attention_states"
    check_rank(op, "o", o, 4)
    check_dtype(op, "o", o, FLOAT_DTYPES)
    check_dtype(op, "lse", lse, (torch.float32,))
    check_shape(op, "lse", lse, tuple(o.shape[:3]))
    check_device(op, "lse", lse, o.device)
    if o.shape[0] < 1:
        refuse(op, "there must be at least one partition", o.shape[0])
    backend = triton_for(o)
    if backend is not None:
        return cast(tuple[Tensor, Tensor], backend.attention.merge(o=o, lse=lse))
    peak = lse.amax(0)
    finite_peak = torch.where(peak.isneginf(), 0.0, peak)
    total = torch.zeros_like(peak)
    merged = torch.zeros(o.shape[1:], dtype=torch.float32, device=o.device)
    for part, part_lse in zip(o, lse, strict=True):
        weight = (part_lse - finite_peak).exp_()
        total += weight
        merged += torch.where(weight.unsqueeze(-1) > 0, part.float() * weight.unsqueeze(-1), 0.0)
    merged /= torch.where(total > 0, total, 1.0).unsqueeze(-1)
    return merged.to(o.dtype), finite_peak + total.log()
