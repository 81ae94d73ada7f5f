import itertools
import os

import pytest
import torch
from torch import Tensor

from kernel_testing import (
    assert_close,
    assert_same_bits,
    delta_prefill,
    delta_step,
    distant_rows,
    generator,
    state_tolerance,
    tolerance,
)
from qwen35_kernels import KernelInputError, StateLayout, StateTap, delta_gates, reference

DTYPES = [torch.float32, torch.bfloat16]


def make(
    seed: int,
    tokens: int,
    *,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (16, 24),
    slots: int = 6,
    dtype: torch.dtype = torch.float32,
    strength: float = 1.0,
) -> dict[str, Tensor]:
    """Inputs of one call, q, k, v as slices of one projection, the state inside an arena, scratch slot
    NaN."""
    rng = generator(seed)
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    layout = StateLayout(
        num_layers=2,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_channels=3,
        conv_width=4,
        conv_dtype=dtype,
        hidden_size=8,
        hidden_dtype=dtype,
    )
    arena = torch.empty(slots, layout.image_bytes, dtype=torch.uint8)
    state = layout.recurrent(arena, 1)
    state[1:] = torch.randn(state[1:].shape, generator=rng)
    sizes = [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]
    mixed = torch.randn(tokens, sum(sizes), generator=rng).to(dtype)
    q, k, v = mixed.split(sizes, dim=1)
    return {
        "q": q.unflatten(1, (key_heads, key_dim)),
        "k": k.unflatten(1, (key_heads, key_dim)),
        "v": v.unflatten(1, (value_heads, value_dim)),
        "g": -torch.rand(tokens, value_heads, generator=rng) * strength,
        "beta": torch.rand(tokens, value_heads, generator=rng),
        "state": state,
    }


def cut(inputs: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    return {name: x if name == "state" else x[begin:end] for name, x in inputs.items()}


def prefill(inputs: dict[str, Tensor], *, base: int = 0, slot: int = 1, **more) -> Tensor:
    tokens = inputs["q"].shape[0]
    return delta_prefill(**inputs, slots=[slot], cu_seqlens=[0, tokens], bases=[base], **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (3, 3)])
