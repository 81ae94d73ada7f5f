"""The lazy heap under every queue, against a sorted list."""

from __future__ import annotations

import random

from prefix_index.retention.queues import LazyHeap, kill
from prefix_index.tree.records import QueueEntry


class Item:
    def __init__(self, key: int) -> None:
        self.key: int | None = key
        self.entry: QueueEntry | None = None


def test_the_least_present_key_comes_first_whatever_was_pushed_before() -> None:
    rng = random.Random(3)
    heap: LazyHeap[Item] = LazyHeap(lambda item: item.key)
    items = [Item(rng.randrange(10**9)) for _ in range(300)]
    for item in items:
        item.entry = heap.renew(None, item.key, item)
    for step in range(3000):
        item = rng.choice(items)
        item.key = rng.choice([None, rng.randrange(10**9)])
        if item.key is not None:
            item.entry = heap.renew(item.entry, item.key, item)
        present = sorted(other.key for other in items if other.key is not None)
        if step % 50 == 0:
            assert [other.key for other in heap.in_order()] == present
        least = heap.peek()
        assert (least.key if least is not None else None) == (present[0] if present else None)


def test_an_item_that_did_not_move_keeps_its_entry() -> None:
    heap: LazyHeap[Item] = LazyHeap(lambda item: item.key)
    item = Item(5)
    item.entry = heap.renew(None, 5, item)
    assert heap.renew(item.entry, 5, item) is item.entry


def test_a_killed_entry_forgets_its_item() -> None:
    heap: LazyHeap[Item] = LazyHeap(lambda item: item.key)
    gone, stays = Item(1), Item(2)
    gone.entry = heap.renew(None, 1, gone)
    stays.entry = heap.renew(None, 2, stays)
    kill(gone.entry)
    assert gone.entry[2] is None
    assert heap.peek() is stays


def test_stale_entries_do_not_pile_up() -> None:
    """A thousand changes of ten items leave a heap of tens, not of thousands."""
    heap: LazyHeap[Item] = LazyHeap(lambda item: item.key)
    items = [Item(i) for i in range(10)]
    for key in range(10_000):
        item = items[key % 10]
        item.key = key
        item.entry = heap.renew(item.entry, key, item)
    assert len(heap._heap) <= 130
