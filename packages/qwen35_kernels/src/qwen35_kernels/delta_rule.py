"""The gated delta rule: chunked for prefill, one token at a time for decode.

With q, k l2-normalised and q scaled by K**-0.5, one token does

    S <- exp(g) S;   d = beta (v - k S);   S <- S + k^T d;   o = q S

The chunked form handles 64 tokens at once. In a tile with c = cumsum(g) (Yang et al., "Gated Delta Networks",
2024, equations of the chunkwise form):

    A = strictly lower part of beta_i exp(c_i - c_j) (k_i . k_j),   T = (I + A)^-1
    d = T (beta (v - exp(c) k S)),   o = exp(c) q S + lower(exp(c_i - c_j) q_i . k_j) d
    state after row r = exp(c_r) S + sum over i <= r of exp(c_r - c_i) k_i^T d_i

Tiles lie on an absolute 64-token grid: a call at `base` is padded on the left with base % 64 identity tokens
(k = v = 0, g = 0, beta = 0) and its last tile is filled up with them. The state after any row, a tile's end
or a tap, comes from the one function `_state_after`, whose row is a run-time value; as row i of d depends
on rows <= i only, a tap has the bits of a call that ends there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen35_kernels.contracts import (
    FLOAT_DTYPES,
    check_device,
    check_dtype,
    check_index,
    check_inner_contiguous,
    check_rank,
    check_shape,
    refuse,
)
from qwen35_kernels.elementwise import sigmoid, softplus
from qwen35_kernels.layout import BLOCK_TOKENS
from qwen35_kernels.sequences import SequencePlan, Tap, plan_sequences

__all__ = ["delta_gates", "gated_delta_rule_prefill", "gated_delta_rule_step"]

_TILE = BLOCK_TOKENS
_NORM_EPS = 1e-6


def delta_gates(*, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta) = (-exp(a_log) softplus(a + dt_bias), sigmoid(b)), both float32 [T, HV].

    a, b [T, HV] in fp32 or bf16, any strides; a_log, dt_bias [HV]. New tensors; an element's bits depend on
    its own inputs only.
    """
    op = "delta_gates"
    check_rank(op, "a", a, 2)
    check_shape(op, "b", b, tuple(a.shape))
    for name, x in (("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)):
        check_dtype(op, name, x, FLOAT_DTYPES)
        check_device(op, name, x, a.device)
    check_shape(op, "a_log", a_log, (a.shape[1],))
    check_shape(op, "dt_bias", dt_bias, (a.shape[1],))
    g = softplus(a.float() + dt_bias.float()).mul_(a_log.float().exp().neg_())
    return g, sigmoid(b)


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    for name, x, rank in (("q", q, 3), ("k", k, 3), ("v", v, 3), ("state", state, 4)):
        check_rank(op, name, x, rank)
    tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[1:]
    check_shape(op, "k", k, (tokens, key_heads, key_dim))
    check_shape(op, "v", v, (tokens, value_heads, value_dim))
    if key_heads < 1 or value_heads % key_heads:
        refuse(op, f"value heads must be a multiple of the {key_heads} key heads", value_heads)
    check_shape(op, "g", g, (tokens, value_heads))
    check_shape(op, "beta", beta, (tokens, value_heads))
    check_shape(op, "state", state, (state.shape[0], value_heads, key_dim, value_dim))
    check_dtype(op, "q", q, FLOAT_DTYPES)
    check_dtype(op, "k", k, (q.dtype,))
    check_dtype(op, "v", v, (q.dtype,))
    check_dtype(op, "g", g, (torch.float32,))
    check_dtype(op, "beta", beta, FLOAT_DTYPES)
    check_dtype(op, "state", state, (torch.float32,))
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta), ("state", state)):
        check_device(op, name, x, q.device)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_inner_contiguous(op, name, x)
    if state[0].numel() and not state[0].is_contiguous():
        refuse(op, "each slot of state must be contiguous", state.stride())


