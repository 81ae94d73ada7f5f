import itertools

import pytest
import torch

from kernel_testing import assert_same_bits, generator
from qwen35_kernels import reference
from qwen35_kernels.layout import FP4_ROWS, FP8_ROWS, INT8_ROWS
from qwen35_kernels.quantisation import dequantise_rows, quantise_rows


@pytest.mark.parametrize("rows", [INT8_ROWS, FP8_ROWS, FP4_ROWS], ids=lambda rows: rows.name)
def test_storing_what_was_read_changes_nothing(rows) -> None:
    x = torch.randn(50, 128, generator=generator(95)) * 10
    values, scales = quantise_rows(x, rows)
    back = dequantise_rows(values, scales, rows)
    again = dequantise_rows(*quantise_rows(back, rows), rows)
    # The largest code of each group is in use, so a second pass finds the same scale up to its rounding.
    assert float((again - back).abs().max()) <= float(back.abs().max()) * 2**-3
    assert back.dtype == torch.float32


def test_every_pair_of_nibbles_is_read_back() -> None:
    levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    signed = levels + [-x for x in levels]
    for low, high in itertools.product(range(16), range(16)):
        values = torch.full((1, 16), low + 16 * high, dtype=torch.uint8)
        scales = torch.ones(1, 2).to(torch.float8_e4m3fn)
        back = dequantise_rows(values, scales, FP4_ROWS)
        assert back[0, :16].tolist() == [signed[low]] * 16
        assert back[0, 16:].tolist() == [signed[high]] * 16


def test_midpoints_go_to_the_even_code() -> None:
    x = torch.tensor([[6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -5, -3.5, -2.5, -1.75, -1.25, -0.75, -0.25, 0] * 2])
    back = dequantise_rows(*quantise_rows(x, FP4_ROWS), FP4_ROWS)
    assert back[0, :16].tolist() == [6, 4, 4, 2, 2, 1, 1, 0, -4, -4, -2, -2, -1, -1, 0, 0]


def test_extremes_saturate_and_tiny_groups_vanish() -> None:
    x = torch.cat([torch.full((1, 16), 1e9), torch.full((1, 16), 1e-5)], dim=1)
    back = dequantise_rows(*quantise_rows(x, FP4_ROWS), FP4_ROWS)
    assert back[0].tolist() == [448.0 * 6] * 16 + [0.0] * 16
    for rows in (INT8_ROWS, FP8_ROWS, FP4_ROWS):
        zeros = dequantise_rows(*quantise_rows(torch.zeros(2, 64), rows), rows)
        assert_same_bits(zeros, torch.zeros(2, 64))


def test_the_oracle_lists_the_codes_of_e4m3() -> None:
    every = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    row = [448.0, *every.tolist()[1:]]
    assert reference.quantised_row(row, "fp8") == row
