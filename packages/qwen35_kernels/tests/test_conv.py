import pytest
import torch

from kernel_testing import assert_close, assert_same_bits, conv_prefill, conv_step, distant_rows, generator, tolerance
from qwen35_kernels import KernelInputError, StateLayout, StateTap, reference

DTYPES = [torch.float32, torch.bfloat16]


def make(seed: int, tokens: int, *, channels: int = 24, width: int = 4, slots: int = 8, dtype=torch.float32):
    rng = generator(seed)
    layout = StateLayout(
        num_layers=2,
        num_value_heads=1,
        key_dim=4,
        value_dim=4,
        conv_channels=channels,
        conv_width=width,
        conv_dtype=dtype,
        hidden_size=8,
        hidden_dtype=dtype,
    )
    arena = torch.empty(slots, layout.image_bytes, dtype=torch.uint8)
    history = layout.conv(arena, 1)
    history[1:] = torch.randn(slots - 1, channels, width - 1, generator=rng).to(dtype)
    x = torch.randn(tokens, channels, generator=rng).to(dtype)
    weight = torch.randn(channels, width, generator=rng).to(dtype)
    return x, weight, history, arena


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 64, 130])
def test_prefill_matches_the_oracle(tokens: int, width: int, dtype: torch.dtype) -> None:
    x, weight, history, _ = make(10, tokens, width=width, dtype=dtype)
    before = history.clone()
    y = conv_prefill(x=x, weight=weight, history=history, slots=[3], cu_seqlens=[0, tokens], bases=[7])
    assert_close(y, reference.causal_conv1d(x, weight, before[3]), **tolerance(dtype))
    joined = torch.cat([before[3].t(), x])
    assert_same_bits(history[3], joined[tokens:].t())
    for slot in (0, 1, 2, 4, 5, 6, 7):
        assert_same_bits(history[slot], before[slot])


@pytest.mark.parametrize("dtype", DTYPES)
def test_taps_equal_a_gather_of_the_inputs(dtype: torch.dtype) -> None:
    for position in range(101, 108):
        x, weight, history, _ = make(12, 7, dtype=dtype)
        before = history.clone()
        conv_prefill(
            x=x,
            weight=weight,
            history=history,
            slots=[1],
            cu_seqlens=[0, 7],
            bases=[100],
            taps=[StateTap(0, position, 4), StateTap(0, position, 5)],
        )
        joined = torch.cat([before[1].t(), x])
        p = position - 100
        assert_same_bits(history[4], joined[p : p + 3].t())
        assert_same_bits(history[5], history[4])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sequence_does_not_depend_on_the_batch_or_chunking(threads: int, set_threads) -> None:
    set_threads(threads)
    x, weight, history, _ = make(13, 300, channels=205)
    start = history.clone()
    whole = conv_prefill(
        x=x,
        weight=weight,
        history=history,
        slots=[1, 2, 3],
        cu_seqlens=[0, 131, 131, 300],
        bases=[0, 5, 9],
        taps=[StateTap(2, 30, 5)],
    )
    for i, (a, b) in enumerate(((0, 131), (131, 131), (131, 300))):
        alone = start.clone()
        y = conv_prefill(x=x[a:b], weight=weight, history=alone, slots=[i + 1], cu_seqlens=[0, b - a], bases=[0])
        assert_same_bits(y, whole[a:b])
        assert_same_bits(alone[i + 1], history[i + 1])
    parts = start.clone()
    pieces = [
        conv_prefill(x=x[a:b], weight=weight, history=parts, slots=[1], cu_seqlens=[0, b - a], bases=[a])
        for a, b in ((0, 1), (1, 3), (3, 70), (70, 131))
    ]
    assert_same_bits(torch.cat(pieces), whole[:131])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 4, 5])
