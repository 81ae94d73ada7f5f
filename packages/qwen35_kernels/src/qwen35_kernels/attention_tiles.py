"""Attention of one layer on a CPU: pages read as float32, a chunk of queries, one query a lane.

The formula is that of `attention`. Sizes of tiles are fixed, so that the order of sums depends on nothing but a
sequence's own positions.
"""

import functools
import itertools

import torch
from torch import Tensor

from qwen35_kernels.contracts import as_float32
from qwen35_kernels.elementwise import LOG2_E, exp2_
from qwen35_kernels.layout import BLOCK_TOKENS, LayerKV, Plane
from qwen35_kernels.plans import DecodePages, PrefillPages, TokenPages
from qwen35_kernels.quantisation import dequantise_rows
from qwen35_kernels.workspace import Workspace

__all__ = ["LayerPages", "attend_chunk", "attend_lanes"]

# Keys handled at once in prefill, and rows of scores (queries times heads).
_KEYS_PER_TILE = 1024
_ROWS_PER_TILE = 1024
# Bytes of float32 keys or values gathered at once in decode.
_DECODE_BYTES = 1 << 22
# Keys of a lane are read where they lie if they have so many bytes, and so few foreign pages among them.
_IN_PLACE_BYTES = 1 << 18
_FOREIGN_PAGES = 0.25


class _Lanes:
    """What attention derives from the pages of a decode pass, once for all of its layers.

    Attributes:
        tables: per lane its pages.
        sizes: how many.
        numbers: those of all lanes, one lane after the other.
        partial: (page among `numbers`, rows that hold keys) of each lane whose last page is not full.
    """

    def __init__(self, pages: DecodePages) -> None:
        self.tables = pages.lanes
        self.sizes = [table.count for table in self.tables]
        self.numbers = self.tables[0].numbers if len(self.tables) == 1 else torch.cat([t.numbers for t in self.tables])
        ends = zip(itertools.accumulate(self.sizes), pages.counts, strict=True)
        self.partial = [(end - 1, count % BLOCK_TOKENS) for end, count in ends if count % BLOCK_TOKENS]
        self._rows: dict[tuple[int, int, int], Tensor] = {}

    @functools.cached_property
    def owners(self) -> Tensor:
        """The lane of each page."""
        owners = [b for b, size in enumerate(self.sizes) for _ in range(size)]
        return torch.tensor(owners, device=self.numbers.device)

    @functools.cached_property
    def places(self) -> list[Tensor]:
        """Per lane, where each page stands in the span of its numbers."""
        return [table.numbers - table.span.start for table in self.tables if table.span is not None]

    def rows(self, heads: int, kv_heads: int, pitch: int) -> Tensor:
        """`_row_index` of all pages."""
        key = heads, kv_heads, pitch
        if key not in self._rows:
            own = _rows_of_heads(kv_heads, heads, self.numbers.device)
            out = torch.empty((len(self.numbers), *own.shape[1:]), dtype=torch.int64, device=own.device)
            self._rows[key] = _row_index(self.numbers, self.partial, own, pitch, out)
        return self._rows[key]


