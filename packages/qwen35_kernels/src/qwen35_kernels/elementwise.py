"""Activations whose bits do not depend on where an element stands in its tensor.

torch's own `sigmoid`, `silu` and `softplus` on a CPU use a vector routine for the body of a tensor and a
scalar one, with other rounding, for the last few elements of each thread's share: the same number gives
different bits at another place, in another batch, with another number of threads. `exp`, `log1p` and the
four operations do not, so the activations are composed of those (`docs/kernels.md` has the measurement).
"""

import torch
from torch import Tensor

__all__ = ["sigmoid", "silu", "silu_", "softplus"]


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in float32."""
    return torch.neg(x.float()).exp_().add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) in float32; -0.0 where exp overflows."""
    x = x.float()
    return x / torch.neg(x).exp_().add_(1.0)


def silu_(x: Tensor) -> Tensor:
    """The same, overwriting a float32 tensor."""
    return x.div_(torch.neg(x).exp_().add_(1.0))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) in float32 without overflow."""
    x = x.float()
    return x.abs().neg_().exp_().log1p_().add_(x.clamp_min(0.0))
