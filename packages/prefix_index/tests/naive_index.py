"""The same index written obviously: one record a block, no compression, every answer derived by looking at everything.

It predicts what `PrefixIndex` must hold, return and evict, value for value. Slow on purpose.
"""

from __future__ import annotations

from naive_records import (
    NaiveBlock,
    NaiveFill,
    NaiveFreed,
    NaiveLease,
    NaiveSnapshot,
    Pairs,
    Path,
    as_bytes,
    extra_at,
    path_key,
    rank,
)
from prefix_index import CostModel, SnapshotKind


class NaiveIndex:
    def __init__(
        self,
        block_tokens: int,
        lags: tuple[int, ...],
        snapshots: bool,
        block_bytes: int,
        image_bytes: int,
        cost: CostModel,
    ) -> None:
        self.size = block_tokens
        self.pools = len(lags)
        self.lag = max(lags) if snapshots else 0
        self.with_snapshots = snapshots
        self.block_bytes = block_bytes
        self.image_bytes = image_bytes
        self.cost = cost
        self.blocks: dict[tuple[bytes, Path], NaiveBlock] = {}
        self.snapshots: list[NaiveSnapshot] = []
        self.leases: list[NaiveLease] = []
        self.fills: list[NaiveFill] = []
        self.inflation = 0.0
        self.clock = 0

    # ------------------------------------------------------------------ reading

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def depth(self, frontier: int) -> int:
        return max(0, frontier - self.lag) // self.size

    def split(self, tokens: list[int], pairs: Pairs, first: int = 0) -> Path:
        """Whole blocks of `tokens`, which start at block `first` of the prompt the pairs belong to."""
        path = []
        for i in range(len(tokens) // self.size):
            run = tuple(tokens[i * self.size : (i + 1) * self.size])
            path.append((run, extra_at(pairs, (first + i + 1) * self.size)))
        return tuple(path)

    def walk(self, namespace: bytes, tokens: list[int], pairs: Pairs) -> Path:
        """The cached blocks of a prompt."""
        path = self.split(tokens[: len(tokens) - 1], pairs)
        while path and (namespace, path) not in self.blocks:
            path = path[:-1]
        return path

    def candidates(self, namespace: bytes, tokens: list[int], pairs: Pairs) -> list[NaiveSnapshot]:
        """Snapshots a prompt may resume from, deepest first."""
        path = self.walk(namespace, tokens, pairs)
        found = []
        for snapshot in self.snapshots:
            on_path = snapshot.namespace == namespace and snapshot.path == path[: len(snapshot.path)]
            at = len(snapshot.path) * self.size
            same = tuple(tokens[at : at + len(snapshot.tail)]) == snapshot.tail
            extra = not snapshot.tail or extra_at(pairs, snapshot.frontier) == snapshot.extra
            if on_path and same and extra and snapshot.frontier < len(tokens):
                found.append(snapshot)
        return sorted(found, key=lambda snapshot: -snapshot.frontier)

    def held(self, namespace: bytes, path: Path, tier: str) -> int:
        """How many blocks of `path` the tier holds; they are its first."""
        count = 0
        for depth in range(1, len(path) + 1):
            block = self.blocks[namespace, path[:depth]]
            count += (block.pages if tier == "device" else block.slab) is not None
        return count

    def restore_bytes(self, snapshot: NaiveSnapshot) -> int:
        missing = len(snapshot.path) - self.held(snapshot.namespace, snapshot.path, "device")
        size = missing * self.block_bytes + (self.image_bytes if snapshot.slot is None else 0)
        return size + (self.block_bytes if snapshot.tail and snapshot.tail_pages is None else 0)

    def filling(self, namespace: bytes, path: Path) -> int:
        """Blocks of `path` that are on their way to the device."""
        count = 0
        for fill in self.fills:
            if fill.tier == "device" and fill.snapshot is None and fill.namespace == namespace:
                for depth in range(fill.first + 1, len(fill.path) + 1):
                    count += path[:depth] == fill.path[:depth] and len(path) >= depth
        return count

    def pins(self, namespace: bytes, path: Path) -> int:
        holders = [*self.leases, *self.fills]
        return sum(h.namespace == namespace and h.path[: len(path)] == path for h in holders)

    def snapshot_pins(self, snapshot: NaiveSnapshot) -> int:
        by_leases = sum(lease.resumed is snapshot and lease.holds_snapshot for lease in self.leases)
        return by_leases + sum(fill.snapshot is snapshot for fill in self.fills)

    def below(self, namespace: bytes, path: Path) -> list[NaiveBlock]:
        return [
            block
            for (space, key), block in self.blocks.items()
            if space == namespace and len(key) > len(path) and key[: len(path)] == path
        ]

    def anchored(self, namespace: bytes, path: Path) -> list[NaiveSnapshot]:
        return [s for s in self.snapshots if s.namespace == namespace and s.path == path]

    # ------------------------------------------------------------------ value

    def rest(self, snapshot: NaiveSnapshot, depth: int) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        for block, _ in snapshot.path[depth:]:
            tokens += block
        return tokens + snapshot.tail

    def is_above(self, upper: NaiveSnapshot, lower: NaiveSnapshot) -> bool:
        depth = len(upper.path)
        return (
            upper.namespace == lower.namespace
            and upper.frontier < lower.frontier
            and lower.path[:depth] == upper.path
            and self.rest(lower, depth)[: len(upper.tail)] == upper.tail
        )

    def value(self, snapshot: NaiveSnapshot) -> float:
        retained = [other for other in self.snapshots if not other.superseded]
        above = max((other.frontier for other in retained if self.is_above(other, snapshot)), default=0)
        exclusive = 0
        for depth in range(1, len(snapshot.path) + 1):
            through = [
                other
                for other in retained
                if other.namespace == snapshot.namespace and other.path[:depth] == snapshot.path[:depth]
            ]
            exclusive += through == [snapshot]
        exclusive += bool(snapshot.tail)
        size = max(1, self.image_bytes + exclusive * self.block_bytes)
        saved = self.cost.saved_seconds(above, snapshot.frontier - above) - self.cost.restore_seconds(self.image_bytes)
        return snapshot.base + (1 + snapshot.hits) * max(0.0, saved) / size

    def estimate(self, above: int, frontier: int) -> float:
        if frontier <= above:
            return self.inflation
        blocks = self.depth(frontier) - self.depth(above) + (self.depth(frontier) * self.size < frontier)
        size = max(1, self.image_bytes + blocks * self.block_bytes)
        saved = self.cost.saved_seconds(above, frontier - above) - self.cost.restore_seconds(self.image_bytes)
        return self.inflation + max(0.0, saved) / size

    # ------------------------------------------------------------------ leases

    def acquire(
        self, namespace: bytes, pairs: Pairs, path: Path, snapshot: NaiveSnapshot | None, frontier: int
    ) -> NaiveLease:
        lease = NaiveLease(namespace, pairs, path, frontier, snapshot, snapshot is not None, published=frontier)
        if snapshot is not None:
            lease.chain.append(snapshot)
            if snapshot.companion is not None:
                lease.chain.append(snapshot.companion)
        self.leases.append(lease)
        return lease

    def activate(self, lease: NaiveLease) -> None:
        lease.activated = True
        lease.holds_snapshot = False
        if lease.resumed is not None:
            self.refresh(lease.resumed)
            lease.resumed.hits += 1
            lease.resumed.tick = lease.resumed.hit_tick

    def refresh(self, snapshot: NaiveSnapshot) -> None:
        snapshot.base = self.inflation
        snapshot.hit_tick = self.tick()
        snapshot.superseded = 0

    def extend(self, lease: NaiveLease, tokens: list[int], pages: list[tuple[int, ...]]) -> dict[str, list[int]]:
        if pages and not lease.activated:
            self.activate(lease)
        done: dict[str, list[int]] = {"inserted": [], "reattached": [], "duplicate": []}
        for block, own in zip(self.split(tokens, lease.pairs, len(lease.path)), pages, strict=True):
            path = (*lease.path, block)
            there = self.blocks.get((lease.namespace, path))
            if there is None:
                self.blocks[lease.namespace, path] = NaiveBlock(lease.namespace, path, own)
                done["inserted"].append(len(lease.path))
            elif there.pages is None:
                there.pages = own
                done["reattached"].append(len(lease.path))
            else:
                done["duplicate"].append(len(lease.path))
            lease.path = path
        return done

    def release(self, lease: NaiveLease) -> None:
        if not lease.activated:
            self.activate(lease)
        self.leases.remove(lease)
        self.stamp(lease.namespace, lease.path)

    def stamp(self, namespace: bytes, path: Path) -> None:
        tick = self.tick()
        for depth in range(1, len(path) + 1):
            self.blocks[namespace, path[:depth]].tick = tick

    def cancel(self, lease: NaiveLease) -> None:
        self.leases.remove(lease)

    # ------------------------------------------------------------------ snapshots

    def shared(self, snapshot: NaiveSnapshot) -> bool:
        depth = len(snapshot.path)
        going_on = [
            block.path
            for block in self.below(snapshot.namespace, snapshot.path)
            if block.path[depth][0][: len(snapshot.tail)] == snapshot.tail
        ]
        return len({len(path) for path in going_on}) < len(going_on)

    def supersede(self, lease: NaiveLease, frontier: int, kind: SnapshotKind) -> None:
        if not lease.activated:
            self.activate(lease)
        kept = []
        for snapshot in lease.chain:
            if not snapshot.alive or snapshot.superseded:
                continue
            deeper = snapshot.frontier >= frontier
            last_tap = snapshot is lease.tap and kind is not SnapshotKind.TAP
            boundary = snapshot.kind is SnapshotKind.BOUNDARY
            protected = boundary and (snapshot is not lease.resumed or self.shared(snapshot))
            if deeper or last_tap or protected:
                kept.append(snapshot)
            else:
                snapshot.superseded = self.tick()
        lease.chain = kept

    def publish(
        self,
        lease: NaiveLease,
        frontier: int,
        tail: tuple[int, ...],
        slot: int,
        tail_pages: tuple[int, ...],
        kind: SnapshotKind,
    ) -> tuple[NaiveSnapshot, bool]:
        if not lease.activated:
            self.activate(lease)
        path = lease.path[: self.depth(frontier)]
        extra = extra_at(lease.pairs, frontier) if tail else 0
        created = True
        for snapshot in self.anchored(lease.namespace, path):
            if (snapshot.tail, snapshot.extra) == (tail, extra):
                created = False
                if kind is SnapshotKind.BOUNDARY:
                    snapshot.kind = kind
                self.refresh(snapshot)
                break
        else:
            snapshot = NaiveSnapshot(
                lease.namespace,
                path,
                tail,
                extra,
                frontier,
                kind,
                slot,
                tail_pages if tail else None,
                base=self.inflation,
            )
            snapshot.tick = self.tick()
            snapshot.hit_tick = self.tick()
            self.snapshots.append(snapshot)
        self.supersede(lease, frontier, kind)
        if snapshot not in lease.chain:
            lease.chain.append(snapshot)
        lease.published = max(lease.published, frontier)
        if kind is SnapshotKind.TAP:
            lease.tap = snapshot
        elif lease.tap is not None and lease.tap.alive and not lease.tap.superseded and lease.tap is not snapshot:
            for other in self.snapshots:
                if other.companion is lease.tap:
                    other.companion = None
            snapshot.companion = lease.tap
        return snapshot, created

    def drop(self, snapshot: NaiveSnapshot, freed: NaiveFreed) -> None:
        self.snapshots.remove(snapshot)
        snapshot.alive = False
        for other in self.snapshots:
            if other.companion is snapshot:
                other.companion = None
        if snapshot.slot is not None:
            freed.slots.append(snapshot.slot)
        freed.slabs.extend(snapshot.slabs or ())
        if snapshot.tail_pages is not None:
            freed.pages.append(self.as_pages(snapshot.tail_pages))

    def as_pages(self, pages: tuple[int, ...]) -> object:
        return pages[0] if self.pools == 1 else pages

    # ------------------------------------------------------------------ giving up

    def device_leaves(self) -> list[tuple[bool, int, NaiveBlock | NaiveSnapshot]]:
        """(unbacked, tick, thing) of everything whose page may go now, next victim first."""
        leaves: list[tuple[bool, int, NaiveBlock | NaiveSnapshot]] = []
        for block in self.blocks.values():
            held = any(other.pages is not None for other in self.below(block.namespace, block.path))
            tails = any(s.tail_pages is not None for s in self.anchored(block.namespace, block.path))
            if block.pages is not None and not held and not tails and not self.pins(block.namespace, block.path):
                leaves.append((block.slab is None, block.tick, block))
        for snapshot in self.snapshots:
            if snapshot.tail_pages is not None and not self.snapshot_pins(snapshot):
                leaves.append((not snapshot.host, snapshot.tick, snapshot))
        return sorted(leaves, key=lambda leaf: leaf[:2])

    def evict_device(self, count: int, backed_only: bool = False) -> NaiveFreed:
        freed = NaiveFreed()
        for _ in range(count):
            leaves = self.device_leaves()
            if not leaves or (backed_only and leaves[0][0]):
                break
            unbacked, _, thing = leaves[0]
            if isinstance(thing, NaiveSnapshot):
                if unbacked:
                    self.drop(thing, freed)
                else:
                    assert thing.tail_pages is not None
                    freed.pages.append(self.as_pages(thing.tail_pages))
                    thing.tail_pages = None
            else:
                assert thing.pages is not None
                freed.pages.append(self.as_pages(thing.pages))
                thing.pages = None
                if unbacked:
                    self.remove(thing, freed)
        return freed

    def remove(self, block: NaiveBlock, freed: NaiveFreed) -> None:
        for snapshot in sorted(self.anchored(block.namespace, block.path), key=lambda s: len(s.tail)):
            self.drop(snapshot, freed)
        del self.blocks[block.namespace, block.path]

    def claim_slot(self, claim: float) -> NaiveFreed | None:
        freed = NaiveFreed()
        owners = [s for s in self.snapshots if s.slot is not None and not self.snapshot_pins(s)]
        superseded = sorted((s for s in owners if s.superseded), key=lambda s: s.superseded)
        lone = sorted((s for s in owners if not s.superseded and not s.host), key=lambda s: (self.value(s), s.hit_tick))
        backed = sorted((s for s in owners if not s.superseded and s.host), key=lambda s: s.hit_tick)
        if superseded:
            victim = superseded[0]
        elif lone and self.value(lone[0]) <= claim:
            victim = lone[0]
            self.inflation = max(self.inflation, self.value(victim))
        elif backed:
            victim = backed[0]
        else:
            return None
        if victim.host:
            assert victim.slot is not None
            freed.slots.append(victim.slot)
            victim.slot = None
        else:
            self.drop(victim, freed)
        return freed

    def evict_host(self, num_slabs: int, claim: float) -> NaiveFreed:
        freed = NaiveFreed()
        while len(freed.slabs) < num_slabs:
            dead = []
            for block in self.blocks.values():
                below = self.below(block.namespace, block.path)
                reach = [*below, block]
                alive = any(self.anchored(other.namespace, other.path) for other in reach)
                pinned = self.pins(block.namespace, block.path)
                if block.slab is not None and not any(o.slab is not None for o in below) and not alive and not pinned:
                    dead.append(block)
            if dead:
                victim = min(dead, key=lambda block: block.tick)
                assert victim.slab is not None
                freed.slabs.append(victim.slab)
                victim.slab = None
                if victim.pages is None:
                    self.remove(victim, freed)
                continue
            hosted = [s for s in self.snapshots if s.host and not self.snapshot_pins(s)]
            superseded = sorted((s for s in hosted if s.superseded), key=lambda s: s.superseded)
            if superseded:
                self.drop(superseded[0], freed)
                continue
            retained = sorted(hosted, key=lambda s: (self.value(s), s.hit_tick))
            if not retained or self.value(retained[0]) > claim:
                break
            least = retained[0]
            self.inflation = max(self.inflation, self.value(least))
            if least.slot is not None and (not least.tail or least.tail_pages is not None):
                assert least.slabs is not None
                freed.slabs.extend(least.slabs)
                least.slabs = None
                least.host = False
            else:
                self.drop(least, freed)
        return freed

    # ------------------------------------------------------------------ fills

    def begin_blocks(self, lease: NaiveLease, tier: str, handles: list[tuple[int, ...]]) -> NaiveFill:
        first = self.held(lease.namespace, lease.path, tier)
        path = lease.path[: first + len(handles)]
        for i, handle in enumerate(handles):
            block = self.blocks[lease.namespace, path[: first + i + 1]]
            if tier == "device":
                block.pages = handle
            else:
                block.slab = handle[0]
        fill = NaiveFill(tier, lease.namespace, path, first)
        self.fills.append(fill)
        return fill

    def begin_snapshot(
        self, snapshot: NaiveSnapshot, tier: str, handles: tuple[int, ...], slot: int | None
    ) -> NaiveFill:
        if tier == "host":
            snapshot.slabs = handles
            snapshot.filling_host = True
        else:
            snapshot.filling_device = True
            if slot is not None:
                snapshot.slot = slot
            if handles:
                snapshot.tail_pages = handles
        path = snapshot.path
        fill = NaiveFill(tier, snapshot.namespace, path, len(path), snapshot, slot is not None, bool(handles))
        self.fills.append(fill)
        return fill

    def land(self, fill: NaiveFill) -> None:
        self.fills.remove(fill)
        snapshot = fill.snapshot
        if snapshot is None:
            if fill.tier == "device":
                self.stamp(fill.namespace, fill.path)
        elif fill.tier == "host":
            snapshot.filling_host = False
            snapshot.host = True
        else:
            snapshot.filling_device = False
            if fill.tail:
                snapshot.tick = self.tick()

    def too_late(self, fill: NaiveFill) -> bool:
        """Whether something that a block fill's blocks carry was committed or filled below it."""
        if fill.snapshot is not None:
            return False
        for depth in range(fill.first + 1, len(fill.path) + 1):
            path = fill.path[:depth]
            own = {fill.path[:d] for d in range(fill.first + 1, len(fill.path) + 1)}
            for block in self.below(fill.namespace, path):
                held = block.pages is not None if fill.tier == "device" else block.slab is not None
                if held and block.path not in own:
                    return True
            tails = any(s.tail_pages is not None for s in self.anchored(fill.namespace, path))
            if fill.tier == "device" and tails:
                return True
        return False

    def abort(self, fill: NaiveFill) -> NaiveFreed:
        freed = NaiveFreed()
        self.fills.remove(fill)
        snapshot = fill.snapshot
        if snapshot is None:
            for depth in range(len(fill.path), fill.first, -1):
                block = self.blocks[fill.namespace, fill.path[:depth]]
                if fill.tier == "device":
                    assert block.pages is not None
                    freed.pages.append(self.as_pages(block.pages))
                    block.pages = None
                else:
                    assert block.slab is not None
                    freed.slabs.append(block.slab)
                    block.slab = None
        elif fill.tier == "host":
            freed.slabs.extend(snapshot.slabs or ())
            snapshot.slabs = None
            snapshot.filling_host = False
        else:
            snapshot.filling_device = False
            if fill.slot:
                assert snapshot.slot is not None
                freed.slots.append(snapshot.slot)
                snapshot.slot = None
            if fill.tail:
                assert snapshot.tail_pages is not None
                freed.pages.append(self.as_pages(snapshot.tail_pages))
                snapshot.tail_pages = None
        return freed

    # ------------------------------------------------------------------ the whole state

    def dump(self) -> dict[str, object]:
        recency = [b.tick for b in self.blocks.values() if not self.pins(b.namespace, b.path)]
        recency += [s.tick for s in self.snapshots if s.tail_pages is not None and not self.snapshot_pins(s)]
        ranks = {
            "recency": rank(recency),
            "hits": rank([s.hit_tick for s in self.snapshots]),
            "superseded": rank([s.superseded for s in self.snapshots if s.superseded]),
        }
        spaces = {block.namespace for block in self.blocks.values()} | {s.namespace for s in self.snapshots}
        namespaces = []
        for namespace in sorted(spaces):
            blocks = [block for block in self.blocks.values() if block.namespace == namespace]
            rows = [self.block_row(b, ranks) for b in sorted(blocks, key=lambda b: path_key(b.path))]
            namespaces.append(
                {"namespace": namespace.hex(), "snapshots": self.snapshot_rows(namespace, (), ranks), "blocks": rows}
            )
        return {"inflation": self.inflation.hex(), "namespaces": namespaces}

    def block_row(self, block: NaiveBlock, ranks: dict[str, dict[int, int]]) -> dict[str, object]:
        pins = self.pins(block.namespace, block.path)
        tokens, extra = block.path[-1]
        return {
            "depth": len(block.path) - 1,
            "tokens": as_bytes(tokens).hex(),
            "extra": extra,
            "pages": None if block.pages is None else list(block.pages),
            "slab": block.slab,
            "pins": pins,
            "recency": None if pins else ranks["recency"][block.tick],
            "snapshots": self.snapshot_rows(block.namespace, block.path, ranks),
        }

    def snapshot_rows(self, namespace: bytes, path: Path, ranks: dict[str, dict[int, int]]) -> list[dict[str, object]]:
        rows = []
        for s in sorted(self.anchored(namespace, path), key=lambda s: (as_bytes(s.tail), s.extra)):
            pins = self.snapshot_pins(s)
            rows.append(
                {
                    "frontier": s.frontier,
                    "tail": as_bytes(s.tail).hex(),
                    "extra": s.extra,
                    "kind": s.kind.name,
                    "slot": s.slot,
                    "tail_pages": None if s.tail_pages is None else list(s.tail_pages),
                    "slabs": None if s.slabs is None else list(s.slabs),
                    "host": s.host,
                    "filling": [s.filling_device, s.filling_host],
                    "pins": pins,
                    "hits": s.hits,
                    "last_hit": ranks["hits"][s.hit_tick],
                    "superseded": ranks["superseded"][s.superseded] if s.superseded else None,
                    "companion": None if s.companion is None else s.companion.frontier,
                    "base": None if s.superseded else s.base.hex(),
                    "value": None if s.superseded else self.value(s).hex(),
                    "recency": None if s.tail_pages is None or pins else ranks["recency"][s.tick],
                }
            )
        return rows
