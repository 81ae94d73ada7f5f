"""Experts as grouped matrix products. The formulas are those of `qwen35_kernels.moe`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qwen35_kernels.triton.launch import Launch, dot_dtype, dot_precision, power_of_2, run
from qwen35_kernels.triton.rows import plan_swiglu

__all__ = ["Groups", "experts", "group_pairs", "plan_experts"]

_BM, _BN, _BK = 16, 64, 64


@triton.jit
def grouped_linear(
    x_ptr,
    weight_ptr,
    y_ptr,
    source_ptr,
    experts_ptr,
    begin_ptr,
    end_ptr,
    stride_x,
    stride_expert,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[i] = weight[expert of i] x[source of i] for the pairs i of one block: all of one expert."""
    i_block, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = tl.load(begin_ptr + i_block), tl.load(end_ptr + i_block)
    if begin < end:
        expert = tl.load(experts_ptr + i_block)
        pair = begin + tl.arange(0, BM)
        valid = pair < end
        cols = i_n * BN + tl.arange(0, BN)
        source = tl.load(source_ptr + pair, mask=valid, other=0)
        b_y = tl.zeros([BM, BN], dtype=tl.float32)
        for first in range(0, K, BK):
            inner = first + tl.arange(0, BK)
            x_mask = valid[:, None] & (inner < K)[None, :]
            b_x = tl.load(x_ptr + source[:, None] * stride_x + inner[None, :], mask=x_mask, other=0.0).to(DOT)
            w_mask = (cols < N)[:, None] & (inner < K)[None, :]
            b_w = tl.load(
                weight_ptr + expert * stride_expert + cols[:, None] * K + inner[None, :], mask=w_mask, other=0.0
            ).to(DOT)
            b_y += tl.dot(b_x, tl.trans(b_w), input_precision=PRECISION)
        mask = valid[:, None] & (cols < N)[None, :]
        tl.store(y_ptr + pair[:, None] * N + cols[None, :], b_y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_experts(x_ptr, weights_ptr, places_ptr, y_ptr, H: tl.constexpr, TOP: tl.constexpr, BH: tl.constexpr):
    """y[t] = sum over j of weights[t, j] x[places[t, j]], in the order of j."""
    i_t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BH + tl.arange(0, BH)
    mask = cols < H
    b_y = tl.zeros([BH], dtype=tl.float32)
    for j in range(TOP):
        place = tl.load(places_ptr + i_t * TOP + j)
        weight = tl.load(weights_ptr + i_t * TOP + j)
        b_y += tl.load(x_ptr + place * H + cols, mask=mask, other=0.0).to(tl.float32) * weight
    tl.store(y_ptr + i_t * H + cols, b_y.to(y_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Groups:
    """(token, expert) pairs sorted by expert, cut into blocks of one expert; nothing here waits for the
    device."""

    tokens: Tensor
    places: Tensor
    weights: Tensor
    block_expert: Tensor
    block_begin: Tensor
    block_end: Tensor


def group_pairs(*, weights: Tensor, experts: Tensor, num_experts: int) -> Groups:
    """Sort the pairs of weights, experts [T, k]; blocks past the last are empty."""
    tokens, top = experts.shape
    device = experts.device
    order = experts.flatten().sort(stable=True).indices
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten()))
    starts = counts.cumsum(0) - counts
    blocks = (counts + _BM - 1) // _BM
    last = blocks.cumsum(0)
    number = torch.arange(tokens * top // _BM + min(num_experts, tokens * top), device=device)
    owner = torch.searchsorted(last, number, right=True).clamp_(max=num_experts - 1)
    begin = starts[owner] + (number - (last[owner] - blocks[owner])) * _BM
    end = torch.minimum(begin + _BM, starts[owner] + counts[owner])
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=device)
    places, by_expert = place.view(tokens, top).sort(dim=1)
    return Groups(
        tokens=order // top,
        places=places,
        weights=weights.gather(1, by_expert),
        block_expert=owner,
        block_begin=begin,
        block_end=end,
    )


def plan_experts(*, x: Tensor, gate_up: Tensor, down: Tensor, groups: Groups, y: Tensor) -> tuple[Launch, ...]:
    """x and the weights contiguous."""
    pairs = groups.tokens.shape[0]
    double, hidden = gate_up.shape[1:]
    inner = torch.empty(pairs, double, dtype=x.dtype, device=x.device)
    active = torch.empty(pairs, double // 2, dtype=x.dtype, device=x.device)
    out = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    itself = torch.arange(pairs, device=x.device)

    def linear(source: Tensor, rows: Tensor, weight: Tensor, target: Tensor) -> Launch:
        columns, width = weight.shape[1:]
        return Launch(
            kernel=grouped_linear,
            grid=(groups.block_begin.shape[0], -(-columns // _BN), 1),
            arguments={
                "x_ptr": source,
                "weight_ptr": weight,
                "y_ptr": target,
                "source_ptr": rows,
                "experts_ptr": groups.block_expert,
                "begin_ptr": groups.block_begin,
                "end_ptr": groups.block_end,
                "stride_x": source.stride(0),
                "stride_expert": weight.stride(0),
            },
            constants={
                "N": columns,
                "K": width,
                "BM": _BM,
                "BN": _BN,
                "BK": _BK,
                "DOT": dot_dtype(x.dtype),
                "PRECISION": dot_precision(x.dtype),
            },
            num_stages=3,
        )

    block = min(1024, power_of_2(hidden))
    combine = Launch(
        kernel=combine_experts,
        grid=(x.shape[0], -(-hidden // block), 1),
        arguments={"x_ptr": out, "weights_ptr": groups.weights, "places_ptr": groups.places, "y_ptr": y},
        constants={"H": hidden, "TOP": groups.places.shape[1], "BH": block},
    )
    return (
        linear(x, groups.tokens, gate_up, inner),
        *plan_swiglu(x=inner, y=active),
        linear(active, itself, down, out),
        combine,
    )


def experts(*, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    groups = group_pairs(weights=weights, experts=experts, num_experts=gate_up.shape[0])
    run(plan_experts(x=x.contiguous(), gate_up=gate_up.contiguous(), down=down.contiguous(), groups=groups, y=y))
    return y