@pytest.mark.parametrize(("tokens", "base"), [(0, 3), (1, 0), (1, 63), (64, 0), (65, 1), (200, 40)])
def test_prefill_matches_the_recurrence(tokens: int, base: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = make(20, tokens, heads=heads, dtype=dtype)
    before = inputs["state"].clone()
    o = prefill(inputs, base=base)
    expected, states = reference.gated_delta_rule(**{**inputs, "state": before[1]})
    assert o.dtype == dtype
    assert_close(o, expected, **tolerance(dtype))
    assert_close(inputs["state"][1], states[-1], **state_tolerance(dtype))
    for slot in (0, 2, 3, 4, 5):
        assert_same_bits(inputs["state"][slot], before[slot])


@pytest.mark.parametrize("strength", [0.0, 20.0, 80.0])
def test_extreme_gates_match_the_recurrence(strength: float) -> None:
    inputs = make(21, 150)
    inputs["g"].fill_(-strength)
    inputs["g"][::7] = 0.0
    before = inputs["state"].clone()
    o = prefill(inputs, base=5, taps=[StateTap(0, 90, 2)])
    expected, states = reference.gated_delta_rule(**{**inputs, "state": before[1]})
    # Decays are differences of float32 sums as large as 64 * strength: their spacing is the tolerance.
    tol = max(2e-5, 64 * strength * 2**-23)
    assert_close(o, expected, atol=tol, rtol=tol)
    assert_close(inputs["state"][2], states[85], atol=tol, rtol=tol)
    assert_close(inputs["state"][1], states[-1], atol=tol, rtol=tol)


def test_repeated_keys_stay_accurate() -> None:
    inputs = make(22, 192)
    inputs["k"] = inputs["k"][:1].expand_as(inputs["k"])
    inputs["beta"].fill_(0.999)
    inputs["g"].fill_(-1e-3)
    before = inputs["state"].clone()
    o = prefill(inputs)
    expected, states = reference.gated_delta_rule(**{**inputs, "state": before[1]})
    assert_close(o, expected, atol=5e-5, rtol=5e-5)
    assert_close(inputs["state"][1], states[-1], atol=5e-5, rtol=5e-5)


def test_zero_vectors_are_not_divided_by_zero() -> None:
    inputs = make(23, 70)
    for name in ("q", "k"):
        inputs[name][3:9] = 0.0
    before = inputs["state"].clone()
    o = prefill(inputs)
    expected, _ = reference.gated_delta_rule(**{**inputs, "state": before[1]})
    assert_close(o, expected, **tolerance(torch.float32))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_tap_has_the_bits_of_a_call_that_ends_there(threads: int, set_threads) -> None:
    set_threads(threads)
    for base, tokens in itertools.product((0, 1, 63), (1, 64, 130)):
        positions = sorted({1, 15, 16, 17, 31, 32, 33, 63, 64, 65, tokens - 1, tokens} & set(range(1, tokens + 1)))
        # Programs differ by head: one is enough where an interpreter runs them.
        heads = (1, 1) if os.environ.get("TRITON_INTERPRET") == "1" else (2, 4)
        inputs = make(25, tokens, slots=2 + len(positions), heads=heads)
        start = inputs["state"][1].clone()
        taps = [StateTap(0, base + p, 2 + i) for i, p in enumerate(positions)]
        o = prefill(inputs, base=base, taps=taps)
        tapped = inputs["state"].clone()
        for i, p in enumerate(positions):
            short = cut(inputs, 0, p)
            short["state"][1] = start
            o_short = prefill(short, base=base)
            assert_same_bits(short["state"][1], tapped[2 + i], f"base {base}, {tokens} tokens, tap {p}")
            assert_same_bits(o_short, o[:p])


def test_taps_change_no_other_bit() -> None:
    plain, tapped = make(26, 200), make(26, 200)
    o_plain = prefill(plain, base=70)
    o_tapped = prefill(
        tapped, base=70, taps=[StateTap(0, 71, 2), StateTap(0, 128, 3), StateTap(0, 200, 4), StateTap(0, 200, 5)]
    )
    assert_same_bits(o_plain, o_tapped)
    assert_same_bits(plain["state"][1], tapped["state"][1])
    assert_same_bits(tapped["state"][4], tapped["state"][5])


def test_later_tokens_cannot_reach_a_tap() -> None:
    plain, other = make(27, 64), make(27, 64)
    for name, value in (("q", 1e9), ("k", -1e9), ("v", 1e30), ("g", -80.0), ("beta", 1.0)):
        other[name][40:] = value
    for inputs in (plain, other):
        prefill(inputs, taps=[StateTap(0, 40, 2), StateTap(0, 33, 3)])
    assert_same_bits(plain["state"][2:4], other["state"][2:4])
    assert not torch.equal(plain["state"][1], other["state"][1])


def test_whole_tiles_of_identity_tokens_return_the_state() -> None:
    inputs = make(28, 128)
    for name in ("k", "v", "g", "beta"):
        inputs[name].zero_()
    before = inputs["state"][1].clone()
    prefill(inputs)
    assert bool((inputs["state"][1] == before).all())


def test_resuming_at_a_tile_border_has_the_bits_of_one_call() -> None:
    whole, parts = make(29, 200), make(29, 200)
    o = prefill(whole, base=20)
    pieces = [prefill(cut(parts, a, b), base=20 + a) for a, b in ((0, 44), (44, 108), (108, 200))]
    assert_same_bits(torch.cat(pieces), o)
    assert_same_bits(parts["state"][1], whole["state"][1])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dims", [(16, 24), (64, 64), (128, 128)])
def test_a_sequence_does_not_depend_on_the_batch(threads: int, dims: tuple[int, int], set_threads) -> None:
    set_threads(threads)
    batch = make(30, 330, dims=dims)
    start = batch["state"].clone()
    cu_seqlens, bases = [0, 130, 130, 131, 330], [7, 0, 63, 64]
    taps = [StateTap(0, 20, 5)]
    o = delta_prefill(**batch, slots=[3, 1, 4, 2], cu_seqlens=cu_seqlens, bases=bases, taps=taps)
    for i, slot in enumerate([3, 1, 4, 2]):
        begin, end = cu_seqlens[i], cu_seqlens[i + 1]
        alone = cut(batch, begin, end)
        alone["state"] = start.clone()
        assert_same_bits(prefill(alone, base=bases[i], slot=slot), o[begin:end])
        assert_same_bits(alone["state"][slot], batch["state"][slot])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (2, 4)])
