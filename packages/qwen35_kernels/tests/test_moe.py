import pytest
import torch

from kernel_testing import assert_close, assert_same_bits, generator
from qwen35_kernels import KernelInputError, moe_combine_shared, moe_experts, moe_route, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 2, 37])
def test_router_and_experts_match_the_oracle(tokens: int, dtype: torch.dtype) -> None:
    rng = generator(80)
    x = torch.randn(tokens, 32, generator=rng).to(dtype)
    router = torch.randn(16, 32, generator=rng).to(dtype)
    gate_up = (torch.randn(16, 2 * 24, 32, generator=rng) * 0.2).to(dtype)
    down = (torch.randn(16, 32, 24, generator=rng) * 0.2).to(dtype)
    weights, experts = moe_route(logits=x.float() @ router.float().t(), top_k=4)
    y = moe_experts(x=x, gate_up=gate_up, down=down, weights=weights, experts=experts)
    assert y.dtype == dtype
    atol = 1e-5 if dtype == torch.float32 else 3e-2
    assert_close(y, reference.moe(x, router, gate_up, down, 4), atol=atol, rtol=atol)


def test_route_keeps_the_largest_and_prefers_lower_experts() -> None:
    weights, experts = moe_route(logits=torch.tensor([[1.0, 3.0, 3.0, 3.0, -1.0]]), top_k=2)
    assert experts.tolist() == [[1, 2]]
    assert weights.tolist() == [[0.5, 0.5]]
    logits = torch.randn(9, 33, generator=generator(81))
    weights, experts = moe_route(logits=logits, top_k=5)
    exact = torch.softmax(logits.double(), 1).gather(1, experts)
    assert_close(weights, exact / exact.sum(1, keepdim=True), atol=1e-6, rtol=1e-6)
    for row in (0, 4, 8):
        part = moe_route(logits=logits[row : row + 1], top_k=5)
        assert_same_bits(part[0], weights[row : row + 1])
        assert_same_bits(part[1], experts[row : row + 1])


def test_one_expert_for_all_tokens_and_unused_experts() -> None:
    rng = generator(82)
    x = torch.randn(6, 8, generator=rng)
    gate_up, down = torch.randn(3, 8, 8, generator=rng), torch.randn(3, 8, 4, generator=rng)
    gate_up[[0, 2]] = float("nan")
    weights, experts = torch.full((6, 1), 0.5), torch.ones(6, 1, dtype=torch.int64)
    y = moe_experts(x=x, gate_up=gate_up, down=down, weights=weights, experts=experts)
    expected = reference.swiglu(x.double() @ gate_up[1].double().t()) @ down[1].double().t() * 0.5
    assert_close(y, expected, atol=1e-5, rtol=1e-5)


def test_shared_expert_is_gated() -> None:
    rng = generator(83)
    routed, shared = torch.randn(5, 16, generator=rng), torch.randn(5, 16, generator=rng)
    gate = torch.randn(5, 1, generator=rng) * 3
    y = moe_combine_shared(routed=routed, shared=shared, gate=gate)
    expected = routed.double() + torch.sigmoid(gate.double()) * shared.double()
    assert_close(y, expected, atol=1e-6, rtol=1e-6)


def test_bad_input_names_op_constraint_and_value() -> None:
    with pytest.raises(KernelInputError, match=r"moe_route: top_k must lie in \[1, 4\], got 5"):
        moe_route(logits=torch.zeros(1, 4), top_k=5)
    good = {
        "x": torch.zeros(2, 8),
        "gate_up": torch.zeros(3, 8, 8),
        "down": torch.zeros(3, 8, 4),
        "weights": torch.zeros(2, 1),
        "experts": torch.zeros(2, 1, dtype=torch.int64),
    }
    moe_experts(**good)
    for changes, message in (
        ({"experts": torch.full((2, 1), 3)}, r"experts must lie in \[0, 3\), got 3"),
        ({"down": torch.zeros(3, 8, 5)}, r"down must have shape \(3, 8, 4\), got \(3, 8, 5\)"),
        ({"weights": torch.zeros(2, 2)}, r"weights must have shape \(2, 1\), got \(2, 2\)"),
    ):
        with pytest.raises(KernelInputError, match="moe_experts: " + message):
            moe_experts(**{**good, **changes})
