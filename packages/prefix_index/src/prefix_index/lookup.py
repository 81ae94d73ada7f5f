"""The walk of a look-up. Reads the tree, changes nothing, and notes where the answer finds what it may be asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, index

from prefix_index.errors import InvalidArgument
from prefix_index.fills import Ticket, held
from prefix_index.match import Match, Span
from prefix_index.nodes import Edge, Root, Snapshot
from prefix_index.prompt import BlockScheme, Prompt
from prefix_index.runs import agreement
from prefix_index.tree import common_extras
from prefix_index.values import Tier

_at: Callable[[Snapshot], int] = attrgetter("at")


def find(root: Root | None, match: Match) -> None:
    """Fill `match` with what lies below `root`. O(edges), one `startswith` for each piece of their tokens."""
    prompt = match._prompt
    path: list[Edge] = []
    seen: list[tuple[list[Snapshot], bytearray, int]] = []
    match._path = path
    match._seen = seen
    match._filling = ()
    match._matched_blocks = match._device_blocks = match._host_blocks = match._lost = 0
    if root is None or prompt._num_tokens < 2:
        return
    startswith = prompt._tokens.startswith
    extras = prompt._block_extras
    scheme = prompt._scheme
    width = scheme.block_bytes
    depth = 0
    node: Edge = root
    while True:
        snaps = node.snaps
        if snaps:
            seen.append((snaps, node.wheres, len(snaps) if depth >= node.end else bisect_right(snaps, depth, key=_at)))
        edge = node.first
        if edge is None or depth < node.end:
            break
        position = depth * width
        alike = startswith(edge.head, position) and (edge.extras is extras or _extras_agree(edge, extras))
        if not alike and edge.next is not None:  # not the first child: the block's hash says which
            hashes = prompt._hashes
            if depth >= len(hashes):
                break
            edge = node.branch.get(hashes[depth])  # type: ignore[union-attr]
            if edge is None:
                break
            alike = startswith(edge.head, position) and (edge.extras is extras or _extras_agree(edge, extras))
        if alike and edge.pieces is not None:
            runs, starts, _ = edge.pieces
            alike = all(map(startswith, runs, starts))
        if alike:
            depth = edge.end
        else:
            edge, same = _longest_twin(edge, prompt, scheme)
            if not same:
                break
            depth += same
        path.append(edge)
        node = edge
    blocks = (prompt._num_tokens - 1) // scheme.block_tokens  # the last token is always computed
    if depth < blocks:
        blocks = depth
    match._matched_blocks = blocks
    edge = node
    while not edge.dev and edge.parent is not None:
        edge = edge.parent
    end = edge.start + edge.dev
    match._device_blocks = end if end < blocks else blocks
    if root.hbelow:
        match._host_blocks = min(held(node, Tier.HOST), blocks)
    for edge in reversed(path):
        if edge.lost is not None and edge.lost[0] <= blocks:
            match._lost = edge.lost[bisect_right(edge.lost, blocks) - 1]
            break


def note_filling(match: Match, tickets: Iterable[Ticket]) -> None:
    """Record which matched blocks are still on their way to the device. O(edges) per fill in flight."""
    on_path = set(map(id, match._path))
    blocks = match._matched_blocks
    found = []
    for ticket in tickets:
        if ticket._tier is Tier.DEVICE and ticket._snapshot is None:
            at = ticket._hold.edge
            end = ticket._hold.depth
            while at is not None and id(at) not in on_path:
                at = at.parent
                end = at.end if at is not None else 0
            end = min(end, blocks)
            if ticket._first < end:
                found.append((ticket._first, end))
    match._filling = tuple(sorted(found))


def _extras_agree(edge: Edge, extras: tuple[int, ...] | None) -> bool:
    """Whether the edge's blocks have the prompt's extras; None stands for all zero."""
    own = extras[edge.start : edge.end] if extras is not None else ()
    return not any(own) if edge.extras is None else own == edge.extras


def _longest_twin(edge: Edge, prompt: Prompt, scheme: BlockScheme) -> tuple[Edge, int]:
    """Among children with an equal hash the one that shares most with the prompt, and how many blocks that is."""
    start = edge.start
    left = len(prompt._hashes) - start
    best, longest = edge, 0
    other: Edge | None = edge
    while other is not None:
        limit = min(other.end - start, left)
        if limit > longest:
            same = agreement(other, scheme, start, prompt._tokens, start * scheme.block_bytes, limit)
            same = common_extras(other.extras, 0, prompt._block_extras, start, same)
            if same > longest:
                best, longest = other, same
        other = other.twin
    return best, longest


def spans(op: str, exclude: Sequence[Span]) -> tuple[Span, ...]:
    """Excluded (begin, end) token spans, checked."""
    try:
        checked = tuple((index(begin), index(end)) for begin, end in exclude)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{op}: excluded spans must be pairs of ints, got {error}") from None
    for begin, end in checked:
        if not 0 <= begin <= end:
            raise InvalidArgument(
                f"{op}: an excluded span must be (begin, end) with 0 <= begin <= end, got {(begin, end)}"
            )
    return checked


def path_edge(match: Match, depth: int) -> Edge:
    """The edge of the match's path in which block boundary `depth` lies."""
    if not 0 < depth <= match._matched_blocks:
        raise InvalidArgument(
            f"acquire: the candidate must lie on the {match._matched_blocks} matched blocks, got {depth}"
        )
    return next(edge for edge in match._path if edge.end >= depth)
