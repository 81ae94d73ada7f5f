"""Export, the restore plan, import: numbers by hand, and every field a file could get wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from index_driver import BLOCK, Driver, make, raw
from prefix_index import (
    CostModel,
    HostTables,
    InvalidArgument,
    PrefixIndex,
    SnapshotKind,
    Tier,
    WrongState,
    plan_host_restore,
)

IMAGE_SLABS = 4


def hosted(paths: list[tuple[list[int], int]]) -> PrefixIndex:
    """An index whose paths, each with a snapshot, are all on the Host and in no device."""
    index = make(image_slabs=IMAGE_SLABS)
    driver = Driver(index)
    for tokens, frontier in paths:
        prompt = index.prepare([*tokens, 0])
        lease = index.acquire(index.match(prompt))
        whole = tokens[: len(tokens) // BLOCK * BLOCK]
        index.extend(lease, whole, driver.pages(len(whole) // BLOCK))
        tail = raw(*tokens[frontier // BLOCK * BLOCK : frontier])
        pages = driver.pages(1) if tail else []
        done = index.publish(
            lease, frontier, slot=driver.pages(1)[0], tail=tail, tail_pages=pages, kind=SnapshotKind.BOUNDARY
        )
        missing = lease.depth - index.held(lease, Tier.HOST)
        if missing:
            index.land(index.begin_fill(lease, Tier.HOST, driver.pages(missing)))
        index.land(index.begin_fill(done.snapshot, Tier.HOST, driver.pages(IMAGE_SLABS + bool(tail))))
        index.release(lease)
    while index.claim_slot() is not None:
        pass
    index.evict_device(1000)
    index.check_invariants()
    assert index.stats().device_blocks == 0
    return index


A = list(range(8))
B = [*range(4), 20, 21, 22, 23, 24]


def test_export_writes_shared_blocks_once_and_parents_first() -> None:
    tables = hosted([(A, 8), (B, 9)]).export()
    assert [row.parent for row in tables.blocks] == [None, 0, 0]
    assert [(row.anchor, row.frontier, len(row.slabs)) for row in tables.snapshots] == [(1, 8, 4), (2, 9, 5)]
    assert tables.num_slabs == 3 + 4 + 5
    assert len(set(tables.slabs)) == 12


def test_an_imported_snapshot_is_host_only_and_matches() -> None:
    tables = hosted([(A, 8), (B, 9)]).export()
    index = make(image_slabs=IMAGE_SLABS, image_bytes=5, block_bytes=7)
    index.import_tables(tables.with_slabs(range(500, 512)))
    index.check_invariants()
    best = index.match(index.prepare([*B, 0])).best
    assert best is not None
    assert (best.frontier, best.restore_bytes) == (9, 2 * 7 + 7 + 5)
    assert index.stats().device_blocks == 0
    assert index.export().slabs == tuple(range(500, 512))
    assert not index.evict_device(10)


def test_what_is_superseded_dead_or_only_on_the_device_is_not_exported() -> None:
    index = hosted([(A, 8)])
    driver = Driver(index)
    driver.page = 9000
    driver.slot = 9000
    driver.run([*range(60, 68)], 8)  # device only
    lease = index.acquire(index.match(index.prepare(range(70, 80))))  # on the Host, but no snapshot reaches it
    index.extend(lease, range(70, 78), driver.pages(2))
    index.land(index.begin_fill(lease, Tier.HOST, driver.pages(2)))
    index.release(lease)
    assert len(index.export().blocks) == 2
    assert [row.frontier for row in index.export().snapshots] == [8]
    match = index.match(index.prepare([*A, 0]))
    lease = index.acquire(match, match.best)
    index.land(index.begin_fill(lease, Tier.DEVICE, driver.pages(2)))
    index.extend(lease, range(80, 84), driver.pages(1))
    index.publish(lease, 12, slot=9999)  # its lineage moves past the one exported so far
    index.release(lease)
    assert index.export().snapshots == ()


def test_an_import_keeps_hits_and_the_order_of_use() -> None:
    index = hosted([(A, 8), (B, 9)])
    match = index.match(index.prepare([*A, 0]))
    index.release(index.acquire(match, match.best))
    tables = index.export()
    assert [(row.frontier, row.hits) for row in tables.snapshots] == [(9, 0), (8, 1)]
    other = make(image_slabs=IMAGE_SLABS)
    other.import_tables(tables)
    assert [(row.frontier, row.hits) for row in other.export().snapshots] == [(9, 0), (8, 1)]
    blocks = other.dump()["namespaces"][0]["blocks"]  # type: ignore[index]
    assert [(block["depth"], block["recency"]) for block in blocks] == [(0, 1), (1, 1), (1, 0)]


def test_export_waits_for_fills_to_land() -> None:
    index = make()
    driver = Driver(index)
    lease = index.acquire(index.match(index.prepare(range(9))))
    index.extend(lease, range(8), driver.pages(2))
    fill = index.begin_fill(lease, Tier.HOST, driver.pages(2))
    with pytest.raises(WrongState, match="must have landed"):
        index.export()
    index.land(fill)
    assert index.export().blocks == ()


# ---------------------------------------------------------------------- the plan


def three() -> HostTables:
    """x: 4 blocks, no tail; y: 2 of them and 2 own; z: 5 others and a tail. 4 slabs an image: 8 + 6 + 10 - shared."""
    x = list(range(16))
    y = [*range(8), *range(30, 38)]
    z = [*range(50, 71)]
    tables = hosted([(x, 16), (y, 16), (z, 21)]).export()
    assert tables.num_slabs == (4 + 2 + 5) + (4 + 4 + 5)
    return tables


COST = CostModel(token_seconds=1e-4, batch_seconds=0.0, bytes_per_second=1e12)


def kept(tables: HostTables, num_slabs: int) -> tuple[list[int], int]:
    plan = plan_host_restore(tables, num_slabs, cost=COST, block_bytes=1 << 20, image_bytes=4 << 20)
    return [tables.snapshots[i].frontier + i for i in plan.snapshots], plan.num_slabs


def test_a_tier_that_holds_all_of_it_takes_all_of_it() -> None:
    assert kept(three(), 24) == ([16, 17, 23], 24)


def test_a_smaller_tier_takes_the_densest_that_fit_with_exactly_their_paths() -> None:
    """Densities per MiB: z 21 tokens / (4 + 1 + 5) = 2.1; x and y 16 / (4 + 4) = 2.0 each."""
    tables = three()
    assert kept(tables, 23) == ([16, 23], 18)  # z takes 10, x 8; y would need 6 more
    assert kept(tables, 10) == ([23], 10)
    assert kept(tables, 9) == ([16], 8)  # z does not fit and is passed over
    assert kept(tables, 14) == ([16, 17], 14) or kept(tables, 14) == ([23], 10)
    assert kept(tables, 7) == ([], 0)


def test_hits_decide() -> None:
    tables = three()
    hot = replace(tables, snapshots=tuple(replace(row, hits=i == 1) for i, row in enumerate(tables.snapshots)))
    assert kept(hot, 9) == ([17], 8)
    assert kept(hot, 18) == ([17, 23], 18)  # y doubled is the densest, then z; x would need 6 more
    both = replace(tables, snapshots=tuple(replace(row, hits=1 - i // 2) for i, row in enumerate(tables.snapshots)))
    assert kept(both, 14) == ([16, 17], 14)  # y shares two blocks with x


def test_a_plan_keeps_rows_that_can_be_imported() -> None:
    tables = three()
    plan = plan_host_restore(tables, 18, cost=COST, block_bytes=1 << 20, image_bytes=4 << 20)
    small = tables.keep(plan)
    assert small.num_slabs == plan.num_slabs == 18
    index = make(image_slabs=IMAGE_SLABS)
    index.import_tables(small.with_slabs(range(18)))
    index.check_invariants()
    assert index.export().num_slabs == 18


# ---------------------------------------------------------------------- refusals


def broken(tables: HostTables) -> dict[str, HostTables]:
    """Tables with one thing wrong each."""
    blocks, snapshots = tables.blocks, tables.snapshots

    def block(row: int, **changes: object) -> HostTables:
        changed = replace(blocks[row], **changes)  # type: ignore[arg-type]
        return replace(tables, blocks=(*blocks[:row], changed, *blocks[row + 1 :]))

    def snapshot(row: int, **changes: object) -> HostTables:
        changed = replace(snapshots[row], **changes)  # type: ignore[arg-type]
        return replace(tables, snapshots=(*snapshots[:row], changed, *snapshots[row + 1 :]))

    return {
        "self parent": block(1, parent=1),
        "later parent": block(1, parent=2),
        "another parent": block(2, parent=1),
        "tokens": block(1, tokens=b"\1" * 16),
        "short tokens": block(1, tokens=b"\1" * 12),
        "extra": block(1, extra=9),
        "hash": block(1, block_hash=blocks[1].block_hash ^ 1),
        "namespace of a block": block(1, namespace=3),
        "slab twice": block(1, slab=blocks[0].slab),
        "negative slab": block(1, slab=-4),
        "doubled block": replace(tables, blocks=(*blocks, blocks[2])),
        "block no snapshot needs": replace(tables, snapshots=snapshots[:1]),
        "anchor": snapshot(0, anchor=0),
        "anchor out of range": snapshot(0, anchor=99),
        "frontier": snapshot(0, frontier=9),
        "zero frontier": snapshot(0, frontier=0, anchor=None),
        "tail": snapshot(1, tail=b""),
        "hits": snapshot(0, hits=-1),
        "namespace of a snapshot": snapshot(0, namespace=-1),
        "kind": snapshot(0, kind=4),
        "negative kind": snapshot(0, kind=-1),
        "hits that are no number": snapshot(0, hits=math.nan),
        "hits beyond a float": snapshot(0, hits=10**400),
        "frontier of a float": snapshot(0, frontier=8.0),
        "extra without a tail": snapshot(0, extra=5),
        "extra beyond 64 bits": snapshot(1, extra=1 << 64),
        "negative extra of a block": block(1, extra=-1),
        "slab of a float": block(1, slab=77.5),
        "doubled namespace": doubled_namespace(tables),
        "slabs": snapshot(0, slabs=(1, 2)),
        "doubled snapshot": replace(tables, snapshots=(*snapshots, snapshots[0])),
        "block size": replace(tables, block_tokens=64),
    }


def doubled_namespace(tables: HostTables) -> HostTables:
    """Everything again, in a second namespace of the same name."""
    size, slabs, names = len(tables.blocks), max(tables.slabs) + 1, len(tables.namespaces)
    blocks = [
        replace(
            row,
            namespace=row.namespace + names,
            parent=None if row.parent is None else row.parent + size,
            slab=row.slab + slabs,
        )
        for row in tables.blocks
    ]
    snapshots = [
        replace(
            row,
            namespace=row.namespace + names,
            anchor=None if row.anchor is None else row.anchor + size,
            slabs=tuple(slab + slabs for slab in row.slabs),
        )
        for row in tables.snapshots
    ]
    return replace(
        tables,
        namespaces=tables.namespaces * 2,
        blocks=(*tables.blocks, *blocks),
        snapshots=(*tables.snapshots, *snapshots),
    )


def test_tables_with_one_thing_wrong_are_refused_and_change_nothing() -> None:
    tables = hosted([(A, 8), (B, 9)]).export()
    index = make(image_slabs=IMAGE_SLABS)
    before = index.digest()
    refused = {}
    for name, wrong in broken(tables).items():
        try:
            index.import_tables(wrong)
        except InvalidArgument as error:
            refused[name] = str(error)
        assert index.digest() == before, name
    assert sorted(refused) == sorted(broken(tables))
    assert all(" must " in message for message in refused.values())
    index.import_tables(tables)


def test_import_fills_an_empty_index_only() -> None:
    index = hosted([(A, 8)])
    with pytest.raises(WrongState, match="must be empty, got 2 blocks"):
        index.import_tables(index.export())
    with pytest.raises(InvalidArgument, match="6 slabs are needed, got 1"):
        index.export().with_slabs([1])
