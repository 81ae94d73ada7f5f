"""Depthwise causal convolution with silu. The formulas are those of `qwen35_kernels.conv`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from qwen35_kernels.plans import PrefillStates
from qwen35_kernels.triton.launch import Launch, index_tensor, power_of_2, run

__all__ = ["plan_prefill", "plan_step", "prefill", "step"]

_ROWS = 16
_CHANNELS = 128


@triton.jit
def conv_prefill(
    x_ptr,
    weight_ptr,
    history_ptr,
    y_ptr,
    blocks_ptr,
    stride_x,
    stride_history,
    C,
    W: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    i_block, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # A block: first token, sequence's tokens [begin, end), slot.
    first = tl.load(blocks_ptr + i_block * 4)
    begin = tl.load(blocks_ptr + i_block * 4 + 1)
    end = tl.load(blocks_ptr + i_block * 4 + 2)
    slot = tl.load(blocks_ptr + i_block * 4 + 3)
    token = first + tl.arange(0, BT)
    cols = i_c * BC + tl.arange(0, BC)
    in_cols = cols < C
    b_y = tl.zeros([BT, BC], dtype=tl.float32)
    for w in tl.static_range(W):
        source = token - (W - 1) + w
        b_w = tl.load(weight_ptr + cols * W + w, mask=in_cols, other=0.0).to(tl.float32)
        inside = ((source >= begin) & (source < end))[:, None] & in_cols[None, :]
        b_x = tl.load(x_ptr + source[:, None] * stride_x + cols[None, :], mask=inside, other=0.0)
        column = source - begin + (W - 1)
        past = (source < begin)[:, None] & in_cols[None, :]
        b_h = tl.load(
            history_ptr + slot * stride_history + cols[None, :] * (W - 1) + column[:, None], mask=past, other=0.0
        )
        b_y += (b_x + b_h).to(tl.float32) * b_w[None, :]
    b_y = b_y / (1.0 + tl.exp(-b_y))
    mask = (token < end)[:, None] & in_cols[None, :]
    tl.store(y_ptr + token[:, None] * C + cols[None, :], b_y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def conv_history(
    x_ptr,
    history_ptr,
    sequences_ptr,
    taps_ptr,
    stride_x,
    stride_history,
    C,
    W: tl.constexpr,
    BC: tl.constexpr,
    BW: tl.constexpr,
):
    """Taps first, then the sequence's own slot: the old history is read by this program alone."""
    i_n, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # A sequence: first token, slot, taps [from, to); the last tap is the sequence's end.
    begin = tl.load(sequences_ptr + i_n * 4)
    slot = tl.load(sequences_ptr + i_n * 4 + 1)
    tap_begin = tl.load(sequences_ptr + i_n * 4 + 2)
    tap_end = tl.load(sequences_ptr + i_n * 4 + 3)
    cols, columns = i_c * BC + tl.arange(0, BC), tl.arange(0, BW)
    in_cols = (cols < C)[:, None]
    kept = (columns < W - 1)[None, :]
    own = history_ptr + slot * stride_history + cols[:, None] * (W - 1)
    for i_tap in range(tap_begin, tap_end):
        length = tl.load(taps_ptr + i_tap * 2)
        target = tl.load(taps_ptr + i_tap * 2 + 1)
        source = length - (W - 1) + columns
        inside = in_cols & kept & (source >= 0)[None, :]
        b_x = tl.load(x_ptr + (begin + source)[None, :] * stride_x + cols[:, None], mask=inside, other=0.0)
        column = source + (W - 1)
        past = in_cols & (source < 0)[None, :]
        b_h = tl.load(own + column[None, :], mask=past, other=0.0)
        b_new = tl.where((source >= 0)[None, :], b_x, b_h)
        # Every thread has read the old history before any writes the new one.
        tl.debug_barrier()
        out = history_ptr + target * stride_history + cols[:, None] * (W - 1) + columns[None, :]
        tl.store(out, b_new, mask=in_cols & kept)