def gated_delta_rule_prefill(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Sequence[int],
    cu_seqlens: Sequence[int],
    bases: Sequence[int],
    taps: Sequence[Tap] = (),
    has_state: Sequence[bool] | None = None,
) -> Tensor:
    """The chunked form over N sequences laid end to end.

    q, k [T, HK, K] and v [T, HV, V] in fp32 or bf16, dense in the last axis; g [T, HV] float32 log decay
    (<= 0); beta [T, HV]; state, a float32 view [S, HV, K, V]. Value heads are grouped: HV // HK consecutive
    ones share a key head. Each sequence starts from its slot's state (from zeros, the slot unread, where
    `has_state` says False) and leaves its final state there; each tap's state goes to the tap's slot.
    Computed in fp32; returns o [T, HV, V] in v's dtype, new and contiguous. Inputs are not written.
    """
    op = "gated_delta_rule_prefill"
    _check(op, q, k, v, g, beta, state)
    plans = plan_sequences(
        op,
        num_tokens=q.shape[0],
        num_slots=state.shape[0],
        slots=slots,
        cu_seqlens=cu_seqlens,
        bases=bases,
        taps=taps,
        has_state=has_state,
    )
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for plan in plans:
        _prefill_one(q, k, v, g, beta, state, o, plan)
    return o


