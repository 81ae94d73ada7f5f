"""The promise of `delta_rule` about taps, over every phase of the 64-token grid and every position."""

import pytest
import torch
from torch import Tensor

from kernel_testing import delta_prefill, generator
from qwen35_kernels import StateTap, Workspace

LENGTHS = (1, 63, 64, 65, 130, 200)
LONGEST = LENGTHS[-1]


def inputs() -> dict[str, Tensor]:
    rng = generator(70)
    g = -torch.rand(LONGEST, 2, generator=rng)
    g[:, 1] *= 20
    q, k = (torch.randn(LONGEST, 1, 16, generator=rng) for _ in range(2))
    v = torch.randn(LONGEST, 2, 16, generator=rng)
    return {"q": q, "k": k, "v": v, "g": g, "beta": torch.rand(LONGEST, 2, generator=rng)}


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """As integers, because -0.0 and 0.0 compare equal as floats."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("eighth", range(8))
def test_every_tap_has_the_bits_of_a_call_that_ends_there(eighth: int, set_threads) -> None:
    set_threads(1)
    workspace = Workspace()
    whole = inputs()
    rng = generator(71)
    state = torch.randn(LONGEST + 2, 2, 16, 16, generator=rng)
    start = state[1].clone()

    def run(tokens: int, base: int, taps: list[StateTap]) -> Tensor:
        """A call over the first tokens; the final state is in slot 1, taps where they say."""
        state[1] = start
        return delta_prefill(
            **{name: x[:tokens] for name, x in whole.items()},
            state=state,
            slots=[1],
            cu_seqlens=[0, tokens],
            bases=[base],
            taps=taps,
            workspace=workspace,
        )

    for phase in range(8 * eighth, 8 * eighth + 8):
        base = 640 + phase
        ends = []
        for p in range(1, LONGEST + 1):
            o = run(p, base, [])
            ends.append((state[1].clone(), o))
        for tokens in LENGTHS:
            state[2:] = float("nan")
            o = run(tokens, base, [StateTap(0, base + p, p + 1) for p in range(1, tokens + 1)])
            assert equal_bits(state[1], ends[tokens - 1][0]), f"phase {phase}: taps changed the end of {tokens}"
            for p in range(1, tokens + 1):
                assert equal_bits(state[p + 1], ends[p - 1][0]), f"phase {phase}, tap {p} of {tokens}"
            for p in (1, tokens // 2 + 1, tokens):
                assert equal_bits(o[:p], ends[p - 1][1]), f"phase {phase}, outputs of {p} of {tokens}"
