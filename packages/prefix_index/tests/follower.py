"""Another process's view: rebuilds what is resumable from events alone."""

from __future__ import annotations

from prefix_index import BlockRemoved, BlockStored, Cleared, Event, SnapshotDropped, SnapshotPublished, Tier


class Follower:
    def __init__(self) -> None:
        self.sequence = 0
        self.tiers: dict[int, set[Tier]] = {}
        self.parents: dict[int, int] = {}
        self.snapshots: set[tuple[int, int, bytes, int]] = set()

    def __call__(self, event: Event) -> None:
        assert event.sequence == self.sequence + 1, "no event may be missed"
        self.sequence = event.sequence
        self.apply(event)

    def catch_up(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self.sequence = event.sequence
            self.apply(event)

    def apply(self, event: Event) -> None:
        if isinstance(event, BlockStored):
            self.tiers.setdefault(event.block_hash, set()).add(event.tier)
            self.parents[event.block_hash] = event.parent_hash
        elif isinstance(event, BlockRemoved):
            self.tiers[event.block_hash].remove(event.tier)
            if not self.tiers[event.block_hash]:
                del self.tiers[event.block_hash], self.parents[event.block_hash]
        elif isinstance(event, SnapshotPublished):
            self.snapshots.add((event.anchor_hash, event.frontier, event.tail, event.extra))
        elif isinstance(event, SnapshotDropped):
            self.snapshots.remove((event.anchor_hash, event.frontier, event.tail, event.extra))
        else:
            assert isinstance(event, Cleared)
            gone = {event.namespace_hash}
            while True:
                more = {block for block, parent in self.parents.items() if parent in gone and block not in gone}
                if not more:
                    break
                gone |= more
            self.snapshots = {entry for entry in self.snapshots if entry[0] not in gone}
            for block in gone:
                self.tiers.pop(block, None)
                self.parents.pop(block, None)

    def view(self) -> tuple[dict[int, set[Tier]], dict[int, int], set[tuple[int, int, bytes, int]]]:
        return self.tiers, self.parents, self.snapshots