def test_step_matches_the_recurrence(heads: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = make(31, 3, heads=heads, dtype=dtype, slots=8)
    before = inputs["state"].clone()
    o = delta_step(**inputs, slots=torch.tensor([5, 1, 2]))
    for b, slot in enumerate((5, 1, 2)):
        row = {**cut(inputs, b, b + 1), "state": before[slot]}
        expected, states = reference.gated_delta_rule(**row)
        assert_close(o[b : b + 1], expected, **tolerance(dtype))
        assert_close(inputs["state"][slot], states[-1], atol=2e-5, rtol=2e-5)
    for slot in (0, 3, 4, 6, 7):
        assert_same_bits(inputs["state"][slot], before[slot])


def test_a_step_takes_gates_of_any_strides() -> None:
    plain = make(33, 3)
    turned = {name: x.clone() for name, x in plain.items()}
    for name in ("g", "beta"):
        turned[name] = turned[name].t().contiguous().t()
    slots = torch.tensor([5, 1, 2])
    assert_same_bits(delta_step(**turned, slots=slots), delta_step(**plain, slots=slots))
    assert_same_bits(turned["state"], plain["state"])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dims", [(16, 24), (128, 128)])
def test_a_lane_does_not_depend_on_the_batch(threads: int, dims: tuple[int, int], set_threads) -> None:
    set_threads(threads)
    batch = make(32, 5, dims=dims, slots=8)
    alone = {name: x.clone() for name, x in batch.items()}
    slots = torch.tensor([4, 7, 1, 2, 6])
    o = delta_step(**batch, slots=slots)
    for b in range(5):
        assert_same_bits(delta_step(**cut(alone, b, b + 1), slots=slots[b : b + 1])[0], o[b])
    assert_same_bits(alone["state"], batch["state"])


def test_padding_lanes_may_share_the_scratch_slot() -> None:
    inputs = make(33, 3)
    inputs["state"][0] = 0.0
    alone = cut({name: x.clone() for name, x in inputs.items()}, 1, 2)
    o = delta_step(**inputs, slots=torch.tensor([0, 2, 0]))
    assert_same_bits(delta_step(**alone, slots=torch.tensor([2]))[0], o[1])
    assert_same_bits(inputs["state"][2], alone["state"][2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_match_the_oracle(dtype: torch.dtype) -> None:
    rng = generator(34)
    a, b = (torch.randn(50, 4, generator=rng).to(dtype) * 6 for _ in range(2))
    a_log, dt_bias = torch.randn(4, generator=rng), torch.randn(4, generator=rng)
    g, beta = delta_gates(a=a, b=b, a_log=a_log, dt_bias=dt_bias)
    expected_g, expected_beta = reference.delta_gates(a, b, a_log, dt_bias)
    assert_close(g, expected_g, atol=1e-6, rtol=2e-6)
    assert_close(beta, expected_beta, atol=1e-6, rtol=2e-6)
    assert bool((g <= 0).all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"g": torch.zeros(5, 4).double()}, "g must be float32, got 'float64'"),
        ({"beta": torch.zeros(5, 2)}, r"beta must have shape \(5, 4\), got \(5, 2\)"),
        ({"v": torch.zeros(5, 3, 24)}, "value heads must be a multiple of the 2 key heads, got 3"),
        ({"k": torch.zeros(5, 2, 8)}, r"k must have shape \(5, 2, 16\), got \(5, 2, 8\)"),
        ({"q": torch.zeros(5, 16, 2).transpose(1, 2)}, "q must be contiguous in its last dimension"),
        ({"state": torch.zeros(6, 4, 24, 16).transpose(2, 3)}, "each slot of state must be contiguous"),
        ({"taps": [StateTap(0, 10, 2)]}, r"a tap's position must lie in \[11, 15\]"),
        ({"taps": [StateTap(0, 12, 1)]}, "a tap's slot must not be written by anything else in the call"),
        ({"taps": [StateTap(0, 12, 0)]}, r"a tap's slot must lie in \[1, 6\) \(slot 0 is scratch\)"),
    ],
)
def test_bad_prefill_input_is_refused_before_anything_is_written(changes: dict, message: str) -> None:
    inputs = make(35, 5)
    before = inputs["state"].clone()
    arguments = {**inputs, "slots": [1], "cu_seqlens": [0, 5], "bases": [10], **changes}
    op = "PrefillStates" if "taps" in changes else "gated_delta_rule_prefill"
    with pytest.raises(KernelInputError, match=f"{op}: {message}"):
        delta_prefill(**arguments)
    assert_same_bits(inputs["state"], before)


def test_bad_step_slots_are_refused() -> None:
    inputs = make(36, 2)
    with pytest.raises(KernelInputError, match=r"DecodeStates: slots must lie in \[0, 6\), got -1"):
        delta_step(**inputs, slots=torch.tensor([1, -1]))


def test_slots_beyond_two_gibibytes_are_reached() -> None:
    inputs = make(37, 70, heads=(1, 1))
    near = inputs["state"][1].clone()
    rows, first = distant_rows(8192, 9, element_bytes=4)
    far = rows.view(torch.float32)[:, : 16 * 24].unflatten(1, (1, 16, 24))
    slot, tap = first + 8, first
    far[slot] = near
    o = prefill({**inputs, "state": far}, slot=slot, taps=[StateTap(0, 33, tap)])
    expected = prefill(inputs, taps=[StateTap(0, 33, 2)])
    assert_same_bits(o, expected)
    assert_same_bits(far[slot], inputs["state"][1])
    assert_same_bits(far[tap], inputs["state"][2])
