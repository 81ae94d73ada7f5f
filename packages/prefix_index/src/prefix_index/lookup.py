"""Looking up a prompt: the walk over the tree, which changes nothing and notes what the answer may be asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, index

from prefix_index.errors import InvalidArgument
from prefix_index.match import Match, Owner, Seen
from prefix_index.prompt import BlockScheme, Prompt
from prefix_index.tree.records import Edge, Hold, Snapshot, held
from prefix_index.tree.tokens import agreement, common_extras
from prefix_index.tree.tree import Tree
from prefix_index.types import Span, Tier

_depth: Callable[[Snapshot], int] = attrgetter("depth")


class Lookup:
    """Makes matches."""

    __slots__ = ("_owner", "_tree")

    def __init__(self, tree: Tree, owner: Owner) -> None:
        self._tree = tree
        self._owner = owner

    def match(self, prompt: Prompt, exclude: Sequence[Span], filling: Iterable[tuple[int, Hold]]) -> Match:
        """What is cached of `prompt`. O(edges), one `startswith` for each piece of their tokens.

        `filling` has the first block and the hold of every fill of blocks to the device that is in flight.
        """
        tree = self._tree
        scheme = tree.scheme
        if prompt._scheme is not scheme and prompt._scheme != scheme:
            raise InvalidArgument(f"match: the prompt must be prepared with this block size and hash, got {prompt!r}")
        path: list[Edge] = []
        seen: Seen = []
        match = Match.__new__(Match)
        match._owner = self._owner
        match._epoch = tree.epoch
        match._prompt = prompt
        match._exclude = _checked(exclude) if exclude else ()
        match._path = path
        match._seen = seen
        match._filling = ()
        match._matched_blocks = match._device_blocks = match._host_blocks = match._lost_depth = 0
        match._first = match._candidates = match._shared = None
        root = tree.roots.get(prompt._namespace)
        if root is None or prompt._num_tokens < 2:
            return match
        startswith = prompt._tokens.startswith
        extras = prompt._block_extras
        width = scheme.block_bytes
        depth = 0
        node: Edge = root
        while True:
            snapshots = node.snapshots
            if snapshots:
                count = len(snapshots) if depth >= node.end else bisect_right(snapshots, depth, key=_depth)
                seen.append((snapshots, node.statuses, count))
            edge = node.first_child
            if edge is None or depth < node.end:
                break
            position = depth * width
            alike = startswith(edge.head, position) and (edge.extras is extras or _extras_agree(edge, extras))
            if not alike and edge.next_sibling is not None:  # not the first child: the block's hash says which
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
                edge, same = _longest_collision(edge, prompt, scheme)
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
        while not edge.device_blocks and edge.parent is not None:
            edge = edge.parent
        end = edge.start + edge.device_blocks
        match._device_blocks = end if end < blocks else blocks
        if root.host_children:
            match._host_blocks = min(held(node, Tier.HOST), blocks)
        for edge in reversed(path):
            lost = edge.lost_depths
            if lost is not None and lost[0] <= blocks:
                match._lost_depth = lost[bisect_right(lost, blocks) - 1]
                break
        if filling:
            match._filling = _filling_on_path(path, blocks, filling)
        return match


def _filling_on_path(path: list[Edge], blocks: int, filling: Iterable[tuple[int, Hold]]) -> tuple[Span, ...]:
    """Which matched blocks are still on their way to the device. O(edges) per fill in flight."""
    on_path = set(map(id, path))
    found = []
    for first, hold in filling:
        edge = hold.edge
        end = hold.depth
        while edge is not None and id(edge) not in on_path:
            edge = edge.parent
            end = edge.end if edge is not None else 0
        end = min(end, blocks)
        if first < end:
            found.append((first, end))
    return tuple(sorted(found))


def _extras_agree(edge: Edge, extras: tuple[int, ...] | None) -> bool:
    """Whether the edge's blocks have the prompt's extras; None stands for all zero."""
    own = extras[edge.start : edge.end] if extras is not None else ()
    return not any(own) if edge.extras is None else own == edge.extras


def _longest_collision(edge: Edge, prompt: Prompt, scheme: BlockScheme) -> tuple[Edge, int]:
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
        other = other.next_collision
    return best, longest


def _checked(exclude: Sequence[Span]) -> tuple[Span, ...]:
    """Excluded (begin, end) token spans."""
    try:
        spans = tuple((index(begin), index(end)) for begin, end in exclude)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"match: excluded spans must be pairs of ints, got {error}") from None
    for begin, end in spans:
        if not 0 <= begin <= end:
            raise InvalidArgument(
                f"match: an excluded span must be (begin, end) with 0 <= begin <= end, got {(begin, end)}"
            )
    return spans
