"""The promise of `delta_rule` about taps, over every phase of the 64-token grid and every position."""

import pytest
import torch

from kernel_testing import assert_same_bits, generator
from qwen35_kernels import Tap, gated_delta_rule_prefill

LENGTHS = (1, 63, 64, 65, 130, 200)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_tap_at_every_phase_has_the_bits_of_a_call_that_ends_there(tokens: int, set_threads) -> None:
    set_threads(1)
    rng = generator(70 + tokens)
    q, k = (torch.randn(tokens, 1, 16, generator=rng) for _ in range(2))
    v = torch.randn(tokens, 2, 16, generator=rng)
    g = -torch.rand(tokens, 2, generator=rng)
    g[:, 1] *= 20
    beta = torch.rand(tokens, 2, generator=rng)
    state = torch.randn(tokens + 2, 2, 16, 16, generator=rng)
    start = state[1].clone()
    short = state[:2].clone()
    for phase in range(64):
        base = 640 + phase
        taps = [Tap(0, base + p, p + 1) for p in range(1, tokens + 1)]
        state[1] = start
        whole = gated_delta_rule_prefill(
            q=q, k=k, v=v, g=g, beta=beta, state=state, slots=[1], cu_seqlens=[0, tokens], bases=[base], taps=taps
        )
        for p in range(1, tokens + 1):
            short[1] = start
            part = gated_delta_rule_prefill(
                q=q[:p],
                k=k[:p],
                v=v[:p],
                g=g[:p],
                beta=beta[:p],
                state=short,
                slots=[1],
                cu_seqlens=[0, p],
                bases=[base],
            )
            # As integers: -0.0 and 0.0 differ.
            tap = state[p + 1].view(torch.int32)
            assert torch.equal(short[1].view(torch.int32), tap), f"phase {phase}, tap {p} of {tokens}"
            output = whole[:p].view(torch.int32)
            assert torch.equal(part.view(torch.int32), output), f"phase {phase}, outputs of {p} of {tokens}"
        assert_same_bits(short[1], state[1], f"phase {phase}")
        assert_same_bits(state[1], state[tokens + 1], f"phase {phase}")
