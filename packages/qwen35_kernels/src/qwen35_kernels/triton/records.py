"""Record copies by a kernel: pinned Host memory is read or written through its device pointer."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from qwen35_kernels.triton.launch import Launch, run

__all__ = ["copy_records", "plan_copy_records"]

# Programs at most: enough to fill a PCIe link, few enough to leave the chip to whoever is decoding.
_PROGRAMS = 32
_UNITS = 2048


@triton.jit
def copy_rows(
    source_ptr,
    destination_ptr,
    source_rows_ptr,
    destination_rows_ptr,
    source_pitch,
    destination_pitch,
    num_rows,
    pairs,
    chunks,
    BLOCK: tl.constexpr,
):
    """Records of pairs of int64, one 16-byte access each; pitches in pairs."""
    units = pairs * 2
    for i_work in range(tl.program_id(0), num_rows * chunks, tl.num_programs(0)):
        i_row, i_chunk = i_work // chunks, i_work % chunks
        read = tl.load(source_rows_ptr + i_row) * (source_pitch * 2)
        write = tl.load(destination_rows_ptr + i_row) * (destination_pitch * 2)
        unit = i_chunk * BLOCK + tl.arange(0, BLOCK)
        mask = unit < units
        tl.store(destination_ptr + write + unit, tl.load(source_ptr + read + unit, mask=mask), mask=mask)


def plan_copy_records(
    *, source: Tensor, destination: Tensor, source_rows: Tensor, destination_rows: Tensor
) -> tuple[Launch, ...]:
    """source and destination int64 views [rows, units] of the byte ranges, 16-byte aligned."""
    units = source.shape[1]
    chunks = -(-units // _UNITS)
    rows = source_rows.shape[0]
    return (
        Launch(
            kernel=copy_rows,
            grid=(min(_PROGRAMS, rows * chunks), 1, 1),
            arguments={
                "source_ptr": source,
                "destination_ptr": destination,
                "source_rows_ptr": source_rows,
                "destination_rows_ptr": destination_rows,
                "source_pitch": source.stride(0) // 2,
                "destination_pitch": destination.stride(0) // 2,
                "num_rows": rows,
                "pairs": units // 2,
                "chunks": chunks,
            },
            constants={"BLOCK": _UNITS},
            num_warps=8,
        ),
    )


def copy_records(*, source: Tensor, destination: Tensor, source_rows: Tensor, destination_rows: Tensor) -> None:
    run(
        plan_copy_records(
            source=source, destination=destination, source_rows=source_rows, destination_rows=destination_rows
        )
    )
