"""Activations whose bits do not depend on where an element stands in its tensor.

On a CPU torch's `sigmoid`, `silu`, `softplus` and `exp2` use a vector routine for the body of a tensor and a
scalar one, with other rounding, for the few elements left over at the end of each thread's share: the same
number gives different bits at another place, in another batch, with another number of threads. Here every
share is a whole number of vector strides (what is missing is filled up in a copy), so that only the vector
routine runs. `docs/kernels.md` has the measurements.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["LOG2_E", "constant", "exp2_", "sigmoid", "silu", "silu_", "small_sigmoid", "softplus"]

LOG2_E = 1.4426950408889634

# Two AVX-512 registers of float32: the widest stride of torch's vectorised loops.
_STRIDE = 32
# Elements below which torch gives an elementwise loop to one thread.
_GRAIN = 32768


@functools.cache
def constant(value: float, device: torch.device) -> Tensor:
    """A number as a float32 tensor without dimensions, for routines that take no number in its place."""
    # Ordinary even where it is first asked for in inference mode: it outlives the mode.
    with torch.inference_mode(False):
        return torch.full((), value, dtype=torch.float32, device=device)


def _whole_strides(size: int) -> int:
    """The smallest size from `size` on that splits into whole strides for every thread that gets a share."""
    threads = torch.get_num_threads()
    while True:
        unit = _STRIDE * max(1, min(threads, -(-size // _GRAIN)))
        if size % unit == 0:
            return size
        size += unit - size % unit


def _apply_(operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run an in-place elementwise operation on a float32 tensor by its vector routine alone."""
    size = x.numel()
    if x.device.type != "cpu" or size == 0:
        return operation(x)
    whole = _whole_strides(size)
    if whole == size and x.is_contiguous():
        return operation(x)
    buffer = torch.zeros(whole)
    body = buffer[:size].view(x.shape)
    body.copy_(x)
    operation(buffer)
    return x.copy_(body)


def _apply(operation: Callable[[Tensor], Tensor], operation_: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The same into a new contiguous float32 tensor, by the operation or its in-place form."""
    size = x.numel()
    whole = _whole_strides(size) if x.device.type == "cpu" and size else size
    if whole != size:
        padded = torch.nn.functional.pad(x.reshape(-1).float(), (0, whole - size))
        return operation_(padded)[:size].view(x.shape)
    if x.dtype == torch.float32 and x.is_contiguous():
        return operation(x)
    return operation_(x.to(torch.float32, copy=True, memory_format=torch.contiguous_format))


def exp2_(x: Tensor) -> Tensor:
    """2 ** x, overwriting a float32 tensor. Several times faster than `exp` where results are denormal."""
    return _apply_(torch.exp2_, x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), a new float32 tensor."""
    return _apply(torch.sigmoid, torch.sigmoid_, x)


def silu_(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), overwriting a float32 tensor."""
    return _apply_(_silu_in_place, x)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), a new float32 tensor."""
    return _apply(torch.nn.functional.silu, _silu_in_place, x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), a new float32 tensor, without overflow; of routines that have no scalar form."""
    # log1p(exp(x)) is x itself long before exp overflows.
    return torch.maximum(x.clamp_max(80.0).exp_().log1p_(), x)


def small_sigmoid(x: Tensor) -> Tensor:
    """As `sigmoid`, with fewer calls and more passes: for tensors of a few elements."""
    return x.neg().exp_().add_(constant(1.0, x.device)).reciprocal_()


def _silu_in_place(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x, inplace=True)
