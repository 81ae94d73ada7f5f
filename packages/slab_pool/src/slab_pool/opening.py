"""The copy stream of a device."""

from __future__ import annotations

import torch

from slab_pool.cpu import CpuCopyStream
from slab_pool.cuda import CudaCopyStream
from slab_pool.streams import DEFAULT_MAX_IN_FLIGHT_BYTES, CopyStream


def open_copy_stream(
    device: torch.device | str,
    *,
    max_in_flight_bytes: int = DEFAULT_MAX_IN_FLIGHT_BYTES,
) -> CopyStream:
    """A copy stream for arenas on `device`: CUDA's own, or a CPU's background thread.

    Raises:
        ValueError: any other kind of device.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return CpuCopyStream(max_in_flight_bytes=max_in_flight_bytes)
    if device.type == "cuda":
        return CudaCopyStream(device, max_in_flight_bytes=max_in_flight_bytes)
    raise ValueError(f"open_copy_stream: device must be of type cpu or cuda, got {device!r}")
