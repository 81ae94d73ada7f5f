"""Depthwise causal convolution with silu: the short filter in front of the gated delta rule.

y[t, c] = silu(sum over w of weight[c, w] * x[t - (W - 1) + w, c]), where tokens before the call come from the
sequence's history. Sums run from the oldest tap to the newest in fp32, so that a token's bits depend on its
own W inputs only: not on the batch, the chunking, or the number of threads. (Whether a product is rounded
before it is added is up to torch's routine for the strides at hand: the step and the prefill form agree to
rounding.)
"""

import itertools
from typing import cast

import torch
from torch import Tensor

from qwen35_kernels.contracts import (
    FLOAT_DTYPES,
    as_float32,
    check_device,
    check_dtype,
    check_rank,
    check_shape,
    refuse,
    rounded,
)
from qwen35_kernels.dispatch import triton_for
from qwen35_kernels.elementwise import silu_
from qwen35_kernels.plans import DecodeStates, PrefillStates, StateSequence, check_slots, check_tokens

__all__ = ["causal_conv1d_prefill", "causal_conv1d_step"]


def _check(op: str, x: Tensor, weight: Tensor, history: Tensor) -> None:
    if (
        x.dim() == weight.dim() == 2
        and history.dim() == 3
        and weight.shape[1] >= 2
        and weight.shape[0] == x.shape[1] == history.shape[1]
        and history.shape[2] == weight.shape[1] - 1
        and x.dtype in FLOAT_DTYPES
        and weight.dtype in FLOAT_DTYPES
        and history.dtype == x.dtype
        and x.device == weight.device == history.device
    ):
        return
    check_rank(op, "x", x, 2)
    check_rank(op, "weight", weight, 2)
    check_rank(op, "history", history, 3)
    channels, width = weight.shape
    if width < 2:
        refuse(op, "weight must have at least 2 taps", width)
    check_dtype(op, "x", x, FLOAT_DTYPES)
    check_dtype(op, "weight", weight, FLOAT_DTYPES)
    check_dtype(op, "history", history, (x.dtype,))
    check_shape(op, "x", x, (x.shape[0], channels))
    check_shape(op, "history", history, (history.shape[0], channels, width - 1))
    check_device(op, "weight", weight, x.device)
    check_device(op, "history", history, x.device)


def causal_conv1d_prefill(*, x: Tensor, weight: Tensor, history: Tensor, states: PrefillStates) -> Tensor:
    """Convolve N sequences laid end to end, and move each one's history forward.

    x [T, C] in fp32 or bf16, any strides; weight [C, W]; history, a view [S, C, W - 1] in x's dtype, oldest
    column first: column j of a slot is the input W - 1 - j tokens before the sequence's next one. Reads the
    history of each sequence's slot, writes the last W - 1 inputs back to it, and for each tap at position p
    writes the inputs [p - (W - 1), p) to the tap's slot, exact copies, also where they reach back into the
    history. Returns y [T, C] in x's dtype, new and contiguous.

    Raises:
        KernelInputError: a shape, dtype or device that does not fit, or states of another number of tokens or slots.
    """
    op = "causal_conv1d_prefill"
    _check(op, x, weight, history)
    check_tokens(op, "x", x, states.num_tokens)
    check_slots(op, "history", history, states.num_slots)
    backend = triton_for(x)
    if backend is not None:
        return cast(Tensor, backend.conv.prefill(x=x, weight=weight, history=history, states=states))
    columns = weight.float().t().contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for own in states.sequences:
        _prefill_one(x[own.begin : own.end], y[own.begin : own.end], columns, history, own)
    return y


def _prefill_one(x: Tensor, y: Tensor, columns: Tensor, history: Tensor, own: StateSequence) -> None:
    reach = columns.shape[0] - 1
    before = history[own.slot].t()
    # The first rows look back into the history: give them a short joined copy, the rest read x in place.
    joined = torch.cat([before, x[:reach]])
    head = min(reach, own.num_tokens)
    if head:
        y[:head] = _filter(joined, columns, head)
    for begin in range(reach, own.num_tokens, _ROWS_PER_PASS):
        end = min(begin + _ROWS_PER_PASS, own.num_tokens)
        y[begin:end] = _filter(x[begin - reach : end], columns, end - begin)
    for length, slot in (*own.taps, (own.num_tokens, own.slot)):
        window = joined[length : length + reach] if length < reach else x[length - reach : length]
        history[slot] = window.t()


# Rows per pass: keeps the running sum and its inputs in a core's cache at Qwen3.5's channel counts.
_ROWS_PER_PASS = 64


def _filter(window: Tensor, columns: Tensor, rows: int) -> Tensor:
    """silu of the filtered `rows` last rows of window [rows + W - 1, C], in fp32."""
    window = window.float()
    total = window[:rows] * columns[0]
    for tap in range(1, columns.shape[0]):
        total.addcmul_(window[tap : tap + rows], columns[tap])
    return silu_(total)


def causal_conv1d_step(*, x: Tensor, weight: Tensor, history: Tensor, states: DecodeStates) -> Tensor:
    """One token for each of B lanes, in place.

    x [B, C]; weight [C, W]; history, a view [S, C, W - 1] in x's dtype. Drops each slot's oldest column and
    appends x. Returns y [B, C] in x's dtype. Same sum and rounding as the prefill form.

    Raises:
        KernelInputError: a shape, dtype or device that does not fit, or states of another number of lanes or slots.
    """
    op = "causal_conv1d_step"
    _check(op, x, weight, history)
    check_tokens(op, "x", x, states.num_tokens)
    check_slots(op, "history", history, states.num_slots)
    check_device(op, "slots", states.slots, x.device)
    backend = triton_for(x)
    if backend is not None:
        return cast(Tensor, backend.conv.step(x=x, weight=weight, history=history, slots=states.slots))
    numbers, slots = states.numbers, states.slots
    if not numbers:
        return torch.empty_like(x)
    single = len(numbers) == 1
    own, newest = (history[numbers[0]], x[0]) if single else (history.index_select(0, slots), x)
    columns = (*own.unbind(-1), newest)
    first, *rest = as_float32(weight).unbind(1)
    total = as_float32(columns[0]) * first
    for column, tap in zip(columns[1:], rest, strict=True):
        total.addcmul_(as_float32(column), tap)
    for older, newer in itertools.pairwise(columns):
        older.copy_(newer)
    if not single:
        history.index_copy_(0, slots, own)
    return rounded(silu_(total).view(x.shape), x.dtype)
