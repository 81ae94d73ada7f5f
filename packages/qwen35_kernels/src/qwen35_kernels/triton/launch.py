"""How a kernel is launched: one description that the JIT, the interpreter and the compile checks share."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Launch", "dot_dtype", "dot_precision", "index_tensor", "power_of_2", "run"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch. `arguments` are run-time values in the kernel's order, `constants` its constexprs."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1


def run(launches: Iterable[Launch]) -> None:
    """Queue launches in order. The compiler may not fuse products and sums: their bits are a
    promise."""
    for launch in launches:
        if 0 in launch.grid:
            continue
        launch.kernel[launch.grid](
            **launch.arguments,
            **launch.constants,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            enable_fp_fusion=False,
        )


def interpreted() -> bool:
    """True under TRITON_INTERPRET, whose `tl.dot` multiplies the raw bits of bfloat16."""
    return bool(triton.knobs.runtime.interpret)


def dot_dtype(dtype: torch.dtype) -> Any:
    """What operands of a dot are cast to for inputs of a dtype."""
    return tl.bfloat16 if dtype == torch.bfloat16 and not interpreted() else tl.float32


def dot_precision(dtype: torch.dtype) -> str:
    """The precision of float32 dots: three-pass tf32 keeps float32's error, one pass is enough beside
    bf16."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def index_tensor(values: list[int] | list[list[int]], like: Tensor, *, columns: int = 0) -> Tensor:
    """An int64 tensor on the device of `like`; with `columns`, two-dimensional even when empty."""
    table = torch.tensor(values, dtype=torch.int64)
    if columns:
        table = table.view(-1, columns)
    return table.to(like.device, non_blocking=True)


def power_of_2(value: int, *, least: int = 1) -> int:
    return max(least, 1 << max(value - 1, 0).bit_length())
