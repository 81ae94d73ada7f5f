import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kernel_testing import GuardedMemory, guarded_arguments

# `tools/gpu.py` runs the tests of the ops with their tensors on a card.
torch.set_default_device(os.environ.get("QWEN35_TEST_DEVICE", "cpu"))


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def guarded_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever an op allocates for results or scratch reads as NaN and lies between guards, checked at the end."""
    memory = GuardedMemory()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", memory.empty)
        patch.setattr(torch, "empty_like", memory.empty_like)
        yield
    memory.check()


if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter as _interpreter

    _patched: set[Any] = set()
    _call_grid = _interpreter.GridExecutor.__call__

    def _call_grid_afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        _patched.clear()
        with guarded_arguments(kwargs) as inside:
            return _call_grid(self, *args, **inside)

    def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Patch triton.language for a device function once a launch: once a call, as the interpreter does it,
        costs 20 ms each time."""
        if self.fn not in _patched:
            _interpreter._patch_lang(self.fn)
            _patched.add(self.fn)
        return self.rewrite()(*args, **kwargs)

    _interpreter.GridExecutor.__call__ = _call_grid_afresh
    _interpreter.InterpretedFunction.__call__ = _call_device_function


@pytest.fixture(autouse=True, scope="session")
def program_order() -> Iterator[None]:
    """With QWEN35_TEST_PROGRAM_ORDER, the interpreter runs a launch's programs in another order.

    It runs them one after another, so a kernel whose programs depend on each other passes in the natural
    order.
    """
    order = os.environ.get("QWEN35_TEST_PROGRAM_ORDER", "natural")
    if order == "natural":
        yield
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    plain = builder.set_grid_idx
    rng = random.Random(0)
    permutation: list[int] = []

    def permuted(x: int, y: int, z: int) -> None:
        width, height, depth = builder.grid_dim
        size = width * height * depth
        if (x, y, z) == (0, 0, 0):
            permutation[:] = range(size)
            permutation.reverse() if order == "reversed" else rng.shuffle(permutation)
        number = permutation[(x * height + y) * depth + z]
        plain(number // (height * depth), number // depth % height, number % depth)

    builder.set_grid_idx = permuted
    yield
    builder.set_grid_idx = plain
