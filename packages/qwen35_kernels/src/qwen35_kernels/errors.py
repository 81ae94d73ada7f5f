"""The one error this package raises for bad input.

ValueError
└── KernelInputError    a shape, dtype, stride, device, position or slot outside an op's contract
"""

__all__ = ["KernelInputError"]


class KernelInputError(ValueError):
    """An argument breaks an op's contract; raised before anything is read, written or launched."""
