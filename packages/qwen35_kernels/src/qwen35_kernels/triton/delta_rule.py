"""Launches of the gated delta rule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qwen35_kernels.layout import BLOCK_TOKENS
from qwen35_kernels.plans import PrefillStates
from qwen35_kernels.triton.delta_kernels import delta_prepare, delta_scan, delta_step
from qwen35_kernels.triton.launch import Launch, dot_dtype, dot_precision, index_tensor, power_of_2, run

__all__ = ["plan_prefill", "plan_step", "prefill", "step"]

_EPS = 1e-6
# Columns of the state a program keeps in registers: at K = 128 wider slices spill (docs/kernels.md).
_BV = 32


def _tables(states: PrefillStates, like: Tensor) -> dict[str, Tensor]:
    """Tiles (first token, rows from, rows to), sequences (tiles from, to, slot), taps by tile."""
    tiles: list[list[int]] = []
    sequences: list[list[int]] = []
    offsets, taps = [0], []
    for own in states.sequences:
        begin = len(tiles)
        phase = own.base % BLOCK_TOKENS
        count = -(-(phase + own.num_tokens) // BLOCK_TOKENS) if own.num_tokens else 0
        for i in range(count):
            first = i * BLOCK_TOKENS - phase
            low, high = max(-first, 0), min(own.num_tokens - first, BLOCK_TOKENS)
            tiles.append([own.begin + first, low, high])
            taps += [[length - 1 - first, slot] for length, slot in own.taps if first < length <= first + BLOCK_TOKENS]
            offsets.append(len(taps))
        sequences.append([begin, len(tiles), own.slot])
    return {
        "tiles_ptr": index_tensor(tiles, like, columns=3),
        "sequences_ptr": index_tensor(sequences, like, columns=3),
        "tile_taps_ptr": index_tensor(offsets, like),
        # One row more than there are taps: the tile's end reads it under a mask.
        "taps_ptr": index_tensor([*taps, [0, 0]], like, columns=2),
    }


def plan_prefill(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    o: Tensor,
    states: PrefillStates,
) -> tuple[Launch, ...]:
    """Inputs are checked, q, k, v dense in their last two axes."""
    tables = states.once(("delta rule", q.device), lambda: _tables(states, q))
    tiles = tables["tiles_ptr"]
    heads, value_dim = v.shape[1:]
    key_dim = q.shape[2]
    dtype = q.dtype
    device = q.device

    def scratch(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    squares = [scratch(len(tiles), heads, BLOCK_TOKENS, BLOCK_TOKENS, kind=dtype) for _ in range(2)]
    rows = [scratch(len(tiles), heads, BLOCK_TOKENS) for _ in range(3)]
    shared = {"t_ptr": squares[0], "p_ptr": squares[1], "c_ptr": rows[0], "rq_ptr": rows[1], "rk_ptr": rows[2]}
    constants = {
        "K": key_dim,
        "BK": power_of_2(key_dim, least=16),
        "BT": BLOCK_TOKENS,
        "DOT": dot_dtype(dtype),
        "PRECISION": dot_precision(dtype),
    }
    strides = {"stride_q": q.stride(0), "stride_k": k.stride(0)}
    counts = {"HV": heads, "GROUPS": heads // q.shape[1]}
    prepare = Launch(
        kernel=delta_prepare,
        grid=(len(tiles), heads, 1),
        arguments={
            "q_ptr": q,
            "k_ptr": k,
            "g_ptr": g,
            "beta_ptr": beta,
            "tiles_ptr": tiles,
            **shared,
            **strides,
            "stride_g": g.stride(0),
            "stride_beta": beta.stride(0),
            "scale": float(key_dim) ** -0.5,
            "eps": _EPS,
            **counts,
        },
        constants=constants,
        num_warps=8,
    )
    block_v = min(_BV, power_of_2(value_dim, least=16))
    scan = Launch(
        kernel=delta_scan,
        grid=(-(-value_dim // block_v), heads, len(states.sequences)),
        arguments={
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "beta_ptr": beta,
            "o_ptr": o,
            "state_ptr": state,
            **shared,
            **tables,
            **strides,
            "stride_v": v.stride(0),
            "stride_beta": beta.stride(0),
            "stride_state": state.stride(0),
            **counts,
        },
        constants={**constants, "V": value_dim, "BV": block_v},
        num_warps=8,
    )
    return prepare, scan


def plan_step(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    o: Tensor,
) -> tuple[Launch, ...]:
    lanes, heads, value_dim = v.shape
    key_dim = q.shape[2]
    block_v = min(_BV, power_of_2(value_dim, least=16))
    return (
        Launch(
            kernel=delta_step,
            grid=(-(-value_dim // block_v), heads, lanes),
            arguments={
                "q_ptr": q,
                "k_ptr": k,
                "v_ptr": v,
                "g_ptr": g,
                "beta_ptr": beta,
                "o_ptr": o,
                "state_ptr": state,
                "slots_ptr": slots,
                "stride_q": q.stride(0),
                "stride_k": k.stride(0),
                "stride_v": v.stride(0),
                "stride_g": g.stride(0),
                "stride_beta": beta.stride(0),
                "stride_state": state.stride(0),
                "scale": float(key_dim) ** -0.5,
                "eps": _EPS,
                "HV": heads,
                "GROUPS": heads // q.shape[1],
            },
            constants={
                "K": key_dim,
                "V": value_dim,
                "BK": power_of_2(key_dim, least=16),
                "BV": block_v,
            },
            num_warps=4,
        ),
    )


def _dense_heads(x: Tensor) -> Tensor:
    """x with its last two axes dense: heads of one token lie side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _dense_row(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _launch(
    plan: Callable[..., tuple[Launch, ...]],
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    **call: Any,
) -> Tensor:
    """Lay the tokens out as the kernels read them, run the planned launches, and return o."""
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    heads = {"q": _dense_heads(q), "k": _dense_heads(k), "v": _dense_heads(v)}
    run(plan(**heads, g=_dense_row(g), beta=_dense_row(beta), o=o, **call))
    return o


def prefill(**call: Any) -> Tensor:
    """The arguments of `plan_prefill` but for o, any strides."""
    return _launch(plan_prefill, **call)


def step(**call: Any) -> Tensor:
    """The arguments of `plan_step` but for o, any strides."""
    return _launch(plan_step, **call)
