"""The digest: every single fact changes it, edge boundaries and history do not."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator

from index_driver import Driver, make, raw
from paired_world import World
from prefix_index import SnapshotKind, Tier
from prefix_index.views.digest import digest_of

Path = tuple[object, ...]


def leaves(value: object, at: Path = ()) -> Iterator[Path]:
    """The place of every plain value in a dumped state."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*at, key))
    elif isinstance(value, list):
        for position, entry in enumerate(value):
            yield from leaves(entry, (*at, position))
    else:
        yield at


def changed(state: dict[str, object], at: Path) -> dict[str, object]:
    """The state with the one value at `at` replaced by another."""
    other = copy.deepcopy(state)
    place: object = other
    for key in at[:-1]:
        place = place[key]  # type: ignore[index]
    old = place[at[-1]]  # type: ignore[index]
    new = {bool: not old, int: (old or 0) + 1 if isinstance(old, int) else 1, str: f"{old}0"}.get(type(old), 1)
    place[at[-1]] = new  # type: ignore[index]
    return other


def test_every_single_change_of_a_dumped_state_changes_the_digest() -> None:
    """Enumerated over a state with two namespaces, both tiers, tails, extras, hits, pins and fills in flight."""
    world = World(random.Random(8).randrange)
    for _ in range(60):
        world.step()
    state = world.index.dump()
    digest = digest_of(state)
    assert digest == world.index.digest()
    places = list(leaves(state))
    fields = {at[-1] for at in places}
    assert {"tokens", "extra", "slab", "pins", "recency", "value", "last_hit", "kind", "host", "inflation"} <= fields
    for at in places:
        assert digest_of(changed(state, at)) != digest, at


def test_edge_boundaries_do_not_show() -> None:
    """Block by block, in one go, or cut by a branch that is gone again: one path, one digest."""

    def committed(steps: list[int], branch: bool) -> str:
        index = make(snapshots=False)
        lease = index.acquire(index.match(index.prepare(range(24))))
        page = 0
        for step in steps:
            index.extend(lease, range(page * 4, (page + step) * 4), range(page, page + step))
            page += step
        if branch:
            other = index.acquire(index.match(index.prepare(range(24))))
            index.extend(other, [*range(12), 90, 91, 92, 93], [100, 101, 102, 103])
            index.release(other)
            assert index.evict_device(1).pages == (103,)
        index.release(lease)
        assert index.stats().edges == (2 if branch else 1)
        return index.digest()

    assert committed([6], False) == committed([1] * 6, False) == committed([2, 4], False) == committed([6], True)


def test_ticks_show_only_as_an_order() -> None:
    """An index that went through more releases before, in the same final order, has the same digest."""

    def released(order: str) -> str:
        index = make(snapshots=False)
        for name in "ab":
            lease = index.acquire(index.match(index.prepare(range(9), name.encode())))
            index.extend(lease, range(8), [ord(name), ord(name) + 10])
            index.release(lease)
        for name in order:
            match = index.match(index.prepare(range(9), name.encode()))
            index.release(index.acquire(match, match.best))
        return index.digest()

    assert released("") == released("ab") == released("baabab")
    assert released("") != released("ba")


def test_handles_of_another_library_show_as_the_numbers_they_are() -> None:
    class Number(int):
        """An int where one is asked for, but none by its type."""

    class Foreign:
        def __init__(self, number: int) -> None:
            self.number = number

        def __index__(self) -> int:
            return self.number

    def built(kind: type) -> str:
        index = make()
        lease = index.acquire(index.match(index.prepare(range(8))))
        index.extend(lease, range(8), [kind(7), kind(8)])
        index.publish(lease, kind(8), slot=kind(3))
        index.check_invariants()
        return index.digest()

    assert built(Foreign) == built(Number) == built(int)


def test_failing_calls_leave_the_digest_alone() -> None:
    """Every refusal the verbs document, provoked in one state."""
    index = make(image_slabs=2)
    driver = Driver(index)
    done = driver.run(list(range(8)), 6)
    snapshot = done.snapshot  # type: ignore[attr-defined]
    match = index.match(index.prepare(range(30)))
    lease = index.acquire(match, match.best)
    index.extend(lease, range(4, 12), driver.pages(2))
    gone = index.acquire(index.match(index.prepare(range(3))))
    index.cancel(gone)
    fill = index.begin_fill(snapshot, Tier.HOST, driver.pages(3))
    index.land(fill)
    before = index.digest()
    kind = SnapshotKind.TAP
    calls = [
        lambda: index.prepare("ab"),
        lambda: index.match(index.prepare(range(9)), exclude=[(5, 3)]),
        lambda: index.acquire(match, match.candidates[0]) if match.epoch != index.epoch else index.extend(gone, [], []),
        lambda: index.extend(gone, [1, 2, 3, 4], [1]),
        lambda: index.extend(lease, [1, 2, 3], [1]),
        lambda: index.extend(lease, [1, 2, 3, 4], []),
        lambda: index.extend(lease, [1, 2, 3, 4], ["x"]),  # type: ignore[list-item]
        lambda: index.extend(lease, [1, 2, 3, 4], [(1, 2)]),
        lambda: index.publish(lease, 5, slot=1, tail=raw(4), tail_pages=[1], kind=kind),
        lambda: index.publish(lease, 99, slot=1, kind=kind),
        lambda: index.publish(lease, 12, slot=-1, kind=kind),
        lambda: index.publish(lease, 13, slot=1, tail=raw(12), kind=kind),
        lambda: index.publish(lease, 10, slot=1, tail=raw(8, 77), tail_pages=[1], kind=kind),
        lambda: index.publish(lease, 12.0, slot=1, kind=kind),  # type: ignore[arg-type]
        lambda: index.publish(lease, 12, slot=1.5, kind=kind),  # type: ignore[arg-type]
        lambda: index.publish(lease, 12, slot=1, kind=4),  # type: ignore[arg-type]
        lambda: index.publish(lease, 13, slot=1, tail=raw(12), tail_pages=[1.5], kind=kind),  # type: ignore[list-item]
        lambda: index.cancel(lease),
        lambda: index.release(gone),
        lambda: index.activate(gone),
        lambda: index.land(fill),
        lambda: index.abort(fill),
        lambda: index.begin_fill(lease, Tier.DEVICE, [1]),
        lambda: index.begin_fill(lease, Tier.HOST, []),
        lambda: index.begin_fill(lease, "device", [1]),  # type: ignore[arg-type]
        lambda: index.begin_fill(snapshot, Tier.HOST, [1, 2, 3]),
        lambda: index.begin_fill(snapshot, Tier.DEVICE),
        lambda: index.begin_fill(snapshot, Tier.DEVICE, [5]),
        lambda: index.evict_device(-1),
        lambda: index.evict_host(-1),
        lambda: index.evict_device(1.5),  # type: ignore[arg-type]
        lambda: index.evict_host(1.5),  # type: ignore[arg-type]
        lambda: index.evict_host(1, claim=math.nan),
        lambda: index.claim_slot(math.nan),
        lambda: index.clear("tenant"),  # type: ignore[arg-type]
        lambda: index.clear(),
        lambda: index.import_tables(index.export()),
    ]
    refused = 0
    for call in calls:
        try:
            call()
        except Exception:
            refused += 1
        assert index.digest() == before
    assert refused == len(calls)
    index.check_invariants()
