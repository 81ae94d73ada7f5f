import pytest
import torch

from kernel_testing import assert_close, assert_same_bits, generator, tolerance
from qwen35_kernels import KernelInputError, qk_norm_rotary, reference, rotary_frequencies, rotary_tables


def test_frequencies_fall_geometrically() -> None:
    f = rotary_frequencies(rotary_dim=8, theta=10_000.0)
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    assert_close(f, expected, atol=0.0, rtol=1e-6)


def test_tables_hold_the_angle_of_each_position() -> None:
    f = rotary_frequencies(rotary_dim=16, theta=1e7)
    positions = torch.tensor([0, 1, 5, 4095])
    cos, sin = rotary_tables(positions=positions, frequencies=f)
    angles = positions.double()[:, None] * f.double()
    assert_close(cos, torch.cos(angles), atol=3e-4, rtol=0.0)
    assert_close(sin, torch.sin(angles), atol=3e-4, rtol=0.0)
    assert_close(cos[:3], torch.cos(angles[:3]), atol=1e-6, rtol=0.0)


def test_several_axes_own_interleaved_frequencies() -> None:
    f = rotary_frequencies(rotary_dim=64, theta=1e7)
    positions = torch.tensor([[3, 9, 9], [3, 10, 12], [3, 40, 41]])
    cos, sin = rotary_tables(positions=positions, frequencies=f, sections=[11, 11, 10])
    owner = [i % 3 if i < 3 * [11, 11, 10][i % 3] else 0 for i in range(32)]
    assert owner == [0, 1, 2] * 10 + [0, 1]
    angles = positions.double()[owner].t() * f.double()
    assert_close(cos, torch.cos(angles), atol=1e-5, rtol=0.0)
    assert_close(sin, torch.sin(angles), atol=1e-5, rtol=0.0)
    uneven = rotary_tables(positions=positions, frequencies=f[:8], sections=[5, 2, 1])[0]
    angles = positions.double()[[0, 1, 2, 0, 1, 0, 0, 0]].t() * f[:8].double()
    assert_close(uneven, torch.cos(angles), atol=1e-5, rtol=0.0)


def test_equal_axes_have_the_bits_of_one() -> None:
    f = rotary_frequencies(rotary_dim=64, theta=1e7)
    positions = torch.arange(50)
    plain = rotary_tables(positions=positions, frequencies=f)
    several = rotary_tables(positions=positions.expand(3, 50), frequencies=f, sections=[11, 11, 10])
    for a, b in zip(plain, several, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [16, 64])
def test_matches_the_oracle(rotary_dim: int, dtype: torch.dtype) -> None:
    rng = generator(8)
    fused = torch.randn(5, 4, 128, generator=rng).to(dtype)
    q, k = fused[..., :64], torch.randn(5, 2, 64, generator=rng).to(dtype)
    qw, kw = (torch.randn(64, generator=rng).to(dtype) for _ in range(2))
    f = rotary_frequencies(rotary_dim=rotary_dim, theta=1e4)
    positions = torch.tensor([0, 3, 100, 7, 7])
    cos, sin = rotary_tables(positions=positions, frequencies=f)
    got_q, got_k = qk_norm_rotary(q=q, k=k, q_weight=qw, k_weight=kw, eps=1e-6, cos=cos, sin=sin)
    angles = positions.double()[:, None] * f.double()
    for got, x, w in ((got_q, q, qw), (got_k, k, kw)):
        assert got.dtype == dtype
        assert got.is_contiguous()
        assert_close(got, reference.rotary(reference.rms_norm(x, w, 1e-6), angles), **tolerance(dtype))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_does_not_depend_on_the_batch(threads: int, set_threads) -> None:
    set_threads(threads)
    rng = generator(9)
    q, k = torch.randn(70, 6, 80, generator=rng), torch.randn(70, 2, 80, generator=rng)
    w = torch.randn(80, generator=rng)
    f = rotary_frequencies(rotary_dim=20, theta=1e4)
    positions = torch.arange(1000, 1070)

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rotary_tables(positions=positions[rows], frequencies=f)
        return qk_norm_rotary(q=q[rows], k=k[rows], q_weight=w, k_weight=w, eps=1e-6, cos=cos, sin=sin)

    whole = run(slice(0, 70))
    for rows in (slice(0, 1), slice(69, 70), slice(3, 40)):
        for part, full in zip(run(rows), whole, strict=True):
            assert_same_bits(part, full[rows])


def test_bad_input_names_op_constraint_and_value() -> None:
    q, k, w = torch.zeros(2, 2, 8), torch.zeros(2, 1, 8), torch.zeros(8)
    table = torch.zeros(2, 5)
    with pytest.raises(KernelInputError, match="qk_norm_rotary: cos must cover at most 4 frequencies, got 5"):
        qk_norm_rotary(q=q, k=k, q_weight=w, k_weight=w, eps=1e-6, cos=table, sin=table)
    with pytest.raises(KernelInputError, match=r"qk_norm_rotary: sin must have shape \(2, 2\), got \(1, 2\)"):
        qk_norm_rotary(q=q, k=k, q_weight=w, k_weight=w, eps=1e-6, cos=table[:, :2].contiguous(), sin=table[:1, :2])
    with pytest.raises(KernelInputError, match="rotary_dim must be even and at least 2, got 7"):
        rotary_frequencies(rotary_dim=7, theta=1e4)
    several = {"positions": torch.zeros(3, 2, dtype=torch.int64), "frequencies": torch.ones(4)}
    with pytest.raises(KernelInputError, match=r"sections must add up to 4 frequencies, got \(1, 1, 1\)"):
        rotary_tables(**several, sections=[1, 1, 1])
    with pytest.raises(KernelInputError, match="sections must have 3 entries, got None"):
        rotary_tables(**several)