def test_steps_match_the_oracle(width: int, dtype: torch.dtype) -> None:
    x, weight, history, _ = make(14, 6, width=width, dtype=dtype)
    before = history.clone()
    slots = torch.tensor([3, 0], dtype=torch.int64)
    steps = [conv_step(x=x[[t, 0]], weight=weight, history=history, slots=slots)[:1] for t in range(6)]
    assert_close(torch.cat(steps), reference.causal_conv1d(x, weight, before[3]), **tolerance(dtype))
    joined = torch.cat([before[3].t(), x])
    assert_same_bits(history[3], joined[6:].t())
    for slot in (1, 2, 4, 5, 6, 7):
        assert_same_bits(history[slot], before[slot])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_lane_does_not_depend_on_the_batch(threads: int, set_threads) -> None:
    set_threads(threads)
    x, weight, history, _ = make(15, 5, channels=205)
    other = history.clone()
    slots = torch.tensor([4, 2, 7, 1, 6])
    whole = conv_step(x=x, weight=weight, history=history, slots=slots)
    for b in range(5):
        y = conv_step(x=x[b : b + 1], weight=weight, history=other, slots=slots[b : b + 1])
        assert_same_bits(y[0], whole[b])
    assert_same_bits(other[1:], history[1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": [0]}, r"slots must lie in \[1, 8\) \(slot 0 is scratch\), got 0"),
        ({"slots": [8]}, r"slots must lie in \[1, 8\)"),
        ({"cu_seqlens": [0, 4]}, "x must have the plan's 4 tokens, got 5"),
        ({"cu_seqlens": [1, 5]}, r"cu_seqlens must start at 0, got \(1, 5\)"),
        ({"cu_seqlens": [0, 2, 5]}, "cu_seqlens must have 2 entries, got 3"),
        ({"slots": [1, 2], "cu_seqlens": [0, 6, 5], "bases": [0, 0]}, "cu_seqlens must not decrease"),
        ({"slots": [1, 1], "cu_seqlens": [0, 2, 5], "bases": [0, 0]}, "each slot may be used once"),
        ({"bases": [-1]}, "bases must not be negative, got -1"),
        ({"bases": []}, "bases must have 1 entries, got 0"),
        ({"taps": [StateTap(0, 10, 2)]}, r"a tap's position must lie in \[11, 15\]"),
        ({"taps": [StateTap(0, 16, 2)]}, r"a tap's position must lie in \[11, 15\]"),
        ({"taps": [StateTap(1, 12, 2)]}, r"a tap's sequence must lie in \[0, 1\)"),
        ({"taps": [StateTap(0, 12, 0)]}, r"a tap's slot must lie in \[1, 8\)"),
        ({"taps": [StateTap(0, 12, 1)]}, "a tap's slot must not be written by anything else in the call"),
        ({"taps": [StateTap(0, 12, 2), StateTap(0, 13, 2)]}, "a tap's slot must not be written by anything else"),
        ({"x": torch.zeros(5, 25)}, r"x must have shape \(5, 24\), got \(5, 25\)"),
        ({"weight": torch.zeros(24, 1)}, "weight must have at least 2 taps, got 1"),
        ({"history": torch.zeros(8, 24, 3, dtype=torch.bfloat16)}, "history must be float32, got 'bfloat16'"),
    ],
)
def test_bad_prefill_input_is_refused_before_anything_is_written(changes: dict, message: str) -> None:
    x, weight, history, arena = make(16, 5)
    before = arena.clone()
    arguments = {
        "x": x,
        "weight": weight,
        "history": history,
        "slots": [1],
        "cu_seqlens": [0, 5],
        "bases": [10],
        **changes,
    }
    op = "causal_conv1d_prefill" if message[0] in "xwh" else "PrefillStates"
    with pytest.raises(KernelInputError, match=f"{op}: {message}"):
        conv_prefill(**arguments)
    assert_same_bits(arena, before)


def test_slots_beyond_two_gibibytes_are_reached() -> None:
    x, weight, history, _ = make(18, 5)
    rows, first = distant_rows(8192, 3, element_bytes=4)
    far = rows.view(torch.float32)[:, : 24 * 3].unflatten(1, (24, 3))
    far[first:] = history[1:4]
    for step in (False, True):
        outputs = []
        for slots, at in ((history, 1), (far, first)):
            where = {"weight": weight, "history": slots}
            if step:
                outputs.append(conv_step(x=x[:2], **where, slots=torch.tensor([at, at + 2])))
            else:
                taps = [StateTap(0, 2, at + 1)]
                outputs.append(conv_prefill(x=x, **where, slots=[at], cu_seqlens=[0, 5], bases=[0], taps=taps))
        assert_same_bits(outputs[1], outputs[0])
        assert_same_bits(far[first:], history[1:4])


def test_bad_step_slots_are_refused() -> None:
    x, weight, history, _ = make(17, 2)
    with pytest.raises(KernelInputError, match=r"DecodeStates: slots must lie in \[0, 8\), got 8"):
        conv_step(x=x, weight=weight, history=history, slots=torch.tensor([1, 8]))
    with pytest.raises(KernelInputError, match="causal_conv1d_step: x must have the plan's 1 tokens, got 2"):
        conv_step(x=x, weight=weight, history=history, slots=torch.tensor([1]))
    with pytest.raises(KernelInputError, match="slots must be int64, got 'int32'"):
        conv_step(x=x, weight=weight, history=history, slots=torch.tensor([1, 2]).int())
