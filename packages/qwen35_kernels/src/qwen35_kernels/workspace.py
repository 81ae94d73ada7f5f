"""Scratch memory that outlives a call."""

import math

import torch
from torch import Tensor

__all__ = ["Workspace"]


class Workspace:
    """Grow-only scratch buffers an op reuses from call to call.

    Fresh megabytes cost a CPU a page fault per 4 KiB, more than the arithmetic of a decode step. Pass one
    workspace to every call made from one thread; without one an op makes its own and drops it. It holds no
    results and no state: contents are undefined between calls.
    """

    def __init__(self) -> None:
        # Each buffer beside the view of it that was asked for last: most calls ask for the same again.
        self._buffers: dict[tuple[str, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised contiguous tensor; the next `take` of the same name overwrites it."""
        key = (name, dtype, device)
        buffer, view = self._buffers.get(key, (None, None))
        if view is not None and view.shape == shape:
            return view
        size = math.prod(shape)
        if buffer is None or buffer.numel() < size:
            # Ordinary even where it is made in inference mode: it outlives the mode.
            with torch.inference_mode(False):
                buffer = torch.empty(size, dtype=dtype, device=device)
        view = buffer[:size].view(shape)
        self._buffers[key] = buffer, view
        return view

    @property
    def num_bytes(self) -> int:
        """What it has grown to. May be asked while another thread takes."""
        return sum(buffer.numel() * buffer.element_size() for buffer, _ in list(self._buffers.values()))
