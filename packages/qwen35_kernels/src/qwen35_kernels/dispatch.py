"""Which implementation runs. No other module imports Triton; this one does so only where it is to run.

The device of the tensors decides: Triton on CUDA where it is installed, torch otherwise. The environment
variable QWEN35_KERNELS_BACKEND (auto, torch or triton; read once) forces one; triton on a CPU needs its
interpreter (TRITON_INTERPRET=1 before anything imports triton).
"""

import functools
import importlib
import importlib.util
import os
from types import ModuleType

from torch import Tensor

from qwen35_kernels.contracts import refuse

__all__ = ["triton_for"]

_VARIABLE = "QWEN35_KERNELS_BACKEND"


@functools.cache
def _choice() -> str:
    choice = os.environ.get(_VARIABLE, "auto")
    if choice not in ("auto", "torch", "triton"):
        refuse("dispatch", f"{_VARIABLE} must be auto, torch or triton", choice)
    return choice


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_for(x: Tensor) -> ModuleType | None:
    """The Triton implementations where they are to run on the device of x, else None.

    Raises:
        KernelInputError: they are forced and not installed, or the variable has another value.
    """
    choice = _choice()
    if choice == "torch" or (choice == "auto" and (x.device.type != "cuda" or not _installed())):
        return None
    if not _installed():
        refuse("dispatch", "triton must be installed (the extra qwen35-kernels[triton])", "no triton")
    return importlib.import_module("qwen35_kernels.triton")