@triton.jit
def conv_step(
    x_ptr,
    weight_ptr,
    history_ptr,
    y_ptr,
    slots_ptr,
    stride_x,
    stride_history,
    C,
    W: tl.constexpr,
    BC: tl.constexpr,
):
    i_b, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + i_b)
    cols = i_c * BC + tl.arange(0, BC)
    in_cols = cols < C
    own = history_ptr + slot * stride_history + cols * (W - 1)
    b_y = tl.zeros([BC], dtype=tl.float32)
    for w in tl.static_range(W - 1):
        b_h = tl.load(own + w, mask=in_cols, other=0.0)
        b_w = tl.load(weight_ptr + cols * W + w, mask=in_cols, other=0.0).to(tl.float32)
        b_y += b_h.to(tl.float32) * b_w
        # A channel's history belongs to one thread: column w has been read, w - 1 may go.
        if w > 0:
            tl.store(own + w - 1, b_h, mask=in_cols)
    b_x = tl.load(x_ptr + i_b * stride_x + cols, mask=in_cols, other=0.0)
    tl.store(own + W - 2, b_x, mask=in_cols)
    b_y += b_x.to(tl.float32) * tl.load(weight_ptr + cols * W + W - 1, mask=in_cols, other=0.0).to(tl.float32)
    b_y = b_y / (1.0 + tl.exp(-b_y))
    tl.store(y_ptr + i_b * C + cols, b_y.to(y_ptr.dtype.element_ty), mask=in_cols)


def _tables(states: PrefillStates, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, sequences and taps as the kernels read them."""
    blocks = [
        [first, own.begin, own.end, own.slot] for own in states.sequences for first in range(own.begin, own.end, _ROWS)
    ]
    taps: list[list[int]] = []
    sequences = []
    for own in states.sequences:
        begin = len(taps)
        taps += [[length, slot] for length, slot in (*own.taps, (own.num_tokens, own.slot))]
        sequences.append([own.begin, own.slot, begin, len(taps)])
    return (
        index_tensor(blocks, like, columns=4),
        index_tensor(sequences, like, columns=4),
        index_tensor(taps, like, columns=2),
    )


def plan_prefill(*, x: Tensor, weight: Tensor, history: Tensor, y: Tensor, states: PrefillStates) -> tuple[Launch, ...]:
    """x dense in its last axis, weight contiguous, each slot of history contiguous."""
    channels, width = weight.shape
    blocks, sequences, taps = states.once(("conv", x.device), lambda: _tables(states, x))
    block_c = min(_CHANNELS, power_of_2(channels))
    columns = -(-channels // block_c)
    strides = {"stride_x": x.stride(0), "stride_history": history.stride(0), "C": channels}
    outputs = Launch(
        kernel=conv_prefill,
        grid=(len(blocks), columns, 1),
        arguments={
            "x_ptr": x,
            "weight_ptr": weight,
            "history_ptr": history,
            "y_ptr": y,
            "blocks_ptr": blocks,
            **strides,
        },
        constants={"W": width, "BT": _ROWS, "BC": block_c},
    )
    histories = Launch(
        kernel=conv_history,
        grid=(len(states.sequences), columns, 1),
        arguments={
            "x_ptr": x,
            "history_ptr": history,
            "sequences_ptr": sequences,
            "taps_ptr": taps,
            **strides,
        },
        constants={"W": width, "BC": block_c, "BW": power_of_2(width - 1)},
    )
    return outputs, histories


def plan_step(*, x: Tensor, weight: Tensor, history: Tensor, slots: Tensor, y: Tensor) -> tuple[Launch, ...]:
    channels, width = weight.shape
    block_c = min(_CHANNELS, power_of_2(channels))
    return (
        Launch(
            kernel=conv_step,
            grid=(x.shape[0], -(-channels // block_c), 1),
            arguments={
                "x_ptr": x,
                "weight_ptr": weight,
                "history_ptr": history,
                "y_ptr": y,
                "slots_ptr": slots,
                "stride_x": x.stride(0),
                "stride_history": history.stride(0),
                "C": channels,
            },
            constants={"W": width, "BC": block_c},
        ),
    )


def prefill(*, x: Tensor, weight: Tensor, history: Tensor, states: PrefillStates) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run(plan_prefill(x=x, weight=weight.contiguous(), history=history, y=y, states=states))
    return y


def step(*, x: Tensor, weight: Tensor, history: Tensor, slots: Tensor) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run(plan_step(x=x, weight=weight.contiguous(), history=history, slots=slots, y=y))
    return y
