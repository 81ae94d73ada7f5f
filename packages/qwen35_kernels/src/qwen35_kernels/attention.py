"""Attention over pages: many queries (prefill), one query a lane (decode), and the output gate.

o = softmax(q k^T * D**-0.5) v over the keys a query may see, in fp32. Query heads are grouped: H // HKV
consecutive ones share a KV head. Only pages named by a block table are read, and of a partial page only its
valid rows: whatever lies in the others, NaN included, has no effect.

A sequence is computed by itself, page by page or tile by tile in an order that its own length fixes, so
that its bits do not depend on the rest of the batch or on the number of threads.
"""

import itertools
from collections.abc import Sequence
from typing import cast

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
from qwen35_kernels.dispatch import triton_for
from qwen35_kernels.elementwise import LOG2_E, exp2_, sigmoid
from qwen35_kernels.layout import BLOCK_TOKENS, PageLayout, PlaneFormat
from qwen35_kernels.quantisation import dequantise_rows
from qwen35_kernels.sequences import check_cu_seqlens
from qwen35_kernels.workspace import Workspace

__all__ = [
    "attention_gate",
    "merge_attention_states",
    "paged_attention_decode",
    "paged_attention_prefill",
]

# Keys handled at once in prefill, and rows of scores (queries times heads): fixed, so that the order of sums
# depends on nothing but positions.
_KEYS_PER_TILE = 512
_ROWS_PER_TILE = 1024


def attention_gate(*, o: Tensor, gate: Tensor) -> Tensor:
    """o * sigmoid(gate), elementwise in fp32, in o's dtype. One shape; fp32 or bf16; returns a new tensor."""
    check_dtype("attention_gate", "o", o, FLOAT_DTYPES)
    check_dtype("attention_gate", "gate", gate, FLOAT_DTYPES)
    check_shape("attention_gate", "gate", gate, tuple(o.shape))
    check_device("attention_gate", "gate", gate, o.device)
    backend = triton_for(o)
    if backend is not None and o.dim() >= 2:
        return cast(Tensor, backend.rows.attention_gate(o=o, gate=gate))
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


def _check_lse(op: str, lse: Tensor | None, q: Tensor) -> None:
    if lse is not None:
        check_shape(op, "lse", lse, tuple(q.shape[:2]))
        check_dtype(op, "lse", lse, (torch.float32,))
        check_device(op, "lse", lse, q.device)


