"""Partial rotary position embedding in the half-split form, fused with the q/k norms."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from qwen35_kernels.contracts import (
    FLOAT_DTYPES,
    as_float32,
    check_device,
    check_dtype,
    check_eps,
    check_rank,
    check_shape,
    refuse,
    rounded,
)
from qwen35_kernels.dispatch import triton_for
from qwen35_kernels.norms import normalise

__all__ = ["qk_norm_rotary", "rotary_frequencies", "rotary_tables"]


def rotary_frequencies(*, rotary_dim: int, theta: float) -> Tensor:
    """theta ** (-2 i / rotary_dim) for i in [0, rotary_dim / 2), float32 on the CPU.

    Raises:
        KernelInputError: an odd rotary_dim or one below 2, or theta not above 1.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        refuse("rotary_frequencies", "rotary_dim must be even and at least 2", rotary_dim)
    if not theta > 1.0:
        refuse("rotary_frequencies", "theta must be above 1", theta)
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def rotary_tables(
    *, positions: Tensor, frequencies: Tensor, sections: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of positions[t] * frequencies[i], float32 [T, rotary_dim / 2].

    positions: int64 [T], or [A, T] with one row per axis (time, height, width) for prompts with pictures;
    then `sections` [A] says how many frequencies each axis owns, interleaved: frequency i belongs to axis i
    % A while i < A * sections[i % A], else to axis 0. The angle is a float32 product, as in the published
    model: at large positions its rounding is part of what the model was trained with.

    Raises:
        KernelInputError: a shape, dtype or device that does not fit, or sections that do not add up.
    """
    op = "rotary_tables"
    if positions.dim() not in (1, 2):
        refuse(op, "positions must have 1 or 2 dimensions", tuple(positions.shape))
    check_dtype(op, "positions", positions, (torch.int64,))
    check_rank(op, "frequencies", frequencies, 1)
    check_dtype(op, "frequencies", frequencies, (torch.float32,))
    check_device(op, "frequencies", frequencies, positions.device)
    if positions.dim() == 1:
        if sections is not None:
            refuse(op, "sections go with positions of several axes", tuple(sections))
        angles = positions.float().unsqueeze(1) * frequencies
    else:
        axes = positions.shape[0]
        if sections is None or len(sections) != axes:
            refuse(op, f"sections must have {axes} entries", None if sections is None else tuple(sections))
        if sum(sections) != frequencies.shape[0] or min(sections) < 0:
            refuse(op, f"sections must add up to {frequencies.shape[0]} frequencies", tuple(sections))
        owner = [i % axes if i < axes * sections[i % axes] else 0 for i in range(frequencies.shape[0])]
        rows = torch.tensor(owner, dtype=torch.int64, device=positions.device)
        angles = positions.float().index_select(0, rows).t() * frequencies
    return angles.cos(), angles.sin()


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first 2 * cos.shape[1] dims of x [T, heads, D] in place."""
    half = cos.shape[1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.narrow(2, 0, half), x.narrow(2, half, half)
    turned = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)


def qk_norm_rotary(
    *,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Zero-centred RMSNorm of every head of q and k, then rotary on the first dims.

    q [T, H, D] and k [T, HKV, D] in fp32 or bf16, any strides (q may be the first half of a query-and-gate
    projection); q_weight and k_weight [D]; cos and sin float32 [T, R / 2] with R <= D. With x' the normed
    head, x'[i] and x'[i + R/2] turn by the angle of (t, i):

        y[i] = x'[i] cos - x'[i + R/2] sin,    y[i + R/2] = x'[i + R/2] cos + x'[i] sin

    Computed in fp32, rounded once. Returns new contiguous tensors; nothing else is written.

    Raises:
        KernelInputError: a shape, dtype or device that does not fit, or an eps outside [0, 1).
    """
    op = "qk_norm_rotary"
    check_eps(op, eps)
    check_rank(op, "q", q, 3)
    check_rank(op, "k", k, 3)
    tokens, _, dim = q.shape
    for name, x in (("q", q), ("k", k)):
        check_dtype(op, name, x, FLOAT_DTYPES)
    if k.shape[0] != tokens or k.shape[2] != dim or k.dtype != q.dtype or k.device != q.device:
        refuse(op, f"k must match q in tokens, head dim ({tokens}, {dim}), dtype and device", tuple(k.shape))
    for name, w in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_shape(op, name, w, (dim,))
        check_dtype(op, name, w, FLOAT_DTYPES)
        check_device(op, name, w, q.device)
    check_rank(op, "cos", cos, 2)
    if 2 * cos.shape[1] > dim:
        refuse(op, f"cos must cover at most {dim // 2} frequencies", cos.shape[1])
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(op, name, table, (tokens, cos.shape[1]))
        check_dtype(op, name, table, (torch.float32,))
        check_device(op, name, table, q.device)
    backend = triton_for(q)
    if backend is not None:
        turn = functools.partial(backend.rows.qk_norm_rotary, eps=eps, cos=cos, sin=sin)
        return turn(x=q, weight=q_weight), turn(x=k, weight=k_weight)
    both = normalise(torch.cat((q, k), 1), eps)
    parts = both.narrow(1, 0, q.shape[1]), both.narrow(1, q.shape[1], k.shape[1])
    for part, weight in zip(parts, (q_weight, k_weight), strict=True):
        part.addcmul_(part, as_float32(weight))
    _rotate_(both, cos, sin)
    new_q, new_k = (rounded(part, q.dtype).contiguous() for part in parts)
    return new_q, new_k
