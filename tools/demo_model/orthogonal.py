"""Steepest descent for matrices under the spectral norm: momentum whose singular values are all made one.

Source of the idea and of the polynomial's coefficients: K. Jordan, "Muon: An optimizer for hidden layers in neural
networks", 2024.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Orthogonal", "orthogonalised"]


class Orthogonal(torch.optim.Optimizer):
    """``m = momentum m + g; W -= lr sqrt(max(1, rows / columns)) orthogonalised(g + momentum m)``."""

    def __init__(self, parameters: Iterable[Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                update = orthogonalised(parameter.grad.add(momentum, alpha=group["momentum"]))
                rows, columns = parameter.shape
                parameter.sub_(update, alpha=group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalised(matrix: Tensor) -> Tensor:
    """The matrix with its singular values pushed into about 0.7 to 1.2, by five Newton-Schulz steps."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x if wide is matrix else x.T
