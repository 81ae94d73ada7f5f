import pytest
import torch

from kernel_testing import assert_close, assert_same_bits, generator, tolerance
from qwen35_kernels import KernelInputError, gated_rms_norm, reference, rms_norm

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 256), (0, 64), (3, 4, 80), (1, 5120)])
def test_rms_norm_matches_the_oracle(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rng = generator(2)
    x = (torch.randn(shape, generator=rng) * 3).to(dtype)
    weight = torch.randn(shape[-1], generator=rng).to(dtype)
    y = rms_norm(x=x, weight=weight, eps=1e-6)
    assert y.dtype == dtype
    assert_close(y, reference.rms_norm(x, weight, 1e-6), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm_matches_the_oracle(dtype: torch.dtype) -> None:
    rng = generator(3)
    x, gate = ((torch.randn(7, 4, 128, generator=rng) * 3).to(dtype) for _ in range(2))
    weight = torch.randn(128, generator=rng).to(dtype)
    y = gated_rms_norm(x=x, gate=gate, weight=weight, eps=1e-6)
    assert_close(y, reference.gated_rms_norm(x, gate, weight, 1e-6), **tolerance(dtype))


def test_eps_decides_the_size_of_tiny_rows() -> None:
    x = torch.full((1, 64), 1e-4)
    y = rms_norm(x=x, weight=torch.zeros(64), eps=1e-6)
    assert_close(y, reference.rms_norm(x, torch.zeros(64), 1e-6), atol=1e-7, rtol=1e-5)
    assert 0.09 < float(y[0, 0]) < 0.11


def test_inputs_are_not_written() -> None:
    rng = generator(4)
    x, gate = torch.randn(3, 64, generator=rng), torch.randn(3, 64, generator=rng)
    weight = torch.randn(64, generator=rng)
    before = [x.clone(), gate.clone(), weight.clone()]
    rms_norm(x=x, weight=weight, eps=1e-6)
    gated_rms_norm(x=x, gate=gate, weight=weight, eps=1e-6)
    for tensor, copy in zip((x, gate, weight), before, strict=True):
        assert_same_bits(tensor, copy)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_the_batch(threads: int, set_threads) -> None:
    set_threads(threads)
    rng = generator(5)
    for dim in (64, 80, 256, 5120):
        x, gate = torch.randn(33, dim, generator=rng), torch.randn(33, dim, generator=rng)
        weight = torch.randn(dim, generator=rng)
        plain, gated = (
            rms_norm(x=x, weight=weight, eps=1e-6),
            gated_rms_norm(x=x, gate=gate, weight=weight, eps=1e-6),
        )
        for rows in (slice(0, 1), slice(5, 6), slice(7, 12), slice(30, 33)):
            assert_same_bits(rms_norm(x=x[rows], weight=weight, eps=1e-6), plain[rows])
            part = gated_rms_norm(x=x[rows], gate=gate[rows], weight=weight, eps=1e-6)
            assert_same_bits(part, gated[rows])


def test_bad_input_names_op_constraint_and_value() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(KernelInputError, match=r"rms_norm: weight must have shape \(8,\), got \(4,\)"):
        rms_norm(x=x, weight=weight[:4], eps=1e-6)
    with pytest.raises(KernelInputError, match=r"rms_norm: eps must lie in \[0, 1\), got -1.0"):
        rms_norm(x=x, weight=weight, eps=-1.0)
    with pytest.raises(KernelInputError, match=r"rms_norm: x must be float32 or bfloat16, got 'float64'"):
        rms_norm(x=x.double(), weight=weight, eps=1e-6)
    with pytest.raises(KernelInputError, match=r"gate must have shape \(2, 8\), got \(1, 8\)"):
        gated_rms_norm(x=x, gate=x[:1], weight=weight, eps=1e-6)