def _tiles_per_pass(value_heads: int, width: int) -> int:
    """Tiles handled together: about a megabyte of values. From the shape alone; no bit depends on it."""
    return max(1, 2**18 // (value_heads * _TILE * width))


def _prefill_one(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, o: Tensor, plan: SequencePlan
) -> None:
    own = state[plan.slot]
    carried = own.clone() if plan.has_state else torch.zeros_like(own)
    phase = plan.base % _TILE
    num_tiles = -(-(phase + plan.num_tokens) // _TILE)
    step = _tiles_per_pass(v.shape[1], max(q.shape[2], v.shape[2]))
    taps: dict[int, list[tuple[int, int]]] = {}
    for length, slot in plan.taps:
        row = phase + length - 1
        taps.setdefault(row // _TILE, []).append((row % _TILE, slot))
    for first in range(0, num_tiles, step):
        tiles = min(step, num_tiles - first)
        # Tokens of this pass, counted from the sequence's first one, and the row where they start.
        begin = max(first * _TILE - phase, 0)
        end = min((first + tiles) * _TILE - phase, plan.num_tokens)
        row = begin + phase - first * _TILE
        window = slice(plan.begin + begin, plan.begin + end)
        tile = _Tiles(q[window], k[window], v[window], g[window], beta[window], tiles=tiles, row=row)
        out = torch.empty_like(tile.v)
        for i in range(tiles):
            d = tile.scan(i, carried, out)
            for tap_row, slot in taps.get(first + i, ()):
                state[slot] = _state_after(tap_row, tile, i, d, carried)
            carried = _state_after(_TILE - 1, tile, i, d, carried)
        rows = out.view(out.shape[0], tiles * _TILE, -1)[:, row : row + end - begin]
        o[window] = rows.transpose(0, 1)
    state[plan.slot] = carried


class _Tiles:
    """A pass of tiles, padded and head-major, with everything that does not need the carried state."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, tiles: int, row: int) -> None:
        groups = v.shape[1] // q.shape[1]
        q, k = _padded(q, tiles, row), _padded(k, tiles, row)
        self.v = _padded(v, tiles, row)
        beta = _padded(beta.unsqueeze(2), tiles, row)
        self.c = _padded(g.unsqueeze(2), tiles, row).squeeze(3).cumsum(2)
        q.mul_(_inverse_norm(q).mul_(q.shape[3] ** -0.5))
        k.mul_(_inverse_norm(k))
        decay = self.c.unsqueeze(3) - self.c.unsqueeze(2)
        future = torch.ones(_TILE, _TILE, dtype=torch.bool, device=q.device).triu_(1)
        # Masked before exp: a positive exponent overflows to inf, and inf * 0 is NaN.
        decay.masked_fill_(future, float("-inf")).exp_()
        kt = k.transpose(2, 3)
        self.p = _per_value_head(q @ kt, groups) * decay
        a = (_per_value_head(k @ kt, groups) * decay).mul_(beta)
        eye = torch.eye(_TILE, device=q.device)
        self.t = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
        self.k = _per_value_head(k, groups)
        from_start = self.c.exp().unsqueeze(3)
        self.v.mul_(beta)
        self.k_in = self.k * from_start * beta
        self.q_in = _per_value_head(q, groups) * from_start

    def scan(self, i: int, carried: Tensor, out: Tensor) -> Tensor:
        """Write the outputs of tile i to `out`, and return its corrections d."""
        d = torch.bmm(self.t[:, i], torch.baddbmm(self.v[:, i], self.k_in[:, i], carried, alpha=-1.0))
        torch.baddbmm(torch.bmm(self.q_in[:, i], carried), self.p[:, i], d, out=out[:, i])
        return d


def _state_after(row: int, tile: _Tiles, i: int, d: Tensor, carried: Tensor) -> Tensor:
    """The state after a row of tile i: the one place where a tap or a tile's end is computed.

    Rows past `row` get an exponent of -inf and a zero correction: nothing of them reaches the sum, and the
    operands are those of a call whose last token stands at `row`.
    """
    c = tile.c[:, i]
    last = c[:, row : row + 1]
    later = torch.arange(_TILE, device=c.device) > row
    weight = (last - c).masked_fill_(later, float("-inf")).exp_()
    d = d.masked_fill(later.unsqueeze(1), 0.0)
    k = tile.k[:, i] * weight.unsqueeze(2)
    return torch.baddbmm(carried * last.exp().unsqueeze(2), k.transpose(1, 2), d)


def _padded(x: Tensor, tiles: int, row: int) -> Tensor:
    """x [tokens, heads, D] as float32 [heads, tiles, 64, D], its first token at `row`, zeros elsewhere."""
    tokens, heads, dim = x.shape
    buffer = torch.empty(heads, tiles * _TILE, dim, device=x.device)
    buffer[:, :row] = 0.0
    buffer[:, row : row + tokens] = x.transpose(0, 1)
    buffer[:, row + tokens :] = 0.0
    return buffer.view(heads, tiles, _TILE, dim)


def _inverse_norm(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True).add_(_NORM_EPS).rsqrt_()


def _per_value_head(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=0)


def gated_delta_rule_step(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor
) -> Tensor:
    """The recurrent form: one token for each of B lanes, states updated in place.

    q, k [B, HK, K] and v [B, HV, V] in fp32 or bf16; g, beta [B, HV]; state, a float32 view [S, HV, K, V];
    slots int64 [B], distinct except for scratch slot 0, which padding lanes may share. Returns o [B, HV, V]
    in v's dtype. Not bit-equal to the chunked form: the caller chooses one.
    """
    op = "gated_delta_rule_step"
    _check(op, q, k, v, g, beta, state)
    lanes, value_heads, value_dim = v.shape
    check_index(op, "slots", slots, lanes, begin=0, end=state.shape[0])
    check_device(op, "slots", slots, q.device)
    if lanes == 0:
        return torch.empty_like(v)
    groups = value_heads // q.shape[1]
    qk = torch.stack([q, k], dim=2).float()
    qk = qk * _inverse_norm(qk)
    if groups > 1:
        qk = qk.repeat_interleave(groups, dim=1)
    qk = qk.view(lanes * value_heads, 2, -1)
    decay = g.exp().view(-1, 1)
    old = state.index_select(0, slots).view(lanes * value_heads, -1, value_dim)
    read = torch.bmm(qk, old).mul_(decay.unsqueeze(2))
    key = qk[:, 1]
    d = v.float().reshape(-1, value_dim).sub(read[:, 1]).mul_(beta.float().reshape(-1, 1))
    overlap = (qk[:, 0] * key).sum(-1, keepdim=True)
    o = torch.addcmul(read[:, 0], overlap, d).mul_(qk.shape[2] ** -0.5)
    new = old.mul_(decay.unsqueeze(2)).addcmul_(key.unsqueeze(2), d.unsqueeze(1))
    state.index_copy_(0, slots, new.view(lanes, value_heads, -1, value_dim))
    return o.view(v.shape).to(v.dtype)
