import pytest
import torch

from kernel_testing import assert_close, assert_same_bits, generator, tolerance
from qwen35_kernels import KernelInputError, reference, swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_matches_the_oracle(tokens: int, dtype: torch.dtype) -> None:
    x = (torch.randn(tokens, 96, generator=generator(6)) * 4).to(dtype)
    assert_close(swiglu(gate_up=x), reference.swiglu(x), **tolerance(dtype))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_the_batch(threads: int, set_threads) -> None:
    set_threads(threads)
    x = torch.randn(40, 2 * 1029, generator=generator(7))
    whole = swiglu(gate_up=x)
    for rows in (slice(0, 1), slice(3, 10), slice(39, 40)):
        assert_same_bits(swiglu(gate_up=x[rows]), whole[rows])


def test_refuses_an_odd_number_of_columns() -> None:
    with pytest.raises(KernelInputError, match="swiglu: gate_up must have an even number of columns, got 7"):
        swiglu(gate_up=torch.zeros(2, 7))
