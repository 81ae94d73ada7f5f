"""Norms, rotary, SwiGLU and the output gate: one program a row, in fp32."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from qwen35_kernels.triton.launch import Launch, power_of_2, run

__all__ = [
    "attention_gate",
    "gated_rms_norm",
    "plan_attention_gate",
    "plan_gated_rms_norm",
    "plan_qk_norm_rotary",
    "plan_rms_norm",
    "plan_swiglu",
    "qk_norm_rotary",
    "rms_norm",
    "swiglu",
]


@triton.jit
def rms_norm_rows(x_ptr, weight_ptr, y_ptr, stride_x, eps, D: tl.constexpr, BD: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BD)
    mask = cols < D
    b_x = tl.load(x_ptr + i_row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=0) / D + eps)
    b_y = b_x * inverse * (b_w + 1.0)
    tl.store(y_ptr + i_row * D + cols, b_y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated_rms_norm_rows(
    x_ptr, gate_ptr, weight_ptr, y_ptr, stride_x, stride_gate, eps, D: tl.constexpr, BD: tl.constexpr
):
    i_row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BD)
    mask = cols < D
    b_x = tl.load(x_ptr + i_row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    b_g = tl.load(gate_ptr + i_row * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=0) / D + eps)
    b_y = b_x * inverse * b_w * (b_g / (1.0 + tl.exp(-b_g)))
    tl.store(y_ptr + i_row * D + cols, b_y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["H"])
def norm_rotary_rows(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    stride_token,
    stride_head,
    eps,
    H,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BD: tl.constexpr,
):
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BD)
    mask = cols < D
    row = x_ptr + i_t * stride_token + i_h * stride_head
    b_x = tl.load(row + cols, mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=0) / D + eps)
    b_w = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    # Dim i turns with dim i + HALF: its partner, read once more.
    turns = cols < 2 * HALF
    partner = tl.where(cols < HALF, cols + HALF, tl.where(turns, cols - HALF, cols))
    angle = tl.where(cols < HALF, cols, cols - HALF)
    b_px = tl.load(row + partner, mask=mask, other=0.0).to(tl.float32)
    b_pw = tl.load(weight_ptr + partner, mask=mask, other=0.0).to(tl.float32)
    b_cos = tl.load(cos_ptr + i_t * HALF + angle, mask=turns, other=1.0)
    b_sin = tl.load(sin_ptr + i_t * HALF + angle, mask=turns, other=0.0)
    b_sin = tl.where(cols < HALF, -b_sin, b_sin)
    b_y = b_x * inverse * (b_w + 1.0) * b_cos + b_px * inverse * (b_pw + 1.0) * b_sin
    tl.store(y_ptr + (i_t * H + i_h) * D + cols, b_y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_rows(x_ptr, y_ptr, stride_x, INNER, BD: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    mask = cols < INNER
    b_g = tl.load(x_ptr + i_row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    b_u = tl.load(x_ptr + i_row * stride_x + INNER + cols, mask=mask, other=0.0).to(tl.float32)
    b_y = b_g / (1.0 + tl.exp(-b_g)) * b_u
    tl.store(y_ptr + i_row * INNER + cols, b_y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["H"])
def gate_rows(o_ptr, gate_ptr, y_ptr, o_token, o_head, gate_token, gate_head, H, D: tl.constexpr, BD: tl.constexpr):
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BD)
    mask = cols < D
    b_o = tl.load(o_ptr + i_t * o_token + i_h * o_head + cols, mask=mask, other=0.0).to(tl.float32)
    b_g = tl.load(gate_ptr + i_t * gate_token + i_h * gate_head + cols, mask=mask, other=0.0).to(tl.float32)
    b_y = b_o / (1.0 + tl.exp(-b_g))
    tl.store(y_ptr + (i_t * H + i_h) * D + cols, b_y.to(y_ptr.dtype.element_ty), mask=mask)


def _warps(width: int) -> int:
    return min(8, max(1, power_of_2(width) // 256))


def plan_rms_norm(*, x: Tensor, weight: Tensor, y: Tensor, eps: float) -> tuple[Launch, ...]:
    """x [rows, D] dense in its last axis, y [rows, D] contiguous."""
    rows, dim = x.shape
    return (
        Launch(
            kernel=rms_norm_rows,
            grid=(rows, 1, 1),
            arguments={"x_ptr": x, "weight_ptr": weight, "y_ptr": y, "stride_x": x.stride(0), "eps": eps},
            constants={"D": dim, "BD": power_of_2(dim)},
            num_warps=_warps(dim),
        ),
    )


def plan_gated_rms_norm(*, x: Tensor, gate: Tensor, weight: Tensor, y: Tensor, eps: float) -> tuple[Launch, ...]:
    rows, dim = x.shape
    return (
        Launch(
            kernel=gated_rms_norm_rows,
            grid=(rows, 1, 1),
            arguments={
                "x_ptr": x,
                "gate_ptr": gate,
                "weight_ptr": weight,
                "y_ptr": y,
                "stride_x": x.stride(0),
                "stride_gate": gate.stride(0),
                "eps": eps,
            },
            constants={"D": dim, "BD": power_of_2(dim)},
            num_warps=_warps(dim),
        ),
    )


def plan_qk_norm_rotary(
    *, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, y: Tensor, eps: float
) -> tuple[Launch, ...]:
    """One of q and k, [T, heads, D] dense in its last axis; cos and sin contiguous."""
    tokens, heads, dim = x.shape
    return (
        Launch(
            kernel=norm_rotary_rows,
            grid=(tokens, heads, 1),
            arguments={
                "x_ptr": x,
                "weight_ptr": weight,
                "cos_ptr": cos,
                "sin_ptr": sin,
                "y_ptr": y,
                "stride_token": x.stride(0),
                "stride_head": x.stride(1),
                "eps": eps,
                "H": heads,
            },
            constants={"D": dim, "HALF": cos.shape[1], "BD": power_of_2(dim)},
            num_warps=_warps(dim),
        ),
    )


def plan_swiglu(*, x: Tensor, y: Tensor) -> tuple[Launch, ...]:
    rows, inner = y.shape
    block = min(1024, power_of_2(inner))
    return (
        Launch(
            kernel=swiglu_rows,
            grid=(rows, -(-inner // block), 1),
            arguments={"x_ptr": x, "y_ptr": y, "stride_x": x.stride(0), "INNER": inner},
            constants={"BD": block},
            num_warps=_warps(block),
        ),
    )


def plan_attention_gate(*, o: Tensor, gate: Tensor, y: Tensor) -> tuple[Launch, ...]:
    tokens, heads, dim = o.shape
    return (
        Launch(
            kernel=gate_rows,
            grid=(tokens, heads, 1),
            arguments={
                "o_ptr": o,
                "gate_ptr": gate,
                "y_ptr": y,
                "o_token": o.stride(0),
                "o_head": o.stride(1),
                "gate_token": gate.stride(0),
                "gate_head": gate.stride(1),
                "H": heads,
            },
            constants={"D": dim, "BD": power_of_2(dim)},
            num_warps=_warps(dim),
        ),
    )


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    """x [..., D] as [rows, D]: a view where one exists."""
    return _dense(x.reshape(-1, x.shape[-1]))


def rms_norm(*, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run(plan_rms_norm(x=_rows(x), weight=weight.contiguous(), y=y.view(-1, x.shape[-1]), eps=eps))
    return y


def gated_rms_norm(*, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = y.view(-1, x.shape[-1])
    run(plan_gated_rms_norm(x=_rows(x), gate=_rows(gate), weight=weight.contiguous(), y=out, eps=eps))
    return y


def qk_norm_rotary(*, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cos, sin = cos.contiguous(), sin.contiguous()
    run(plan_qk_norm_rotary(x=_dense(x), weight=weight.contiguous(), cos=cos, sin=sin, y=y, eps=eps))
    return y


def swiglu(*, gate_up: Tensor) -> Tensor:
    y = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    run(plan_swiglu(x=_dense(gate_up), y=y))
    return y


def attention_gate(*, o: Tensor, gate: Tensor) -> Tensor:
    """o and gate of any shape [.., H, D] with at least two axes."""
    y = torch.empty(o.shape, dtype=o.dtype, device=o.device)
    shape = (-1, *o.shape[-2:])
    run(plan_attention_gate(o=_dense(o).reshape(shape), gate=_dense(gate).reshape(shape), y=y.view(shape)))
    return y
