"""Input checks shared by every op: cheap, and made before anything is written.

Values inside device tensors (page numbers, slots, lengths) are checked only when the tensor lives on the CPU:
reading them from a GPU would stall the stream that the op is about to be queued on.
"""

from typing import NoReturn

import torch
from torch import Tensor

from qwen35_kernels.errors import KernelInputError

FLOAT_DTYPES = (torch.float32, torch.bfloat16)
_FEW = 128


def refuse(op: str, constraint: str, got: object) -> NoReturn:
    """Raise the package's error in its one form."""
    raise KernelInputError(f"{op}: {constraint}, got {got!r}")


def check_rank(op: str, name: str, x: Tensor, rank: int) -> None:
    if x.dim() != rank:
        refuse(op, f"{name} must have {rank} dimensions", tuple(x.shape))


def check_shape(op: str, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        refuse(op, f"{name} must have shape {shape}", tuple(x.shape))


def check_dtype(op: str, name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        refuse(op, f"{name} must be {names}", str(x.dtype).removeprefix("torch."))


def check_device(op: str, name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        refuse(op, f"{name} must be on {device}", str(x.device))


def check_inner_contiguous(op: str, name: str, x: Tensor) -> None:
    """The last axis must be dense; any stride is welcome on the others."""
    if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
        refuse(op, f"{name} must be contiguous in its last dimension", x.stride())


def check_index(op: str, name: str, x: Tensor, length: int, *, begin: int, end: int) -> None:
    """An int64 vector of `length` numbers in [begin, end)."""
    if x.dtype != torch.int64 or x.dim() != 1 or x.shape[0] != length:
        check_dtype(op, name, x, (torch.int64,))
        check_shape(op, name, x, (length,))
    if length and x.device.type == "cpu":
        low, high = smallest_and_largest(x)
        if low < begin or high >= end:
            refuse(op, f"{name} must lie in [{begin}, {end})", low if low < begin else high)


def smallest_and_largest(x: Tensor) -> tuple[int, int]:
    """Of an int64 vector that is not empty; a short one is read faster than it is reduced."""
    if x.shape[0] > _FEW:
        low, high = (int(value) for value in torch.aminmax(x))
        return low, high
    values: list[int] = x.tolist()
    return min(values), max(values)


def as_float32(x: Tensor) -> Tensor:
    """x itself where it is float32 already: `Tensor.float` costs a dispatch even then."""
    return x if x.dtype == torch.float32 else x.float()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype, itself where it has it already."""
    return x if x.dtype == dtype else x.to(dtype)


def check_eps(op: str, eps: float) -> None:
    if not 0.0 <= eps < 1.0:
        refuse(op, "eps must lie in [0, 1)", eps)