class LayerPages:
    """One layer's keys and values, read page by page as float32."""

    def __init__(self, kv: LayerKV, workspace: Workspace) -> None:
        self.heads, self.dim = kv.layout.num_kv_heads, kv.layout.head_dim
        self.workspace = workspace
        self._k, self._v = kv.k, kv.v

    def scratch(self, name: str, *shape: int) -> Tensor:
        return self.workspace.take(name, shape, dtype=torch.float32, device=self._k.values.device)

    def keys(self, pages: Tensor) -> Tensor:
        """Keys [pages, HKV, 64, D], in scratch memory."""
        return self._gather_plane("k", self._k, pages, head_major=False)

    def lies_close(self, pages: TokenPages) -> bool:
        """Whether `keys_in_place` of these pages is worth more than `keys`."""
        return (
            pages.span is not None
            and self._k.scales is None
            and self._k.values.dtype == torch.float32
            and pages.count * self.heads * BLOCK_TOKENS * self.dim * 4 >= _IN_PLACE_BYTES
            and len(pages.span) <= (1.0 + _FOREIGN_PAGES) * pages.count
        )

    def keys_in_place(self, span: range) -> Tensor:
        """Keys [len(span), HKV, 64, D] of float32 pages with neighbouring numbers, where they lie."""
        return self._k.values[span.start : span.stop]

    def keys_and_values(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [HKV, pages, 64, D], in scratch memory."""
        k = self._gather_plane("k", self._k, pages, head_major=True)
        return k, self._gather_plane("v", self._v, pages, head_major=True)

    @property
    def pages_at_once(self) -> int:
        """Pages that decode gathers together: no bit depends on it."""
        return max(1, _DECODE_BYTES // (self.heads * BLOCK_TOKENS * self.dim * 4))

    def sum_values(self, weights: Tensor, lanes: _Lanes) -> Tensor:
        """Per page and head the sum of its rows of values weighted by weights [pages, H, 64]: [pages, H, D].

        Of a partial page only the rows that hold keys are read; the other weights are 0.
        """
        v, heads = self._v.values, weights.shape[1]
        if self._v.scales is None and v.dtype == torch.float32 and v.stride(0) % self.dim == 0:
            return self._sum_rows(weights, v, lanes.rows(heads, self.heads, v.stride(0) // self.dim))
        sums = []
        own = _rows_of_heads(self.heads, heads, v.device)
        for begin in range(0, len(lanes.numbers), self.pages_at_once):
            v = self._gather_plane("v", self._v, lanes.numbers[begin : begin + self.pages_at_once], head_major=False)
            part = weights[begin : begin + len(v)]
            inside = [(page - begin, used) for page, used in lanes.partial if begin <= page < begin + len(v)]
            index = self.workspace.take("rows", tuple(part.shape), dtype=torch.int64, device=v.device)
            numbers = torch.arange(len(v), device=v.device)
            sums.append(self._sum_rows(part, v, _row_index(numbers, inside, own, v.stride(0) // self.dim, index)))
        return torch.cat(sums)

    def _sum_rows(self, weights: Tensor, v: Tensor, index: Tensor) -> Tensor:
        """`sum_values` over float32 values v [P, HKV, 64, D] whose pages are whole rows apart."""
        # Read where they lie: the table starts at the plane's first row and has one every D floats.
        rows = v.stride(0) // self.dim * (v.shape[0] - 1) + self.heads * BLOCK_TOKENS
        table = v.as_strided((rows, self.dim), (self.dim, 1))
        bags = _rows_apart(weights.shape[0] * weights.shape[1], v.device)
        summed = torch.embedding_bag(table, index.view(-1), bags, False, 0, False, weights.view(-1))[0]
        return summed.view(*weights.shape[:2], self.dim)

    def _gather_plane(self, name: str, plane: Plane, pages: Tensor, head_major: bool) -> Tensor:
        values = self._gather_view(name, plane.values, pages, head_major)
        if plane.scales is None:
            return as_float32(values)
        scales = self._gather_view(name + "s", plane.scales, pages, head_major)
        return dequantise_rows(values, scales, plane.rows)

    def _gather_view(self, name: str, view: Tensor, pages: Tensor, head_major: bool) -> Tensor:
        # Indexed copies do not exist for every float8 dtype: those travel as bytes.
        plain = view if view.element_size() > 1 else view.view(torch.uint8)
        num = len(pages)
        shape = (self.heads, num, *view.shape[2:]) if head_major else (num, *view.shape[1:])
        out = self.workspace.take(name, shape, dtype=plain.dtype, device=plain.device)
        # Always along the first axis: along another, index_select first copies the whole arena.
        if head_major:
            for head in range(self.heads):
                torch.index_select(plain[:, head], 0, pages, out=out[head])
        else:
            torch.index_select(plain, 0, pages, out=out)
        return out.view(view.dtype)


@functools.cache
def _rows_of_heads(kv_heads: int, heads: int, device: torch.device) -> Tensor:
    """The rows [1, H, 64] of a page that each query head reads, counted from the page's first."""
    # Made once, hence outside inference mode.
    with torch.inference_mode(False):
        rows = torch.arange(kv_heads * BLOCK_TOKENS, device=device).view(1, kv_heads, 1, BLOCK_TOKENS)
        return rows.expand(-1, -1, heads // kv_heads, -1).reshape(1, heads, BLOCK_TOKENS)


def _row_index(pages: Tensor, partial: list[tuple[int, int]], own: Tensor, pitch: int, out: Tensor) -> Tensor:
    """Into out [pages, H, 64] the row of values that each weight meets, pages being `pitch` rows apart.

    Of a page i with (i, used) in `partial`, the first row stands in for those from `used` on.
    """
    torch.add(own, pages.view(-1, 1, 1), alpha=pitch, out=out)
    for page, used in partial:
        out[page, :, used:] = out[page, :, :1]
    return out


@functools.lru_cache(maxsize=64)
def _rows_apart(num: int, device: torch.device) -> Tensor:
    """0, 64, 128 ...: where each of `num` bags of rows begins."""
    with torch.inference_mode(False):
        return torch.arange(0, num * BLOCK_TOKENS, BLOCK_TOKENS, device=device)


def attend_chunk(
    q: Tensor, cache: LayerPages, plan: PrefillPages, sequence: int, o: Tensor, lse: Tensor | None
) -> None:
    """One sequence of a plan: key tiles outside, query tiles inside, maximum and sum carried from tile to tile.

    Scores are kept in units of log 2: exp2 is faster than exp, and the factor hides in the scale.
    """
    tokens, heads, dim = q.shape
    pages, base = plan.sequences[sequence].numbers, plan.bases[sequence]
    groups = heads // cache.heads
    rows = cache.scratch("q", cache.heads, tokens * groups, dim)
    scaled = rows.view(cache.heads, tokens, groups, dim)
    heads_first = q.float().view(tokens, cache.heads, groups, dim).transpose(0, 1)
    torch.mul(heads_first, LOG2_E * dim**-0.5, out=scaled)
    mixed = cache.scratch("mixed", *rows.shape)
    peak = cache.scratch("peak", *rows.shape[:2], 1)
    total = cache.scratch("total", *rows.shape[:2], 1)
    length = base + tokens
    tile_pages = _KEYS_PER_TILE // BLOCK_TOKENS
    query_tile = max(16, _ROWS_PER_TILE // heads)
    for first in range(0, length, _KEYS_PER_TILE):
        k, v = cache.keys_and_values(pages[first // BLOCK_TOKENS :][:tile_pages])
        k, v = k.flatten(1, 2), v.flatten(1, 2)
        v[:, length - first :] = 0.0
        # Query tiles that end before these keys see none of them.
        early = max(first - base, 0) // query_tile * query_tile
        for start in range(early, tokens, query_tile):
            stop = min(start + query_tile, tokens)
            # Whole pages, so that the size of what exp2 runs on is a multiple of 64.
            keys = min(k.shape[1], -(-(base + stop - first) // BLOCK_TOKENS) * BLOCK_TOKENS)
            part = slice(start * groups, stop * groups)
            scores = cache.scratch("scores", cache.heads, (stop - start) * groups, keys)
            torch.bmm(rows[:, part], k[:, :keys].transpose(1, 2), out=scores)
            _mask(scores, plan, base + start - first, groups)
            old_peak, old_total, out = peak[:, part], total[:, part], mixed[:, part]
            new_peak = scores.amax(2, keepdim=True)
            if first == 0:
                # Every query sees key 0: maxima are finite from the first tile on.
                torch.sum(exp2_(scores.sub_(new_peak)), 2, keepdim=True, out=old_total)
                torch.bmm(scores, v[:, :keys], out=out)
            else:
                torch.maximum(old_peak, new_peak, out=new_peak)
                exp2_(scores.sub_(new_peak))
                shrink = exp2_(old_peak - new_peak)
                old_total.mul_(shrink).add_(scores.sum(2, keepdim=True))
                out.mul_(shrink).baddbmm_(scores, v[:, :keys])
            old_peak.copy_(new_peak)
    if lse is not None:
        sums = peak.div_(LOG2_E).add_(total.log()).view(cache.heads, tokens, groups)
        lse.copy_(sums.transpose(0, 1).flatten(1))
    o.copy_(mixed.div_(total).view(cache.heads, tokens, groups, dim).transpose(0, 1).flatten(1, 2))


def _mask(scores: Tensor, plan: PrefillPages, first_query: int, groups: int) -> None:
    """Set scores of keys after their query to -inf; rows are (query, group), columns keys.

    The first row's query stands `first_query` keys behind the first column.
    """
    begin = max(first_query + 1, 0)
    num_rows, num_keys = scores.shape[1:]
    if begin >= num_keys:
        return

    def hidden() -> Tensor:
        queries = torch.arange(num_rows // groups, device=scores.device) + first_query
        keys = torch.arange(begin, num_keys, device=scores.device)
        return keys > queries.repeat_interleave(groups).unsqueeze(1)

    # Tiles repeat their place relative to each other: a few masks serve a whole pass.
    mask = plan.once(("hidden", first_query, num_rows, num_keys, groups), hidden)
    scores[:, :, begin:].masked_fill_(mask, float("-inf"))


def attend_lanes(q: Tensor, cache: LayerPages, plan: DecodePages, o: Tensor, lse: Tensor | None) -> None:
    """One query a lane, q [B, H, D], over the keys in its pages.

    Every page by itself first: its softmax, the log of its sum, its weighted sum of values. Then the pages of each
    lane are merged.
    """
    lanes = plan.once("lanes", lambda: _Lanes(plan))
    in_place = all(cache.lies_close(table) for table in lanes.tables)
    scores = _scores_in_place(q, cache, lanes) if in_place else _scores_gathered(q, cache, lanes)
    for page, used in lanes.partial:
        scores[page, :, used:] = float("-inf")
    weights = scores.softmax(-1)
    # The largest weight of a softmax is exp(0) / sum: that is where its sum can be read.
    sums = scores.amax(-1, keepdim=True).sub_(weights.amax(-1, keepdim=True).log_())
    mixed = cache.sum_values(weights, lanes)
    merged = o if o.dtype == torch.float32 else cache.scratch("merged", *o.shape)
    split = mixed.split_with_sizes(lanes.sizes), sums.split_with_sizes(lanes.sizes), merged.unbind(0)
    for b, (own, own_sums, out) in enumerate(zip(*split, strict=True)):
        torch.sum(own.mul_(own_sums.softmax(0)), 0, out=out)
        if lse is not None:
            lse[b] = own_sums.logsumexp(0).squeeze(1)
    if merged is not o:
        o.copy_(merged)


def _scaled_queries(q: Tensor, cache: LayerPages) -> Tensor:
    """q [B, H, D] as [B, HKV, groups, D] in float32, times D**-0.5."""
    lanes, heads, dim = q.shape
    scale: float = dim**-0.5
    return (as_float32(q) * scale).view(lanes, cache.heads, heads // cache.heads, dim)


def _scores_in_place(q: Tensor, cache: LayerPages, lanes: _Lanes) -> Tensor:
    """Scaled products [pages, H, 64] of each page's keys with the query of its lane, made for the whole span of a
    lane's pages and then put in order.

    Whatever is made of foreign pages among them, NaN included, is dropped. Products of a page do not depend on where
    it lies: the bits are those of `_scores_gathered`.
    """
    scores = []
    for own, table, places in zip(_scaled_queries(q, cache).unbind(0), lanes.tables, lanes.places, strict=True):
        assert table.span is not None
        num, groups = len(table.span), own.shape[1]
        products = cache.scratch("products", cache.heads, num, groups, BLOCK_TOKENS)
        keys = cache.keys_in_place(table.span).transpose(2, 3).unbind(1)
        for queries, head_keys, out in zip(own.unbind(0), keys, products.unbind(0), strict=True):
            torch.bmm(queries.expand(num, -1, -1), head_keys, out=out)
        ordered = products.index_select(1, places)
        scores.append(ordered.transpose(0, 1).flatten(1, 2))
    return scores[0] if len(scores) == 1 else torch.cat(scores)


def _scores_gathered(q: Tensor, cache: LayerPages, lanes: _Lanes) -> Tensor:
    """The same from gathered keys, for all lanes together: any pages, any profile."""
    queries, pages = _scaled_queries(q, cache), lanes.numbers
    if len(lanes.sizes) == 1:
        queries = queries.expand(len(pages), -1, -1, -1)
    else:
        queries = queries.index_select(0, lanes.owners)
    groups = queries.shape[2]
    queries = queries.reshape(-1, groups, q.shape[2])
    scores = cache.scratch("scores", len(pages), q.shape[1], BLOCK_TOKENS)
    rows = scores.view(-1, groups, BLOCK_TOKENS)
    for begin in range(0, len(pages), cache.pages_at_once):
        k = cache.keys(pages[begin : begin + cache.pages_at_once]).flatten(0, 1)
        window = slice(begin * cache.heads, begin * cache.heads + len(k))
        torch.bmm(queries[window], k.transpose(1, 2), out=rows[window])
    return scores
