"""Root-mean-square norms of Qwen3.5.

Formulas and the zero-centred weight follow the published modelling code of Qwen3.5 (Hugging Face
transformers, `qwen3_5`); the float64 oracles are in `reference`.
"""

import torch
from torch import Tensor

from qwen35_kernels.contracts import (
    FLOAT_DTYPES,
    check_device,
    check_dtype,
    check_eps,
    check_shape,
    refuse,
)
from qwen35_kernels.elementwise import silu_

__all__ = ["gated_rms_norm", "rms_norm"]


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, as a fresh float32 tensor."""
    x = x.float()
    return x * x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def _check(op: str, x: Tensor, weight: Tensor, eps: float) -> None:
    if x.dim() < 1:
        refuse(op, "x must have at least one dimension", tuple(x.shape))
    check_dtype(op, "x", x, FLOAT_DTYPES)
    check_dtype(op, "weight", weight, FLOAT_DTYPES)
    check_shape(op, "weight", weight, (x.shape[-1],))
    check_device(op, "weight", weight, x.device)
    check_eps(op, eps)


def rms_norm(*, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (1 + weight).

    x [..., D] and weight [D] in fp32 or bf16, any strides. Computed in fp32 and rounded once to x's dtype.
    The result is a new tensor; nothing else is written. A row's bits depend on that row and the weight
    only.
    """
    _check("rms_norm", x, weight, eps)
    return normalise(x, eps).mul_(weight.float() + 1.0).to(x.dtype)


def gated_rms_norm(*, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight * silu(gate).

    x and gate [..., D] of one shape, weight [D] (not zero-centred); fp32 or bf16, any strides. Computed in
    fp32 and rounded once to x's dtype. The result is a new tensor; a row's bits depend on that row only.
    """
    _check("gated_rms_norm", x, weight, eps)
    check_dtype("gated_rms_norm", "gate", gate, FLOAT_DTYPES)
    check_shape("gated_rms_norm", "gate", gate, tuple(x.shape))
    check_device("gated_rms_norm", "gate", gate, x.device)
    scale = silu_(gate.to(torch.float32, copy=True))
    return normalise(x, eps).mul_(weight.float()).mul_(scale).to(x.dtype)
