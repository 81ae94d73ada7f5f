"""The activation of the dense feed-forward block."""

from typing import cast

from torch import Tensor

from qwen35_kernels.contracts import FLOAT_DTYPES, check_dtype, check_rank, refuse, rounded
from qwen35_kernels.dispatch import triton_for
from qwen35_kernels.elementwise import silu

__all__ = ["swiglu"]


def swiglu(*, gate_up: Tensor) -> Tensor:
    """y = silu(gate_up[:, :I]) * gate_up[:, I:].

    gate_up [T, 2 I] in fp32 or bf16, any strides. Computed in fp32, rounded once to the input's dtype;
    returns a new contiguous [T, I]. An element's bits depend on its two inputs only.

    Raises:
        KernelInputError: another rank or dtype, or an odd number of columns.
    """
    check_rank("swiglu", "gate_up", gate_up, 2)
    check_dtype("swiglu", "gate_up", gate_up, FLOAT_DTYPES)
    if gate_up.shape[1] % 2:
        refuse("swiglu", "gate_up must have an even number of columns", gate_up.shape[1])
    backend = triton_for(gate_up)
    if backend is not None:
        return cast(Tensor, backend.rows.swiglu(gate_up=gate_up))
    inner = gate_up.shape[1] // 2
    gate, up = gate_up.narrow(1, 0, inner), gate_up.narrow(1, inner, inner)
    return rounded(silu(gate).mul_(up), gate_up.dtype)
