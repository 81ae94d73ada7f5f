"""One sequence of the chunked gated delta rule on a CPU: passes of tiles, and the state after a row.

The formulas are those of `delta_rule`. A pass takes as many tiles as fit a core's cache, makes what does not
need the carried state for all of them at once, and then walks through them.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35_kernels.contracts import as_float32
from qwen35_kernels.elementwise import LOG2_E, exp2_
from qwen35_kernels.layout import BLOCK_TOKENS
from qwen35_kernels.norms import inverse_norm
from qwen35_kernels.plans import StateSequence
from qwen35_kernels.workspace import Workspace

__all__ = ["KEY_EPS", "prefill_sequence"]

KEY_EPS = 1e-6
_TILE = BLOCK_TOKENS

# Floats in one buffer of a pass: a pass's dozen buffers stay in a core's share of the cache.
_PASS_FLOATS = 2**17


def _tiles_per_pass(value_heads: int, width: int) -> int:
    """Tiles handled together. From the shape alone; no bit depends on it."""
    return max(1, _PASS_FLOATS // (value_heads * _TILE * width))


def prefill_sequence(
    inputs: tuple[Tensor, ...], state: Tensor, o: Tensor, own: StateSequence, workspace: Workspace
) -> None:
    """Run one planned sequence of (q, k, v, g, beta): outputs to its rows of o, states to its slots."""
    q, v = inputs[0], inputs[2]
    carried = workspace.take("carried", tuple(state.shape[1:]), dtype=torch.float32, device=state.device)
    carried.copy_(state[own.slot])
    phase = own.base % _TILE
    num_tiles = -(-(phase + own.num_tokens) // _TILE) if own.num_tokens else 0
    step = _tiles_per_pass(v.shape[1], max(q.shape[2], v.shape[2]))
    taps: dict[int, list[tuple[int, int]]] = {}
    for length, slot in own.taps:
        row = phase + length - 1
        taps.setdefault(row // _TILE, []).append((row % _TILE, slot))
    for first in range(0, num_tiles, step):
        tiles = min(step, num_tiles - first)
        # Tokens of this pass, counted from the sequence's first one, and the row where they start.
        begin = max(first * _TILE - phase, 0)
        end = min((first + tiles) * _TILE - phase, own.num_tokens)
        window = slice(own.begin + begin, own.begin + end)
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
    state[own.slot].copy_(carried)


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
        exp2_(decay.add_(_later(q.device)))
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


@functools.cache
def _later(device: torch.device) -> Tensor:
    """-inf where a column's token comes after its row's, else 0."""
    # Made once, hence outside inference mode.
    with torch.inference_mode(False):
        return torch.full((_TILE, _TILE), float("-inf"), device=device).triu_(1)


@functools.cache
def _identity(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.eye(_TILE, device=device)


def _unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + strictly lower part of a)^-1 for a [batch, 64, 64]."""
    inverse: Tensor = torch.linalg.solve_triangular(a, _identity(a.device), upper=False, unitriangular=True)
    return inverse


def _inverse_norm(x: Tensor) -> Tensor:
    return inverse_norm(as_float32(x), weight=1.0, eps=KEY_EPS)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[tiles, heads, rows, dim] as [tiles, key heads, groups, rows, dim]."""
    return x.view(x.shape[0], -1, groups, *x.shape[2:])
