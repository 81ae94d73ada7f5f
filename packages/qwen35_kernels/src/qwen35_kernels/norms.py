"""Root-mean-square norms of Qwen3.5.

Formulas and the zero-centred weight follow the published modelling code of Qwen3.5 (Hugging Face
transformers, `qwen3_5`); the float64 oracles are in `reference`.
"""

from typing import cast

import torch
from torch import Tensor

from qwen35_kernels.contracts import (
    FLOAT_DTYPES,
    as_float32,
    check_device,
    check_dtype,
    check_eps,
    check_shape,
    refuse,
    rounded,
)
from qwen35_kernels.dispatch import triton_for
from qwen35_kernels.elementwise import constant, silu

__all__ = ["gated_rms_norm", "rms_norm"]


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, as a fresh float32 tensor."""
    x = as_float32(x)
    return x * inverse_norm(x, weight=1.0 / x.shape[-1], eps=eps)


def inverse_norm(x: Tensor, *, weight: float, eps: float) -> Tensor:
    """1 / sqrt(weight * sum(x^2) + eps) of every row of a float32 x [..., D], as [..., 1]."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(constant(eps, x.device), length, length, value=weight).rsqrt_()


def _check(op: str, x: Tensor, weight: Tensor, eps: float) -> None:
    if (
        x.dim()
        and x.dtype in FLOAT_DTYPES
        and weight.dtype in FLOAT_DTYPES
        and weight.shape == x.shape[-1:]
        and weight.device == x.device
        and 0.0 <= eps < 1.0
    ):
        return
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

    Raises:
        KernelInputError: a shape, dtype or device that does not fit, or an eps outside [0, 1).
    """
    _check("rms_norm", x, weight, eps)
    backend = triton_for(x)
    if backend is not None:
        return cast(Tensor, backend.rows.rms_norm(x=x, weight=weight, eps=eps))
    normed = normalise(x, eps)
    return rounded(normed.addcmul_(normed, as_float32(weight)), x.dtype)


def gated_rms_norm(*, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight * silu(gate).

    x and gate [..., D] of one shape, weight [D] (not zero-centred); fp32 or bf16, any strides. Computed in
    fp32 and rounded once to x's dtype. The result is a new tensor; a row's bits depend on that row only.

    Raises:
        KernelInputError: a shape, dtype or device that does not fit, or an eps outside [0, 1).
    """
    _check("gated_rms_norm", x, weight, eps)
    if gate.shape != x.shape or gate.dtype not in FLOAT_DTYPES or gate.device != x.device:
        check_dtype("gated_rms_norm", "gate", gate, FLOAT_DTYPES)
        check_shape("gated_rms_norm", "gate", gate, tuple(x.shape))
        check_device("gated_rms_norm", "gate", gate, x.device)
    backend = triton_for(x)
    if backend is not None:
        return cast(Tensor, backend.rows.gated_rms_norm(x=x, gate=gate, weight=weight, eps=eps))
    return rounded(normalise(x, eps).mul_(as_float32(weight)).mul_(silu(gate)), x.dtype)
