"""Attention over pages: many queries (prefill), one query a lane (decode), and the output gate.

o = softmax(q k^T * D**-0.5) v over the keys a query may see, in fp32. Query heads are grouped: H // HKV
consecutive ones share a KV head. Only pages named by a block table are read, and of a partial page only its
valid rows: whatever lies in the others, NaN included, has no effect.

A sequence is computed by itself, page by page or tile by tile in an order that its own length fixes, so
that its bits do not depend on the rest of the batch or on the number of threads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen35_kernels.contracts import (
    FLOAT_DTYPES,
    check_device,
    check_dtype,
    check_inner_contiguous,
    check_rank,
    check_shape,
    refuse,
)
from qwen35_kernels.elementwise import sigmoid
from qwen35_kernels.layout import BLOCK_TOKENS, PageLayout
from qwen35_kernels.sequences import check_cu_seqlens

__all__ = ["attention_gate", "paged_attention_decode", "paged_attention_prefill"]

# Keys handled at once in prefill; fixed, so that the order of sums depends on nothing but the length.
_KEYS_PER_TILE = 2048
_QUERIES_PER_TILE = 128


def attention_gate(*, o: Tensor, gate: Tensor) -> Tensor:
    """o * sigmoid(gate), elementwise in fp32, in o's dtype. One shape; fp32 or bf16; returns a new tensor."""
    check_dtype("attention_gate", "o", o, FLOAT_DTYPES)
    check_dtype("attention_gate", "gate", gate, FLOAT_DTYPES)
    check_shape("attention_gate", "gate", gate, tuple(o.shape))
    check_device("attention_gate", "gate", gate, o.device)
    return sigmoid(gate).mul_(o).to(o.dtype)


def _check(op: str, q: Tensor, arena: Tensor, layout: PageLayout, block_tables: Tensor) -> None:
    layout.check_arena(op, arena)
    check_rank(op, "q", q, 3)
    check_dtype(op, "q", q, FLOAT_DTYPES)
    check_device(op, "q", q, arena.device)
    check_inner_contiguous(op, "q", q)
    if q.shape[2] != layout.head_dim:
        refuse(op, f"q must have head dim {layout.head_dim}", q.shape[2])
    if q.shape[1] < 1 or q.shape[1] % layout.num_kv_heads:
        refuse(op, f"query heads must be a multiple of the {layout.num_kv_heads} KV heads", q.shape[1])
    check_rank(op, "block_tables", block_tables, 2)
    check_dtype(op, "block_tables", block_tables, (torch.int64,))
    check_device(op, "block_tables", block_tables, arena.device)


