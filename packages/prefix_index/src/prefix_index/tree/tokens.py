"""The tokens of an edge: pieces of whole blocks, so that growing an edge copies no more than its last piece.

    runs     |...... 128 blocks .......|... 128 blocks ..|... 17 ...|     the first is `head`
    starts   |byte of the path         |                 |
    keys     |hash of its first block  |hash, or None    |...             the first is `key`

Most edges have one piece; then there are no lists at all. A look-up compares piece after piece at its place in the
prompt. Only children at a branch, events and tables need hashes: they are derived on demand.
Depths are absolute blocks of the path throughout.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from prefix_index.prompt import BlockScheme
from prefix_index.tree.records import Edge, Pieces, Root


def pieces_of(edge: Edge, scheme: BlockScheme) -> Pieces:
    """(runs, starts, keys) of `edge`; new lists when it has one piece."""
    return edge.pieces or ([edge.head], [edge.start * scheme.block_bytes], [edge.key])


def set_pieces(edge: Edge, pieces: Pieces) -> None:
    """Give `edge` these pieces, the first of which has a key."""
    edge.head = pieces[0][0]
    key = pieces[2][0]
    assert key is not None
    edge.key = key
    edge.pieces = pieces if len(pieces[0]) > 1 else None


def set_tokens(edge: Edge, scheme: BlockScheme, tokens: bytes, key: int) -> None:
    """Give a new edge its tokens; `key` is the hash of the first block."""
    edge.key = key
    edge.head = tokens[: scheme.run_bytes]
    if len(tokens) > scheme.run_bytes:
        add_tokens(edge, scheme, edge.start + scheme.run_bytes // scheme.block_bytes, tokens[scheme.run_bytes :], None)


def add_tokens(edge: Edge, scheme: BlockScheme, depth: int, tokens: bytes, key: int | None) -> None:
    """Put whole blocks behind what `edge` has, the first at `depth`; `key` is its hash where the caller knows it."""
    size = len(tokens)
    limit = scheme.run_bytes
    if edge.pieces is None:
        if len(edge.head) + size <= limit:
            edge.head += tokens
            return
        edge.pieces = pieces_of(edge, scheme)
    runs, starts, keys = edge.pieces
    if len(runs[-1]) + size <= limit:
        runs[-1] += tokens
        return
    start = depth * scheme.block_bytes
    for first in range(0, size, limit):
        runs.append(tokens[first : first + limit])
        starts.append(start + first)
        keys.append(None if first else key)


def cut_tokens(edge: Edge, scheme: BlockScheme, depth: int) -> None:
    """Drop the tokens from `depth` on, which lies above the end of `edge` and below its start."""
    if edge.pieces is None:
        edge.head = edge.head[: (depth - edge.start) * scheme.block_bytes]
        return
    runs, starts, keys = edge.pieces
    end = depth * scheme.block_bytes
    place = bisect_right(starts, end - 1)
    del runs[place:], starts[place:], keys[place:]
    runs[-1] = runs[-1][: end - starts[-1]]
    set_pieces(edge, edge.pieces)


def move_tokens(edge: Edge, upper: Edge, scheme: BlockScheme, depth: int) -> None:
    """Move the tokens before `depth`, which lies inside `edge`, to the new edge `upper`."""
    key = hash_at(edge, scheme, depth)  # where a piece begins there, it knows its key from now on
    runs, starts, keys = pieces_of(edge, scheme)
    cut = depth * scheme.block_bytes
    place = bisect_right(starts, cut - 1)
    above = runs[:place], starts[:place], keys[:place]
    below = runs[place:], starts[place:], keys[place:]
    size = cut - starts[place - 1]
    last = runs[place - 1]
    if size < len(last):
        above[0][-1] = last[:size]
        below = [last[size:], *below[0]], [cut, *below[1]], [key, *below[2]]
    set_pieces(upper, above)
    set_pieces(edge, below)


def tokens_between(edge: Edge, scheme: BlockScheme, first: int, end: int) -> bytes:
    """The tokens of the blocks [first, end) of `edge`."""
    begin, stop = first * scheme.block_bytes, end * scheme.block_bytes
    runs, starts, _ = pieces_of(edge, scheme)
    parts = []
    for place in range(bisect_right(starts, begin) - 1, len(starts)):
        start = starts[place]
        if start >= stop:
            break
        parts.append(runs[place][max(0, begin - start) : stop - start])
    return b"".join(parts)


def block_starts_with(edge: Edge, scheme: BlockScheme, depth: int, tail: bytes) -> bool:
    """Whether the block at `depth` of `edge` starts with `tail`."""
    position = depth * scheme.block_bytes
    if edge.pieces is None:
        return edge.head.startswith(tail, position - edge.start * scheme.block_bytes)
    runs, starts, _ = edge.pieces
    place = bisect_right(starts, position) - 1
    return runs[place].startswith(tail, position - starts[place])


def path_goes_on_with(edge: Edge, scheme: BlockScheme, depth: int, below: Edge | None, tail: bytes) -> bool:
    """Whether the path over `edge` and its child `below` goes on with `tail` after `depth` blocks."""
    if not tail:
        return True
    if depth < edge.end:
        return block_starts_with(edge, scheme, depth, tail)
    return below is not None and below.head.startswith(tail)


def agreement(edge: Edge, scheme: BlockScheme, depth: int, tokens: bytes, at: int, limit: int) -> int:
    """How many blocks of `edge` from `depth` on equal those of `tokens` from byte `at` on, at most `limit`."""
    width = scheme.block_bytes
    runs, starts, _ = pieces_of(edge, scheme)
    same = 0
    while same < limit:
        position = (depth + same) * width
        place = bisect_right(starts, position) - 1
        run = runs[place]
        offset = position - starts[place]
        left = min(limit - same, (len(run) - offset) // width)
        if left * width == len(run) and tokens.startswith(run, at + same * width):
            same += left
            continue
        found = common_blocks(run, offset, tokens, at + same * width, left, width)
        same += found
        if found < left:
            break
    return same


def common_extras(
    left: tuple[int, ...] | None, left_at: int, right: tuple[int, ...] | None, right_at: int, limit: int
) -> int:
    """How many of the next `limit` blocks have equal extras; None stands for all zero."""
    if left is None and right is None:
        return limit
    for i in range(limit):
        a = left[left_at + i] if left is not None else 0
        b = right[right_at + i] if right is not None else 0
        if a != b:
            return i
    return limit


def common_blocks(left: bytes, left_at: int, right: bytes, right_at: int, limit: int, width: int) -> int:
    """How many whole blocks of `width` bytes agree from the two byte positions on, at most `limit`.

    Halves the run that is known to hold the difference, so it costs two compares of the run and no loop over blocks."""
    if not limit or left[left_at : left_at + width] != right[right_at : right_at + width]:
        return 0
    size = limit * width
    if left[left_at : left_at + size] == right[right_at : right_at + size]:
        return limit
    low, high = 1, limit - 1  # the first `low` blocks agree; no more than `high` can
    while low < high:
        middle = (low + high + 1) // 2
        a, b = low * width, middle * width
        if left[left_at + a : left_at + b] == right[right_at + a : right_at + b]:
            low = middle
        else:
            high = middle - 1
    return low


def hash_at(edge: Edge, scheme: BlockScheme, depth: int) -> int:
    """The hash of the block at `depth` of `edge`, chained from the next key above; passed pieces remember theirs."""
    width = scheme.block_bytes
    position = depth * width
    _, starts, keys = pieces_of(edge, scheme)
    last = place = bisect_right(starts, position) - 1
    while (known := keys[place]) is None:
        place -= 1
    while True:
        block = starts[place] // width  # whose hash is `known`
        stop = starts[place + 1] // width if place < last else depth
        if stop > block:
            extras = edge.extras[block + 1 - edge.start : stop + 1 - edge.start] if edge.extras is not None else None
            known = scheme.chain(known, tokens_between(edge, scheme, block + 1, stop + 1), extras)[-1]
        if place == last:
            return known
        place += 1
        keys[place] = known


def hash_before(edge: Edge, scheme: BlockScheme, depth: int) -> int:
    """The hash of block `depth` - 1 of the path, which ends in `edge`; the namespace's own for depth 0."""
    if isinstance(edge, Root):
        return edge.hashed
    if depth > edge.start:
        return hash_at(edge, scheme, depth - 1)
    assert edge.parent is not None
    return hash_before(edge.parent, scheme, depth)


def block_rows(scheme: BlockScheme, edge: Edge, first: int, end: int) -> Iterator[tuple[int, int, int, bytes, int]]:
    """(hash, parent's hash, depth, tokens, extra) of the blocks [first, end) of `edge`."""
    if first >= end:
        return
    width = scheme.block_bytes
    parent = hash_before(edge, scheme, first)
    tokens = tokens_between(edge, scheme, first, end)
    extras = edge.extras[first - edge.start : end - edge.start] if edge.extras is not None else None
    for i, block_hash in enumerate(scheme.chain(parent, tokens, extras)):
        extra = extras[i] if extras is not None else 0
        yield block_hash, parent, first + i, tokens[i * width : (i + 1) * width], extra
        parent = block_hash
