"""The sparse feed-forward block of the mixture-of-experts models: router, grouped experts, shared expert."""

from typing import cast

import torch
from torch import Tensor

from qwen35_kernels.contracts import FLOAT_DTYPES, check_device, check_dtype, check_rank, check_shape, refuse
from qwen35_kernels.dispatch import triton_for
from qwen35_kernels.elementwise import sigmoid
from qwen35_kernels.mlp import swiglu

__all__ = ["moe_combine_shared", "moe_experts", "moe_route"]


def moe_route(*, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, top_k], experts int64 [T, top_k]) from router logits [T, E].

    The top_k largest of softmax(logits), divided by their sum, largest first; equal logits go to the lower
    expert. Computed in fp32; new tensors; a token's result depends on its own logits only.

    Raises:
        KernelInputError: another rank or dtype, or a top_k outside [1, E].
    """
    op = "moe_route"
    check_rank(op, "logits", logits, 2)
    check_dtype(op, "logits", logits, FLOAT_DTYPES)
    if not 1 <= top_k <= logits.shape[1]:
        refuse(op, f"top_k must lie in [1, {logits.shape[1]}]", top_k)
    ordered, experts = logits.float().sort(dim=1, descending=True, stable=True)
    # The softmax over all experts, renormalised over the chosen, is the softmax over the chosen.
    return ordered[:, :top_k].softmax(1), experts[:, :top_k].contiguous()


def moe_experts(*, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """y[t] = sum over j of weights[t, j] * down[e] (silu(gate_up[e] x)[:I] * (gate_up[e] x)[I:]), e =
    experts[t, j].

    x [T, H] in fp32 or bf16; gate_up [E, 2 I, H] and down [E, H, I] in x's dtype; weights float32 [T, k] and
    experts int64 [T, k], distinct within a token. Tokens are grouped by expert, one matrix product a group
    and projection; contributions are added in the order of expert numbers, in fp32, and rounded once.
    Returns a new [T, H] in x's dtype. Matrix products depend on the number of rows: equal up to rounding in
    another batch.

    Raises:
        KernelInputError: a shape, dtype or device that does not fit, or (on a CPU) an expert out of range.
    """
    op = "moe_experts"
    check_rank(op, "x", x, 2)
    check_rank(op, "gate_up", gate_up, 3)
    check_rank(op, "experts", experts, 2)
    tokens, hidden = x.shape
    num_experts, double, _ = gate_up.shape
    if double % 2:
        refuse(op, "gate_up must have an even number of rows", double)
    check_shape(op, "gate_up", gate_up, (num_experts, double, hidden))
    check_shape(op, "down", down, (num_experts, hidden, double // 2))
    check_dtype(op, "x", x, FLOAT_DTYPES)
    for name, w in (("gate_up", gate_up), ("down", down)):
        check_dtype(op, name, w, (x.dtype,))
        check_device(op, name, w, x.device)
    check_shape(op, "experts", experts, (tokens, experts.shape[1]))
    check_dtype(op, "experts", experts, (torch.int64,))
    check_shape(op, "weights", weights, tuple(experts.shape))
    check_dtype(op, "weights", weights, (torch.float32,))
    for name, index in (("experts", experts), ("weights", weights)):
        check_device(op, name, index, x.device)
    if experts.device.type == "cpu" and experts.numel():
        low, high = (int(value) for value in torch.aminmax(experts))
        if low < 0 or high >= num_experts:
            refuse(op, f"experts must lie in [0, {num_experts})", low if low < 0 else high)
    backend = triton_for(x)
    if backend is not None:
        return cast(
            Tensor,
            backend.moe.experts(x=x, gate_up=gate_up, down=down, weights=weights, experts=experts),
        )
    y = torch.zeros(tokens, hidden, dtype=torch.float32, device=x.device)
    flat, order = experts.flatten().sort(stable=True)
    rows = order // experts.shape[1] if experts.shape[1] else order
    scale = weights.flatten()[order].unsqueeze(1)
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    begin = 0
    for expert in range(num_experts):
        count = counts[expert]
        if count == 0:
            continue
        group = rows[begin : begin + count]
        inner = swiglu(gate_up=torch.nn.functional.linear(x[group], gate_up[expert]))
        out = torch.nn.functional.linear(inner, down[expert]).float()
        y.index_add_(0, group, out.mul_(scale[begin : begin + count]))
        begin += count
    return y.to(x.dtype)


def moe_combine_shared(*, routed: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
    """routed + sigmoid(gate) * shared, with routed and shared [T, H] of one dtype and gate [T, 1] logits.

    Computed in fp32, rounded once to routed's dtype; a new tensor.

    Raises:
        KernelInputError: a shape, dtype or device that does not fit.
    """
    op = "moe_combine_shared"
    check_rank(op, "routed", routed, 2)
    check_shape(op, "shared", shared, tuple(routed.shape))
    check_shape(op, "gate", gate, (routed.shape[0], 1))
    for name, x in (("routed", routed), ("shared", shared), ("gate", gate)):
        check_dtype(op, name, x, FLOAT_DTYPES)
        check_device(op, name, x, routed.device)
    return (sigmoid(gate) * shared.float()).add_(routed.float()).to(routed.dtype)
