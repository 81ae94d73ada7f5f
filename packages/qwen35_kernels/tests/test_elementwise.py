import pytest
import torch

from kernel_testing import assert_close, assert_same_bits, generator
from qwen35_kernels import elementwise

FUNCTIONS = {
    "sigmoid": (elementwise.sigmoid, torch.sigmoid),
    "silu": (elementwise.silu, torch.nn.functional.silu),
    "silu_": (lambda x: elementwise.silu_(x.clone()), torch.nn.functional.silu),
    "softplus": (elementwise.softplus, lambda x: torch.logaddexp(x, torch.zeros_like(x))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_matches_float64(name: str) -> None:
    ours, exact = FUNCTIONS[name]
    x = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38])])
    assert_close(ours(x), exact(x.double()), atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_place_or_threads(name: str, threads: int, set_threads) -> None:
    ours = FUNCTIONS[name][0]
    x = torch.randn(200_003, generator=generator(1)) * 4
    set_threads(1)
    whole = ours(x)
    set_threads(threads)
    for length in (*range(1, 70), 1000, 40_001, 100_001, 200_003):
        assert_same_bits(ours(x[:length]), whole[:length], f"length {length}")
        assert_same_bits(ours(x[-length:]), whole[-length:], f"last {length}")
    assert_same_bits(ours(x[::3]), whole[::3], "strided")
