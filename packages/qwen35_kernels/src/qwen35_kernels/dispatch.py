"""Which implementation runs: the one module that imports Triton, and only when it is wanted.

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

__all__ = ["triton_backend", "triton_for"]

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


def triton_backend() -> ModuleType:
    """The Triton implementations; refuses where triton is not installed."""
    if not _installed():
        refuse("dispatch", "triton must be installed (the extra qwen35-kernels[triton])", "no triton")
    return importlib.import_module("qwen35_kernels.triton")


def triton_for(x: Tensor) -> ModuleType | None:
    """The Triton implementations where they are to run on the device of x, else None."""
    choice = _choice()
    if choice == "torch" or (choice == "auto" and (x.device.type != "cuda" or not _installed())):
        return None
    return triton_backend()