def _pages_of(op: str, table: Tensor, length: int, num_pages: int) -> Tensor:
    """The pages that hold `length` tokens, checked: inside the arena, and none of them scratch."""
    blocks = -(-length // BLOCK_TOKENS)
    if blocks > table.shape[0]:
        refuse(op, f"block_tables must cover {length} tokens", table.shape[0] * BLOCK_TOKENS)
    pages = table[:blocks]
    if blocks and pages.device.type == "cpu":
        low, high = (int(value) for value in torch.aminmax(pages))
        if low < 1 or high >= num_pages:
            refuse(op, f"pages must lie in [1, {num_pages}) (page 0 is scratch)", low if low < 1 else high)
    return pages


def paged_attention_prefill(
    *,
    q: Tensor,
    arena: Tensor,
    layout: PageLayout,
    layer: int,
    block_tables: Tensor,
    cu_seqlens: Sequence[int],
    bases: Sequence[int],
) -> Tensor:
    """Causal attention of N chunks over their histories and themselves.

    q [T, H, D] in fp32 or bf16, sequence i owning rows [cu_seqlens[i], cu_seqlens[i + 1]) at positions from
    bases[i] on; block_tables int64 [N, max_blocks]. The chunk's own keys and values are in the pages already
    (`store_kv` ran before): query j of a sequence sees keys 0 .. base + j. Returns o [T, H, D] in q's
    dtype, new and contiguous; nothing else is written.
    """
    op = "paged_attention_prefill"
    _check(op, q, arena, layout, block_tables)
    num = block_tables.shape[0]
    check_cu_seqlens(op, cu_seqlens, num, q.shape[0])
    if len(bases) != num:
        refuse(op, f"bases must have {num} entries", len(bases))
    if any(base < 0 for base in bases):
        refuse(op, "bases must not be negative", tuple(bases))
    lengths = [
        base + end - begin if end > begin else 0
        for base, begin, end in zip(bases, cu_seqlens, cu_seqlens[1:], strict=False)
    ]
    pages = [_pages_of(op, block_tables[i], lengths[i], arena.shape[0]) for i in range(num)]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_pages, v_pages = layout.k(arena, layer), layout.v(arena, layer)
    for i in range(num):
        if lengths[i]:
            k = _gather_heads(k_pages, pages[i], lengths[i])
            v = _gather_heads(v_pages, pages[i], lengths[i])
            window = slice(cu_seqlens[i], cu_seqlens[i + 1])
            _attend(q[window], k, v, bases[i], o[window])
    return o


def _gather_heads(view: Tensor, pages: Tensor, length: int) -> Tensor:
    """Pages of a [P, HKV, 64, D] view as float32 [HKV, length, D]."""
    gathered = view.transpose(0, 1).index_select(1, pages)
    return gathered.flatten(1, 2)[:, :length].float()


def _attend(q: Tensor, k: Tensor, v: Tensor, base: int, o: Tensor) -> None:
    """Softmax attention of q [T, H, D] over k, v [HKV, L, D]; maximum and sum are carried over key tiles."""
    heads, dim = q.shape[1:]
    groups = heads // k.shape[0]
    for head in range(k.shape[0]):
        for begin in range(0, q.shape[0], _QUERIES_PER_TILE):
            end = min(begin + _QUERIES_PER_TILE, q.shape[0])
            queries = q[begin:end, head * groups : (head + 1) * groups].float() * dim**-0.5
            rows = queries.reshape(-1, dim)
            position = torch.arange(base + begin, base + end, device=q.device).repeat_interleave(groups)
            peak = torch.full((rows.shape[0], 1), float("-inf"), device=q.device)
            total = torch.zeros_like(peak)
            mixed = torch.zeros(rows.shape[0], dim, device=q.device)
            for first in range(0, base + end, _KEYS_PER_TILE):
                last = min(first + _KEYS_PER_TILE, base + end)
                scores = rows @ k[head, first:last].t()
                if last > base + begin + 1:
                    keys = torch.arange(first, last, device=q.device)
                    scores.masked_fill_(keys > position.unsqueeze(1), float("-inf"))
                # Tile 0 holds key 0, which every query sees: the running maximum is finite from there on.
                new_peak = torch.maximum(peak, scores.amax(1, keepdim=True))
                weights = scores.sub_(new_peak).exp_()
                shrink = (peak - new_peak).exp_()
                total = total * shrink + weights.sum(1, keepdim=True)
                mixed = torch.addmm(mixed * shrink, weights, v[head, first:last])
                peak = new_peak
            o[begin:end, head * groups : (head + 1) * groups] = (mixed / total).view(queries.shape)


def paged_attention_decode(
    *,
    q: Tensor,
    arena: Tensor,
    layout: PageLayout,
    layer: int,
    block_tables: Tensor,
    lengths: Tensor,
) -> Tensor:
    """Attention of one query a lane over the first lengths[b] keys of its pages.

    q [B, H, D] in fp32 or bf16; block_tables int64 [B, max_blocks]; lengths int64 [B], the keys a lane
    sees, its new one included, at least 1. Split over keys in 64-token tiles, one a page, whatever the
    batch. Returns o [B, H, D] in q's dtype, new and contiguous; nothing else is written.
    """
    op = "paged_attention_decode"
    _check(op, q, arena, layout, block_tables)
    lanes, heads, dim = q.shape
    check_shape(op, "block_tables", block_tables, (lanes, block_tables.shape[1]))
    check_shape(op, "lengths", lengths, (lanes,))
    check_dtype(op, "lengths", lengths, (torch.int64,))
    counts = lengths.tolist()
    for count in counts:
        if count < 1:
            refuse(op, "lengths must be at least 1", count)
    tables = [_pages_of(op, block_tables[b], counts[b], arena.shape[0]) for b in range(lanes)]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if lanes == 0:
        return o
    pages = torch.cat(tables)
    ends = torch.tensor([len(table) for table in tables]).cumsum(0).tolist()
    k = layout.k(arena, layer).index_select(0, pages).float()
    v = layout.v(arena, layer).index_select(0, pages).float()
    kv_heads = k.shape[1]
    lane_of = torch.repeat_interleave(torch.tensor([len(t) for t in tables], device=q.device))
    queries = (q.float() * dim**-0.5).view(lanes, kv_heads, heads // kv_heads, dim).index_select(0, lane_of)
    scores = torch.bmm(queries.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    scores = scores.view(len(pages), kv_heads, heads // kv_heads, BLOCK_TOKENS)
    for b, count in enumerate(counts):
        used = count % BLOCK_TOKENS
        if used:
            scores[ends[b] - 1, :, :, used:] = float("-inf")
            v[ends[b] - 1, :, used:] = 0.0
    begin = 0
    for end in ends:
        scores[begin:end] -= scores[begin:end].amax((0, 3), keepdim=True)
        begin = end
    weights = scores.exp_()
    sums = weights.sum(3, keepdim=True)
    mixed = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).view(len(pages), kv_heads, -1, dim)
    begin = 0
    for b, end in enumerate(ends):
        o[b] = (mixed[begin:end].sum(0) / sums[begin:end].sum(0)).view(heads, dim)
        begin = end
    return o
