"""Launches of attention over pages."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from qwen35_kernels.layout import BLOCK_TOKENS, LayerKV, PageLayout
from qwen35_kernels.plans import DecodePages, PrefillPages
from qwen35_kernels.triton.attention_kernels import attend_decode, attend_prefill, merge_states
from qwen35_kernels.triton.launch import Launch, dot_dtype, dot_precision, index_tensor, power_of_2, run

__all__ = [
    "decode",
    "merge",
    "plan_decode",
    "plan_merge",
    "plan_prefill",
    "prefill",
    "supported",
]

# Keys a decode program walks through: a fixed split, whatever the batch.
_PAGES_PER_SPLIT = 8
# Queries of a prefill program.
_QUERIES = 64


def supported(layout: PageLayout) -> bool:
    """Halves of a head must be powers of two a tensor core takes."""
    return layout.head_dim >= 32 and layout.head_dim == power_of_2(layout.head_dim)


def _planes(kv: LayerKV) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Pointer arguments, page strides and constants of a layer's planes."""
    pointers: dict[str, Any] = {}
    strides: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for name, (rows, values, scales) in zip("kv", (kv.k, kv.v), strict=True):
        constants[f"{name.upper()}_FORMAT"] = "plain" if scales is None else rows.name
        constants[f"{name.upper()}_GROUP"] = (
            1 if scales is None else kv.layout.head_dim // rows.row_scales(kv.layout.head_dim)
        )
        # A format without scales gets the values again, as an argument that is not read.
        scales = values if scales is None else scales
        pointers |= {f"{name}_ptr": values, f"{name}s_ptr": scales}
        strides |= {f"{name}_page": values.stride(0), f"{name}s_page": scales.stride(0)}
    return pointers, strides, constants


def _tables(pages: PrefillPages, like: Tensor) -> tuple[Tensor, Tensor]:
    """Block tables and blocks of queries (first token, end, sequence, position) as the kernel reads them."""
    blocks = [
        [first, end, i, pages.bases[i] + first - begin]
        for i, (begin, end) in enumerate(pairwise(pages.cu_seqlens))
        for first in range(begin, end, _QUERIES)
    ]
    return pages.block_tables.contiguous(), index_tensor(blocks, like, columns=4)


def plan_prefill(*, q: Tensor, kv: LayerKV, pages: PrefillPages, o: Tensor, lse: Tensor) -> tuple[Launch, ...]:
    """q dense in its last axis, lse float32 [T, H] contiguous."""
    heads, dim = q.shape[1:]
    block_tables, blocks = pages.once(("attention", q.device), lambda: _tables(pages, q))
    pointers, strides, constants = _planes(kv)
    return (
        Launch(
            kernel=attend_prefill,
            grid=(len(blocks), heads, 1),
            arguments={
                "q_ptr": q,
                **pointers,
                "o_ptr": o,
                "lse_ptr": lse,
                "tables_ptr": block_tables,
                "blocks_ptr": blocks,
                "stride_token": q.stride(0),
                "stride_head": q.stride(1),
                "stride_table": block_tables.stride(0),
                **strides,
                "scale": float(dim) ** -0.5,
                "H": heads,
                "GROUPS": heads // kv.layout.num_kv_heads,
            },
            constants={
                "D": dim,
                "BM": _QUERIES,
                "BLOCK": BLOCK_TOKENS,
                "DOT": dot_dtype(q.dtype),
                "PRECISION": dot_precision(q.dtype),
                **constants,
            },
            num_warps=8,
        ),
    )


def plan_decode(*, q: Tensor, kv: LayerKV, pages: DecodePages, o: Tensor, lse: Tensor) -> tuple[Launch, ...]:
    lanes, heads, dim = q.shape
    block_tables, lengths = pages.once(
        "attention", lambda: (pages.block_tables.contiguous(), pages.lengths.contiguous())
    )
    splits = max(1, -(-block_tables.shape[1] // _PAGES_PER_SPLIT))
    parts = torch.empty(splits, lanes, heads, dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(splits, lanes, heads, dtype=torch.float32, device=q.device)
    pointers, strides, constants = _planes(kv)
    groups = heads // kv.layout.num_kv_heads
    attend = Launch(
        kernel=attend_decode,
        grid=(lanes, kv.layout.num_kv_heads, splits),
        arguments={
            "q_ptr": q,
            **pointers,
            "o_ptr": parts,
            "lse_ptr": sums,
            "tables_ptr": block_tables,
            "lengths_ptr": lengths,
            "stride_token": q.stride(0),
            "stride_head": q.stride(1),
            "stride_table": block_tables.stride(0),
            **strides,
            "scale": float(dim) ** -0.5,
            "num_lanes": lanes,
            "H": heads,
            "GROUPS": groups,
        },
        constants={
            "D": dim,
            "BM": power_of_2(groups, least=16),
            "BLOCK": BLOCK_TOKENS,
            "PAGES": _PAGES_PER_SPLIT,
            "DOT": dot_dtype(q.dtype),
            "PRECISION": dot_precision(q.dtype),
            **constants,
        },
        num_warps=8,
    )
    keys = _PAGES_PER_SPLIT * BLOCK_TOKENS
    return attend, *plan_merge(parts=parts, sums=sums, lengths=lengths, o=o, lse=lse, keys=keys)


def plan_merge(
    *, parts: Tensor, sums: Tensor, lengths: Tensor | None, o: Tensor, lse: Tensor, keys: int
) -> tuple[Launch, ...]:
    """parts [P, T, H, D] and sums [P, T, H], all contiguous; with keys > 0 a token's lengths say how many
    count."""
    num_parts, tokens, heads, dim = parts.shape
    return (
        Launch(
            kernel=merge_states,
            grid=(tokens, heads, 1),
            arguments={
                "o_ptr": parts,
                "lse_ptr": sums,
                "lengths_ptr": sums if lengths is None else lengths,
                "out_ptr": o,
                "out_lse_ptr": lse,
                "num_tokens": tokens,
                "parts": num_parts,
                "H": heads,
            },
            constants={"D": dim, "BD": power_of_2(dim), "KEYS": keys},
            num_warps=2,
        ),
    )


def _attend(plan: Callable[..., tuple[Launch, ...]], *, q: Tensor, lse: Tensor | None, **call: Any) -> Tensor:
    """Allocate what the planned launches write, run them, and return o; lse is written where it was asked for."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = lse if lse is not None and lse.is_contiguous() else torch.empty(q.shape[:2], device=q.device)
    run(plan(q=q, o=o, lse=sums, **call))
    if lse is not None and sums is not lse:
        lse.copy_(sums)
    return o


def prefill(**call: Any) -> Tensor:
    """The arguments of `plan_prefill` but for o, with lse or None."""
    return _attend(plan_prefill, **call)


def decode(**call: Any) -> Tensor:
    """The arguments of `plan_decode` but for o, with lse or None."""
    return _attend(plan_decode, **call)


def merge(*, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(o.shape[1:], dtype=o.dtype, device=o.device)
    sums = torch.empty(lse.shape[1:], dtype=torch.float32, device=o.device)
    run(plan_merge(parts=o.contiguous(), sums=lse.contiguous(), lengths=None, o=out, lse=sums, keys=0))
    return out, sums
