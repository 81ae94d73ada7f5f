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
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from qwen35_kernels.contracts import (
    FLOAT_DTYPES,
    as_float32,
    check_device,
    check_dtype,
    check_index,
    check_inner_contiguous,
    check_rank,
    check_shape,
    index_list,
    refuse,
    rounded,
)
from qwen35_kernels.dispatch import triton_for
from qwen35_kernels.elementwise import LOG2_E, exp2_, small_sigmoid, softplus
from qwen35_kernels.layout import BLOCK_TOKENS
from qwen35_kernels.sequences import SequencePlan, Tap, plan_sequences
from qwen35_kernels.workspace import Workspace

__all__ = ["delta_gates", "gated_delta_rule_prefill", "gated_delta_rule_step"]

_TILE = BLOCK_TOKENS
_NORM_EPS = 1e-6


def delta_gates(*, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta) = (-exp(a_log) softplus(a + dt_bias), sigmoid(b)), both float32 [T, HV].

    a, b [T, HV] in fp32 or bf16, any strides; a_log, dt_bias [HV]. New tensors; an element's bits depend on
    its own inputs only.
    """
    op = "delta_gates"
    if not (
        a.dim() == 2
        and b.shape == a.shape
        and a_log.shape == dt_bias.shape == a.shape[1:]
        and all(x.dtype in FLOAT_DTYPES and x.device == a.device for x in (a, b, a_log, dt_bias))
    ):
        _check_gates(op, a, b, a_log, dt_bias)
    g = softplus(as_float32(a) + as_float32(dt_bias)).mul_(as_float32(a_log).exp().neg_())
    return g, small_sigmoid(as_float32(b))


def _check_gates(op: str, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> None:
    check_rank(op, "a", a, 2)
    check_shape(op, "b", b, tuple(a.shape))
    for name, x in (("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)):
        check_dtype(op, name, x, FLOAT_DTYPES)
        check_device(op, name, x, a.device)
    check_shape(op, "a_log", a_log, (a.shape[1],))
    check_shape(op, "dt_bias", dt_bias, (a.shape[1],))


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    if not _is_good(q, k, v, g, beta, state):
        _refuse_bad(op, q, k, v, g, beta, state)


def _is_good(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> bool:
    """Every condition of `_refuse_bad` at once: a decode step cannot afford them one by one."""
    if not (q.dim() == 3 and v.dim() == 3 and state.dim() == 4):
        return False
    shape, heads = q.shape, v.shape[1]
    dtype, device = q.dtype, q.device
    return (
        k.shape == shape
        and v.shape[0] == shape[0]
        and shape[1] > 0
        and heads % shape[1] == 0
        and g.shape == beta.shape == v.shape[:2]
        and state.shape[1:] == (heads, shape[2], v.shape[2])
        and dtype in FLOAT_DTYPES
        and k.dtype == v.dtype == dtype
        and g.dtype == state.dtype == torch.float32
        and beta.dtype in FLOAT_DTYPES
        and k.device == v.device == g.device == beta.device == state.device == device
        and q.stride(2) == k.stride(2) == v.stride(2) == state.stride(3) == 1
        and state.stride(2) == v.shape[2]
        and state.stride(1) == shape[2] * v.shape[2]
    )


def _refuse_bad(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
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
    workspace: Workspace | None = None,
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
    backend = triton_for(q)
    if backend is not None:
        return cast(Tensor, backend.delta_rule.prefill(q=q, k=k, v=v, g=g, beta=beta, state=state, plans=plans))
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    workspace = workspace or Workspace()
    for plan in plans:
        _prefill_one((q, k, v, g, beta), state, o, plan, workspace)
    return o


# Floats in one buffer of a pass: a pass's dozen buffers stay in a core's share of the cache.
_PASS_FLOATS = 2**17


def _tiles_per_pass(value_heads: int, width: int) -> int:
    """Tiles handled together. From the shape alone; no bit depends on it."""
    return max(1, _PASS_FLOATS // (value_heads * _TILE * width))


def _prefill_one(
    inputs: tuple[Tensor, ...], state: Tensor, o: Tensor, plan: SequencePlan, workspace: Workspace
) -> None:
    q, v = inputs[0], inputs[2]
    carried = workspace.take("carried", tuple(state.shape[1:]), dtype=torch.float32, device=state.device)
    if plan.has_state:
        carried.copy_(state[plan.slot])
    else:
        carried.zero_()
    phase = plan.base % _TILE
    num_tiles = -(-(phase + plan.num_tokens) // _TILE) if plan.num_tokens else 0
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
        window = slice(plan.begin + begin, plan.begin + end)
        tile = _Tiles(
            tuple(x[window] for x in inputs), tiles=tiles, row=begin + phase - first * _TILE, workspace=workspace
        )
        for i in range(tiles):
            d = tile.scan(i, carried)
            for tap_row, slot in taps.get(first + i, ()):
                # By way of scratch memory: a matrix product may depend on how its result is aligned.
                tapped = workspace.take("tapped", tuple(carried.shape), dtype=carried.dtype, device=carried.device)
                _state_after(tap_row, tile, i, d, carried, out=tapped)
                state[slot].copy_(tapped)
            _state_after(_TILE - 1, tile, i, d, carried, out=carried)
        tile.read_outputs(o[window])
    state[plan.slot].copy_(carried)


class _Tiles:
    """A pass of tiles [tiles, heads, 64, D], padded, with everything that does not need the carried state.

    All buffers live in the workspace: a pass overwrites the one before it.
    """

    def __init__(self, inputs: tuple[Tensor, ...], *, tiles: int, row: int, workspace: Workspace) -> None:
        q, k, v, g, beta = inputs
        self._tiles, self._spans = tiles, _spans(row, q.shape[0])
        self._workspace, self._device = workspace, q.device
        key_heads, key_dim = q.shape[1:]
        heads, value_dim = v.shape[1:]
        groups = heads // key_heads
        qn = self._filled("q", q, _inverse_norm(q).mul_(key_dim**-0.5))
        kn = self._filled("k", k, _inverse_norm(k))
        beta = beta.float().unsqueeze(2)
        beta_row = self._filled("beta", beta, None)
        # In units of log 2: exp2 is faster than exp, most of all where decays are denormal.
        self.c = self._filled("g", g.unsqueeze(2), None).mul_(LOG2_E).squeeze(3).cumsum(2)
        decay = torch.sub(self.c.unsqueeze(3), self.c.unsqueeze(2), out=self._take("decay", heads, _TILE))
        # Masked before the exponential: a positive exponent overflows to inf, and inf * 0 is NaN.
        exp2_(decay.add_(torch.full((_TILE, _TILE), float("-inf"), device=q.device).triu_(1)))
        self.p, a = self._take("p", heads, _TILE), self._take("a", heads, _TILE)
        for left, product in ((qn, self.p), (kn, a)):
            pairs = self._take("pairs", key_heads, _TILE)
            torch.bmm(left.flatten(0, 1), kn.flatten(0, 1).transpose(1, 2), out=pairs.flatten(0, 1))
            torch.mul(_grouped(pairs, 1), _grouped(decay, groups), out=_grouped(product, groups))
        self.t = _unit_lower_inverse(a.mul_(beta_row).flatten(0, 1)).view(a.shape)
        self.v = self._filled("v", v, beta)
        # Keys and queries decayed from the tile's start, one above the other: both meet the carried state.
        self.start = exp2_(self.c.clone())
        start = self.start.unsqueeze(3)
        self.kq = self._take("kq", heads, key_dim, rows=2 * _TILE)
        kq = _grouped(self.kq, groups)
        torch.mul(_grouped(kn, 1), _grouped(start * beta_row, groups), out=kq[..., :_TILE, :])
        torch.mul(_grouped(qn, 1), _grouped(start, groups), out=kq[..., _TILE:, :])
        self.k = kn
        if groups > 1:
            self.k = self._take("k each", heads, key_dim)
            _grouped(self.k, groups).copy_(_grouped(kn, 1))
        self.out = self._take("out", heads, value_dim)

    def scan(self, i: int, carried: Tensor) -> Tensor:
        """Make the outputs of tile i, and return its corrections d."""
        met = self._take("met", *carried.shape[::2], rows=2 * _TILE, tiles=1)[0]
        torch.bmm(self.kq[i], carried, out=met)
        d = self.scratch("d", *carried.shape[::2])
        torch.bmm(self.t[i], self.v[i].sub_(met[:, :_TILE]), out=d)
        torch.bmm(self.p[i], d, out=self.out[i]).add_(met[:, _TILE:])
        return d

    def read_outputs(self, o: Tensor) -> None:
        """Copy the rows that are tokens to o [tokens, HV, V]."""
        for span in self._spans:
            span.of_tokens(o).copy_(span.of_tiles(self.out))

    def scratch(self, name: str, heads: int, dim: int) -> Tensor:
        return self._take(name, heads, dim, tiles=1)[0]

    def _take(self, name: str, heads: int, dim: int, *, rows: int = _TILE, tiles: int | None = None) -> Tensor:
        shape = (self._tiles if tiles is None else tiles, heads, rows, dim)
        return self._workspace.take(name, shape, dtype=torch.float32, device=self._device)

    def _filled(self, name: str, x: Tensor, scale: Tensor | None) -> Tensor:
        """x [tokens, heads, D], times scale [tokens, heads, 1], in a buffer of tiles with zeros elsewhere."""
        buffer = self._take(name, *x.shape[1:])
        for span in self._spans:
            span.clear_rest(buffer)
            if scale is None:
                span.of_tiles(buffer).copy_(span.of_tokens(x))
            else:
                torch.mul(span.of_tokens(x), span.of_tokens(scale), out=span.of_tiles(buffer))
        return buffer


@dataclass(frozen=True)
class _Span:
    """Tokens [begin, end) of a pass that lie in `tiles` tiles from `tile` on, starting at row `row` of the
    first.

    Either they fill whole tiles, or they lie in one.
    """

    begin: int
    end: int
    tile: int
    tiles: int
    row: int

    def of_tokens(self, x: Tensor) -> Tensor:
        """The tokens of x [tokens, heads, D] as [tiles, heads, rows, D]."""
        part = x[self.begin : self.end]
        rows = (self.end - self.begin) // self.tiles
        return part.view(self.tiles, rows, *part.shape[1:]).transpose(1, 2)

    def of_tiles(self, buffer: Tensor) -> Tensor:
        """The same elements of a buffer [tiles, heads, 64, D]."""
        rows = (self.end - self.begin) // self.tiles
        return buffer[self.tile : self.tile + self.tiles, :, self.row : self.row + rows]

    def clear_rest(self, buffer: Tensor) -> None:
        """Zero the rows of these tiles that are not tokens."""
        rows = self.end - self.begin
        if rows < self.tiles * _TILE:
            buffer[self.tile, :, : self.row] = 0.0
            buffer[self.tile, :, self.row + rows :] = 0.0


def _spans(row: int, tokens: int) -> tuple[_Span, ...]:
    """A pass's tokens, the first at row `row`: a broken tile, whole tiles, a broken tile."""
    spans = []
    begin = 0
    while begin < tokens:
        at = row + begin
        whole = (tokens - begin) // _TILE if at % _TILE == 0 else 0
        count = whole * _TILE if whole else min(_TILE - at % _TILE, tokens - begin)
        spans.append(_Span(begin, begin + count, at // _TILE, max(whole, 1), at % _TILE))
        begin += count
    return tuple(spans)


def _state_after(row: int, tile: _Tiles, i: int, d: Tensor, carried: Tensor, *, out: Tensor) -> None:
    """Write the state after a row of tile i to `out`, which may be `carried`: the one place where the state
    of a tap or of a tile's end is computed.

    Rows past `row` get an exponent of -inf, hence a weight of 0, and a zero key: the operands are those of
    a call whose last token stands at `row`, and nothing later reaches the sum. At a tile's end there is
    none to mask.
    """
    k, exponent = tile.k[i], tile.c[i, :, row : row + 1] - tile.c[i]
    if row < _TILE - 1:
        exponent[:, row + 1 :] = float("-inf")
        k = tile.scratch("k masked", k.shape[0], k.shape[2]).copy_(k)
        k[:, row + 1 :] = 0.0
    weighted = torch.mul(d, exp2_(exponent).unsqueeze(2), out=tile.scratch("weighted", d.shape[0], d.shape[2]))
    torch.mul(carried, tile.start[i, :, row, None, None], out=out)
    out.baddbmm_(k.transpose(1, 2), weighted)


def _unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + strictly lower part of a)^-1 for a [batch, 64, 64]."""
    eye = torch.eye(_TILE, device=a.device)
    inverse: Tensor = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
    return inverse


def _inverse_norm(x: Tensor) -> Tensor:
    """1 / sqrt(sum(x^2) + eps) of every row of x [..., K], float32 [..., 1]."""
    x = as_float32(x)
    return (x * x).sum(-1, keepdim=True).add_(_NORM_EPS).rsqrt_()


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[tiles, heads, rows, dim] as [tiles, key heads, groups, rows, dim]."""
    return x.view(x.shape[0], -1, groups, *x.shape[2:])


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
    lanes, value_heads = v.shape[:2]
    backend = triton_for(q)
    if backend is not None:
        check_index(op, "slots", slots, lanes, begin=0, end=state.shape[0])
        check_device(op, "slots", slots, q.device)
        return cast(Tensor, backend.delta_rule.step(q=q, k=k, v=v, g=g, beta=beta, state=state, slots=slots))
    numbers = index_list(op, "slots", slots, lanes, begin=0, end=state.shape[0])
    check_device(op, "slots", slots, q.device)
    if lanes == 0:
        return torch.empty_like(v)
    groups = value_heads // q.shape[1]
    qk = as_float32(torch.stack((q, k), dim=2))
    qk = qk * _inverse_norm(qk)
    if groups > 1:
        qk = qk.repeat_interleave(groups, dim=1)
    decay, beta = g.exp().unsqueeze(2), as_float32(beta).unsqueeze(2)
    if lanes == 1:
        o = _step(qk[0], v[0], beta[0], decay[0], state[numbers[0]]).unsqueeze(0)
    elif state.shape[1:].numel() >= _IN_PLACE_FLOATS:
        # Large states are updated where they are; small ones together in a gathered copy. The bits are equal.
        lane = zip(qk, v, beta, decay, numbers, strict=True)
        o = torch.stack([_step(qk_b, v_b, beta_b, g_b, state[slot]) for qk_b, v_b, beta_b, g_b, slot in lane])
    else:
        gathered = state.index_select(0, slots).flatten(0, 1)
        joined = (qk.flatten(0, 1), v.flatten(0, 1), beta.flatten(0, 1), decay.flatten(0, 1))
        o = _step(*joined, gathered).view(v.shape)
        state.index_copy_(0, slots, gathered.view(lanes, *state.shape[1:]))
    return rounded(o, v.dtype)


_IN_PLACE_FLOATS = 2**16


def _step(qk: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """Outputs [H, V] of one token with qk [H, 2, K], v [H, V], beta and decay [H, 1]; state [H, K, V] in
    place."""
    decay = decay.unsqueeze(2)
    read_query, read_key = torch.bmm(qk, state).mul_(decay).unbind(1)
    query, key = qk.unbind(1)
    d = torch.sub(v, read_key).mul_(beta)
    overlap = (query * key).sum(1, keepdim=True)
    state.mul_(decay).addcmul_(key.unsqueeze(2), d.unsqueeze(1))
    return torch.addcmul(read_query, overlap, d).mul_(qk.shape[2] ** -0.5)
