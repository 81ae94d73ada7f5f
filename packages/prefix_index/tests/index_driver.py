"""Hands out page and slot numbers and commits whole conversations, checking after each step."""

from __future__ import annotations

from array import array

from prefix_index import PrefixIndex, SnapshotKind

BLOCK = 4


def ints(data: bytes) -> list[int]:
    return list(array("i", data))


def raw(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def make(**options: object) -> PrefixIndex:
    options.setdefault("block_tokens", BLOCK)
    return PrefixIndex(**options)  # type: ignore[arg-type]


class Driver:
    """Hands out page and slot numbers and commits whole conversations, checking after each step."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.page = 100
        self.slot = 0

    def pages(self, count: int) -> list[int]:
        self.page += count
        return list(range(self.page - count, self.page))

    def run(self, tokens: list[int], frontier: int | None = None, *, kind: SnapshotKind = SnapshotKind.ENDPOINT,
            namespace: bytes = b"", extras: tuple[tuple[int, int], ...] = ()) -> object:  # fmt: skip
        """Resume as deep as possible, commit every whole block, publish at `frontier`, release."""
        index = self.index
        prompt = index.prepare([*tokens, 0], namespace, extras)
        match = index.match(prompt)
        lease = index.acquire(match, match.best)
        index.check_invariants()
        rest = tokens[lease.depth * BLOCK : len(tokens) // BLOCK * BLOCK]
        index.extend(lease, rest, self.pages(len(rest) // BLOCK))
        index.check_invariants()
        publication = None
        if frontier is not None:
            self.slot += 1
            tail = tokens[frontier // BLOCK * BLOCK : frontier]
            publication = index.publish(
                lease, frontier, slot=self.slot, tail=raw(*tail), tail_pages=self.pages(bool(tail)), kind=kind
            )
            index.check_invariants()
        index.release(lease)
        index.check_invariants()
        return publication
