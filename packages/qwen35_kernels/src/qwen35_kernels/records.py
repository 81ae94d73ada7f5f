"""Moving records between two arenas: pages to slabs, slabs to pages, whole or a byte range such as one
layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen35_kernels.contracts import refuse
from qwen35_kernels.dispatch import triton_backend

__all__ = ["copy_records"]

_UNIT = 16


def copy_records(
    *,
    source: Tensor,
    destination: Tensor,
    source_rows: Sequence[int],
    destination_rows: Sequence[int],
    source_begin: int = 0,
    destination_begin: int = 0,
    num_bytes: int | None = None,
    non_blocking: bool = False,
    use_kernel: bool = False,
) -> None:
    """destination[d_i, destination_begin : + num_bytes] = source[s_i, source_begin : + num_bytes].

    source and destination uint8 [rows, pitch], dense rows, on any two devices; the row lists have equal
    lengths, destination rows are distinct, and no written byte is also read. num_bytes defaults to the rest
    of the source record; offsets and length are multiples of 16. Nothing else is written. Rows consecutive
    on both sides move as one two-dimensional copy. With `non_blocking` and pinned host memory the copies
    are queued on the current stream. With `use_kernel` one kernel on that stream moves everything instead,
    reading or writing pinned host memory through its device pointer; rows then lie at multiples of 16
    bytes.
    """
    op = "copy_records"
    for name, x in (("source", source), ("destination", destination)):
        if x.dtype != torch.uint8 or x.dim() != 2 or (x.numel() and x.stride(1) != 1):
            refuse(op, f"{name} must be uint8 rows, dense", (str(x.dtype), tuple(x.shape), x.stride()))
    if len(source_rows) != len(destination_rows):
        refuse(op, f"destination_rows must have {len(source_rows)} entries", len(destination_rows))
    if num_bytes is None:
        num_bytes = source.shape[1] - source_begin
    for name, value in (
        ("source_begin", source_begin),
        ("destination_begin", destination_begin),
        ("num_bytes", num_bytes),
    ):
        if value < 0 or value % _UNIT:
            refuse(op, f"{name} must be a multiple of {_UNIT}", value)
    for name, x, begin, rows in (
        ("source", source, source_begin, source_rows),
        ("destination", destination, destination_begin, destination_rows),
    ):
        if begin + num_bytes > x.shape[1]:
            refuse(op, f"{name} records have {x.shape[1]} bytes", begin + num_bytes)
        for row in rows:
            if not 0 <= row < x.shape[0]:
                refuse(op, f"{name}_rows must lie in [0, {x.shape[0]})", row)
    if len(set(destination_rows)) != len(destination_rows):
        refuse(op, "destination_rows must be distinct", tuple(destination_rows))
    read = source[:, source_begin : source_begin + num_bytes]
    write = destination[:, destination_begin : destination_begin + num_bytes]
    if use_kernel:
        _copy_by_kernel(op, read, write, source_rows, destination_rows)
        return
    for first_read, first_write, length in consecutive_runs(source_rows, destination_rows):
        write[first_write : first_write + length].copy_(
            read[first_read : first_read + length], non_blocking=non_blocking
        )


def _copy_by_kernel(
    op: str, read: Tensor, write: Tensor, source_rows: Sequence[int], destination_rows: Sequence[int]
) -> None:
    for name, x in (("source", read), ("destination", write)):
        if x.stride(0) % _UNIT or x.data_ptr() % _UNIT:
            refuse(op, f"{name} rows must lie at multiples of {_UNIT} bytes for a kernel", x.stride(0))
        if x.device.type == "cpu" and torch.cuda.is_available() and not x.is_pinned():
            refuse(op, f"{name} must be pinned host memory or on a device for a kernel", "pageable memory")
    device = write.device if write.device.type == "cuda" else read.device
    rows = (torch.tensor(r, dtype=torch.int64).to(device) for r in (list(source_rows), list(destination_rows)))
    source_index, destination_index = rows
    triton_backend().records.copy_records(
        source=read.view(torch.int64),
        destination=write.view(torch.int64),
        source_rows=source_index,
        destination_rows=destination_index,
    )


def consecutive_runs(source_rows: Sequence[int], destination_rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Maximal (source row, destination row, length) runs that advance by one on both sides."""
    runs: list[tuple[int, int, int]] = []
    for read, write in zip(source_rows, destination_rows, strict=True):
        if runs and runs[-1][0] + runs[-1][2] == read and runs[-1][1] + runs[-1][2] == write:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((read, write, 1))
    return runs
