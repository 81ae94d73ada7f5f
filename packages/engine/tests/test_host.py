"""The Host tier: budgets that cannot hold, and bytes that come back as they went, wherever their slabs lie."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cache_bench import small_memory
from qwen35_engine import OptionError
from qwen35_engine.host import HostTier, Image, Tail
from slab_pool import Ticket
from slab_pool.testing import ManualCopyStream
from slab_pool.tickets import Completion

MEMORY = small_memory(12, 8)
SLAB_BYTES = -(-MEMORY.page_layout.page_bytes // 4096) * 4096


def random_bytes() -> None:
    generator = torch.Generator().manual_seed(1)
    for arena in (MEMORY.pages, MEMORY.states):
        arena.copy_(torch.randint(0, 256, arena.shape, generator=generator, dtype=torch.uint8))


def test_a_budget_without_room_for_an_image_and_a_block_names_the_least() -> None:
    with pytest.raises(OptionError, match=r"host_cache: .*at least \d+ MiB"):
        HostTier(MEMORY, budget_bytes=2 * SLAB_BYTES)


def test_a_budget_the_machine_does_not_have_says_host_memory() -> None:
    with pytest.raises(OptionError, match="host_cache: Host memory"):
        HostTier(MEMORY, budget_bytes=2**50)


@pytest.mark.parametrize("seed", range(5))
def test_bytes_come_back_as_they_went(seed: int) -> None:
    rng = random.Random(seed)
    random_bytes()
    host = HostTier(MEMORY, budget_bytes=40 * SLAB_BYTES)
    try:
        # Holes in the pool and pages in any order: copies of every length.
        held = host.acquire(40)
        host.release(rng.sample(held, 20))
        pages = rng.sample(range(1, 12), 4)
        slabs, image_slabs, (tail_slab,) = host.acquire(3), host.acquire(host.image_slabs), host.acquire(1)
        before_pages, before_states = MEMORY.pages.clone(), MEMORY.states.clone()
        host.write(pages[:3], slabs, [Image(3, image_slabs)], [Tail(pages[3], tail_slab)]).result()
        MEMORY.pages.fill_(0xAA)
        MEMORY.states.fill_(0xAA)
        targets = rng.sample(range(1, 12), 4)
        restore = host.restore(targets[:3], slabs, Image(5, image_slabs), [Tail(targets[3], tail_slab)])
        restore.wait_for_prelude()
        assert torch.equal(MEMORY.pages[targets[3]], before_pages[pages[3]])
        for layer in range(2):
            restore.wait_for_layer(layer)
        layout = MEMORY.page_layout.layer_range(0)
        for page, target in zip(pages[:3], targets[:3], strict=True):
            assert torch.equal(
                MEMORY.pages[target, layout.begin : layout.end], before_pages[page, layout.begin : layout.end]
            )
        end = MEMORY.state_layout.hidden_range().end
        assert torch.equal(MEMORY.states[5, :end], before_states[3, :end])
        others = [page for page in range(12) if page not in targets]
        assert (MEMORY.pages[others] == 0xAA).all()
        host.drain()
        assert len(host.poll()) == 2
        stats = host.stats()
        assert stats.slabs_total == 40
        assert stats.copies_in_flight == 0
        assert stats.restored_bytes > 0
        host.check_invariants()
    finally:
        host.close()


class Interrupted:
    """A completion that lets something else happen the moment after it was asked whether the batch is done."""

    def __init__(self, completion: Completion, meanwhile: Callable[[], object]) -> None:
        self._completion = completion
        self._meanwhile: list[Callable[[], object]] = [meanwhile]

    def finished(self) -> bool:
        finished = self._completion.finished()
        while self._meanwhile:
            self._meanwhile.pop()()
        return finished

    def __getattr__(self, name: str) -> Any:
        return getattr(self._completion, name)


def test_the_worker_may_settle_copies_while_another_thread_reads_the_gauges() -> None:
    writes = ManualCopyStream()
    host = HostTier(MEMORY, budget_bytes=40 * SLAB_BYTES, reads=ManualCopyStream(), writes=writes)
    tickets = [host.write([1 + i], host.acquire(1), (), ()) for i in range(2)]
    writes.land(1)
    settled: list[Ticket] = []
    tickets[0].completion = Interrupted(tickets[0].completion, lambda: settled.extend(host.poll()))
    stats = host.stats()
    assert settled == tickets[:1]
    assert stats.written_bytes == stats.writing_bytes == tickets[0].batch_bytes
    assert stats.copies_in_flight == 1
    writes.land_all()
    assert host.poll() == tickets[1:]
    assert host.stats().written_bytes == 2 * tickets[0].batch_bytes
    host.close()