def paged_attention_prefill(
    *,
    q: Tensor,
    arena: Tensor,
    layout: PageLayout,
    layer: int,
    block_tables: Tensor,
    cu_seqlens: Sequence[int],
    bases: Sequence[int],
    lse: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Causal attention of N chunks over their histories and themselves.

    q [T, H, D] in fp32 or bf16, sequence i owning rows [cu_seqlens[i], cu_seqlens[i + 1]) at positions from
    bases[i] on; block_tables int64 [N, max_blocks]. The chunk's own keys and values are in the pages already
    (`store_kv` ran before): query j of a sequence sees keys 0 .. base + j. Returns o [T, H, D] in q's dtype,
    new and contiguous. Where `lse` (float32 [T, H]) is given, the log of the sum of exp(scaled scores) is
    written to it; nothing else is written.
    """
    op = "paged_attention_prefill"
    _check(op, q, arena, layout, block_tables)
    _check_lse(op, lse, q)
    num = block_tables.shape[0]
    check_cu_seqlens(op, cu_seqlens, num, q.shape[0])
    if len(bases) != num:
        refuse(op, f"bases must have {num} entries", len(bases))
    if any(base < 0 for base in bases):
        refuse(op, "bases must not be negative", tuple(bases))
    lengths = [
        base + end - begin if end > begin else 0
        for base, (begin, end) in zip(bases, itertools.pairwise(cu_seqlens), strict=True)
    ]
    pages = [_pages_of(op, block_tables[i], lengths[i], arena.shape[0]) for i in range(num)]
    backend = triton_for(q)
    if backend is not None and backend.attention.supported(layout):
        return cast(
            Tensor,
            backend.attention.prefill(
                q=q,
                arena=arena,
                layout=layout,
                layer=layer,
                block_tables=block_tables,
                cu_seqlens=cu_seqlens,
                bases=bases,
                lse=lse,
            ),
        )
    cache = _Pages(arena, layout, layer, workspace or Workspace())
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for i in range(num):
        if lengths[i]:
            window = slice(cu_seqlens[i], cu_seqlens[i + 1])
            _attend(q[window], cache, pages[i], bases[i], o[window], None if lse is None else lse[window])
    return o


class _Pages:
    """One layer of an arena, read page by page as float32."""

    def __init__(self, arena: Tensor, layout: PageLayout, layer: int, workspace: Workspace) -> None:
        self.heads = layout.num_kv_heads
        self.workspace = workspace
        self._planes = (
            (layout.k(arena, layer), layout.k_scales(arena, layer), layout.k_format),
            (layout.v(arena, layer), layout.v_scales(arena, layer), layout.v_format),
        )

    def scratch(self, name: str, *shape: int) -> Tensor:
        return self.workspace.take(name, shape, dtype=torch.float32, device=self._planes[0][0].device)

    def gather(self, pages: Tensor, *, head_major: bool) -> tuple[Tensor, Tensor]:
        """Keys and values [pages, HKV, 64, D], or [HKV, pages, 64, D] when head-major, in scratch memory."""
        k, v = (
            self._gather_plane(name, plane, pages, head_major) for name, plane in zip("kv", self._planes, strict=True)
        )
        return k, v

    def _gather_plane(
        self,
        name: str,
        plane: tuple[Tensor, Tensor | None, PlaneFormat],
        pages: Tensor,
        head_major: bool,
    ) -> Tensor:
        view, scales, rows = plane
        values = self._gather_view(name, view, pages, head_major)
        if scales is None:
            return values.float()
        return dequantise_rows(values, self._gather_view(name + "s", scales, pages, head_major), rows)

    def _gather_view(self, name: str, view: Tensor, pages: Tensor, head_major: bool) -> Tensor:
        # Indexed copies do not exist for every float8 dtype: those travel as bytes.
        plain = view if view.element_size() > 1 else view.view(torch.uint8)
        num = len(pages)
        shape = (self.heads, num, *view.shape[2:]) if head_major else (num, *view.shape[1:])
        out = self.workspace.take(name, shape, dtype=plain.dtype, device=plain.device)
        # Always along the first axis: along another, index_select first copies the whole arena.
        if head_major:
            for head in range(self.heads):
                torch.index_select(plain[:, head], 0, pages, out=out[head])
        else:
            torch.index_select(plain, 0, pages, out=out)
        return out.view(view.dtype)


def _attend(q: Tensor, cache: _Pages, pages: Tensor, base: int, o: Tensor, lse: Tensor | None) -> None:
    """One sequence: key tiles outside, query tiles inside, maximum and sum carried from tile to tile.

    Scores are kept in units of log 2: exp2 is faster than exp, and the factor hides in the scale.
    """
    tokens, heads, dim = q.shape
    groups = heads // cache.heads
    rows = cache.scratch("q", cache.heads, tokens * groups, dim)
    scaled = rows.view(cache.heads, tokens, groups, dim)
    heads_first = q.float().view(tokens, cache.heads, groups, dim).transpose(0, 1)
    torch.mul(heads_first, LOG2_E * dim**-0.5, out=scaled)
    mixed = cache.scratch("mixed", *rows.shape)
    peak = cache.scratch("peak", *rows.shape[:2], 1)
    total = cache.scratch("total", *rows.shape[:2], 1)
    length = base + tokens
    tile_pages = _KEYS_PER_TILE // BLOCK_TOKENS
    query_tile = max(16, _ROWS_PER_TILE // heads)
    for first in range(0, length, _KEYS_PER_TILE):
        k, v = cache.gather(pages[first // BLOCK_TOKENS :][:tile_pages], head_major=True)
        k, v = k.flatten(1, 2), v.flatten(1, 2)
        v[:, length - first :] = 0.0
        # Query tiles that end before these keys see none of them.
        early = max(first - base, 0) // query_tile * query_tile
        for start in range(early, tokens, query_tile):
            stop = min(start + query_tile, tokens)
            # Whole pages, so that the size of what exp2 runs on is a multiple of 64.
            keys = min(k.shape[1], -(-(base + stop - first) // BLOCK_TOKENS) * BLOCK_TOKENS)
            part = slice(start * groups, stop * groups)
            scores = cache.scratch("scores", cache.heads, (stop - start) * groups, keys)
            torch.bmm(rows[:, part], k[:, :keys].transpose(1, 2), out=scores)
            _mask(scores, first, base + start, groups)
            old_peak, old_total, out = peak[:, part], total[:, part], mixed[:, part]
            new_peak = scores.amax(2, keepdim=True)
            if first == 0:
                # Every query sees key 0: maxima are finite from the first tile on.
                torch.sum(exp2_(scores.sub_(new_peak)), 2, keepdim=True, out=old_total)
                torch.bmm(scores, v[:, :keys], out=out)
            else:
                torch.maximum(old_peak, new_peak, out=new_peak)
                exp2_(scores.sub_(new_peak))
                shrink = exp2_(old_peak - new_peak)
                old_total.mul_(shrink).add_(scores.sum(2, keepdim=True))
                out.mul_(shrink).baddbmm_(scores, v[:, :keys])
            old_peak.copy_(new_peak)
    if lse is not None:
        sums = peak.div_(LOG2_E).add_(total.log()).view(cache.heads, tokens, groups)
        lse.copy_(sums.transpose(0, 1).flatten(1))
    o.copy_(mixed.div_(total).view(cache.heads, tokens, groups, dim).transpose(0, 1).flatten(1, 2))


def _mask(scores: Tensor, first_key: int, first_query: int, groups: int) -> None:
    """Set scores of keys after their query to -inf; rows are (query, group), columns keys."""
    begin = max(first_query + 1 - first_key, 0)
    if begin >= scores.shape[2]:
        return
    queries = torch.arange(scores.shape[1] // groups, device=scores.device) + first_query
    keys = torch.arange(first_key + begin, first_key + scores.shape[2], device=scores.device)
    hidden = keys > queries.repeat_interleave(groups).unsqueeze(1)
    scores[:, :, begin:].masked_fill_(hidden, float("-inf"))


# Pages read at once in decode: about a megabyte of keys. From the shape alone; no bit depends on it.
_DECODE_BYTES = 1 << 20


def paged_attention_decode(
    *,
    q: Tensor,
    arena: Tensor,
    layout: PageLayout,
    layer: int,
    block_tables: Tensor,
    lengths: Tensor,
    lse: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Attention of one query a lane over the first lengths[b] keys of its pages.

    q [B, H, D] in fp32 or bf16; block_tables int64 [B, max_blocks]; lengths int64 [B], the keys a lane sees,
    its new one included, at least 1. Split over keys in 64-token tiles, one a page, whatever the batch.
    Returns o [B, H, D] in q's dtype, new and contiguous. Where `lse` (float32 [B, H]) is given, the log of
    the sum of exp(scaled scores) is written to it; nothing else is written.
    """
    op = "paged_attention_decode"
    _check(op, q, arena, layout, block_tables)
    _check_lse(op, lse, q)
    lanes, heads, dim = q.shape
    check_shape(op, "block_tables", block_tables, (lanes, block_tables.shape[1]))
    check_shape(op, "lengths", lengths, (lanes,))
    check_dtype(op, "lengths", lengths, (torch.int64,))
    backend = triton_for(q)
    use_kernels = backend is not None and backend.attention.supported(layout)
    counts: list[int] = lengths.tolist() if lengths.device.type == "cpu" or not use_kernels else []
    for count in counts:
        if count < 1:
            refuse(op, "lengths must be at least 1", count)
    tables = [_pages_of(op, block_tables[b], count, arena.shape[0]) for b, count in enumerate(counts)]
    if backend is not None and use_kernels:
        return cast(
            Tensor,
            backend.attention.decode(
                q=q,
                arena=arena,
                layout=layout,
                layer=layer,
                block_tables=block_tables,
                lengths=lengths,
                lse=lse,
            ),
        )
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if lanes == 0:
        return o
    cache = _Pages(arena, layout, layer, workspace or Workspace())
    groups = heads // cache.heads
    sizes = [len(table) for table in tables]
    pages = torch.cat(tables)
    # The last page of every lane, and how many of its rows hold keys.
    partial = [(end - 1, count % BLOCK_TOKENS) for end, count in zip(itertools.accumulate(sizes), counts, strict=True)]
    scaled = (q.float() * dim**-0.5).view(lanes, cache.heads, groups, dim)
    queries = torch.cat([scaled[b].expand(size, -1, -1, -1) for b, size in enumerate(sizes)])
    mixed = cache.scratch("mixed", len(pages), cache.heads, groups, dim)
    sums = cache.scratch("lse", len(pages), cache.heads, groups, 1)
    step = max(1, _DECODE_BYTES // (cache.heads * BLOCK_TOKENS * dim * 4))
    for begin in range(0, len(pages), step):
        window = slice(begin, min(begin + step, len(pages)))
        _attend_pages(queries[window], cache, pages[window], begin, partial, mixed[window], sums[window])
    _merge_pages(mixed.flatten(1, 2), sums.flatten(1, 2), sizes, o, lse)
    return o


def _attend_pages(
    queries: Tensor,
    cache: _Pages,
    pages: Tensor,
    begin: int,
    partial: list[tuple[int, int]],
    mixed: Tensor,
    sums: Tensor,
) -> None:
    """Attention over each page by itself: its output and log-sum-exp, to be merged per lane."""
    k, v = cache.gather(pages, head_major=False)
    num = len(pages)
    scores = cache.scratch("scores", *queries.shape[:3], BLOCK_TOKENS)
    torch.bmm(queries.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), out=scores.flatten(0, 1))
    for page, used in partial:
        if used and begin <= page < begin + num:
            scores[page - begin, :, :, used:] = float("-inf")
            v[page - begin, :, used:] = 0.0
    weights = scores.softmax(-1)
    # The largest weight of a softmax is exp(0) / sum: that is where its sum can be read.
    torch.sub(scores.amax(-1, keepdim=True), weights.amax(-1, keepdim=True).log_(), out=sums)
    torch.bmm(weights.flatten(0, 1), v.flatten(0, 1), out=mixed.flatten(0, 1))


def _merge_pages(mixed: Tensor, sums: Tensor, sizes: list[int], o: Tensor, lse: Tensor | None) -> None:
    """Combine the pages of each lane: mixed [pages, H, D] and sums [pages, H, 1] in lane order."""
    begin = 0
    for b, size in enumerate(sizes):
        window = slice(begin, begin + size)
        o[b] = mixed[window].mul_(sums[window].softmax(0)).sum(0)
        if lse is not None:
            lse[b] = sums[window].logsumexp(0).squeeze(1)
        begin += size


def merge_attention_states(*, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets, from the attention over each.

    o [P, T, H, D] in fp32 or bf16 and lse float32 [P, T, H] of P partitions of the keys, in any order. With
    m = max(lse): (sum of exp(lse_i - m) o_i / sum of exp(lse_i - m), m + log of that sum). An lse of -inf
    marks a partition without keys, whose o is not read; where all are, o is 0 and lse -inf. Computed in
    fp32. Returns new tensors (o [T, H, D] in o's dtype, lse [T, H]); a token's bits depend on that token
    only.
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
