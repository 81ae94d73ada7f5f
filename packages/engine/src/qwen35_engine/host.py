"""The Host tier: slabs, and the batches that move pages and states between them and the device.

It knows bytes and tickets, and no tokens. What a slab holds is the index's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import slab_pool
from slab_pool import Copy, CopyBatch, CopyStream, Direction, Runs, SlabPool, Ticket

from .errors import OptionError
from .memory import DeviceMemory

__all__ = ["HostStats", "HostTier", "Image", "Restore", "Tail"]


@dataclass(frozen=True)
class Image:
    """A state image: its slot on the device and its slabs, in order."""

    slot: int
    slabs: tuple[int, ...]


@dataclass(frozen=True)
class Tail:
    """A partial block: its page on the device and its slab."""

    page: int
    slab: int


@dataclass(frozen=True, kw_only=True)
class HostStats:
    """Gauges and totals of the Host tier: slabs, bytes that have landed in each direction, and what is in flight."""

    slabs_free: int
    slabs_total: int
    slab_bytes: int
    written_bytes: int
    restored_bytes: int
    copies_in_flight: int
    writing_bytes: int
    restoring_bytes: int


@dataclass(frozen=True)
class Restore:
    """A restore in flight.

    Its parts land in the order in which a forward pass reads them: the prelude (tails, the hidden state), then one
    part per layer of the model.
    """

    ticket: Ticket
    stream: CopyStream

    def wait_for_prelude(self) -> None:
        """Order the compute stream behind the prelude (on a CPU: wait for it).

        Raises:
            CopyFailed: it will not come.
        """
        self.ticket.part(0).wait_on(self.stream.compute_stream())

    def wait_for_layer(self, layer: int) -> None:
        """Order the compute stream behind the bytes that layer reads (on a CPU: wait for them).

        Raises:
            CopyFailed: they will not come.
        """
        self.ticket.part(1 + layer).wait_on(self.stream.compute_stream())

    @property
    def num_bytes(self) -> int:
        """Bytes it copies in all."""
        return self.ticket.batch_bytes

    def done(self) -> bool:
        return self.ticket.done()

    def wait(self) -> None:
        """Block until all of it has landed.

        Raises:
            CopyFailed: it will not come.
        """
        self.ticket.result()


class HostTier:
    """A slab pool and two copy streams, one per direction, so that a restore never queues behind a write-through."""

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        budget_bytes: int,
        reads: CopyStream | None = None,
        writes: CopyStream | None = None,
    ) -> None:
        """Reserve ``budget_bytes`` of Host memory. ``reads`` and ``writes`` replace the device's copy streams.

        Raises:
            OptionError: the budget holds no image and block, or the system refuses the memory.
        """
        self._memory = memory
        page_bytes = memory.page_layout.page_bytes
        try:
            self._pool = SlabPool(
                budget_bytes=budget_bytes,
                slab_bytes=slab_pool.pack_slab({"page": page_bytes}).slab_bytes,
                image_bytes=memory.state_layout.image_bytes,
            )
        except (ValueError, slab_pool.HostMemoryError) as error:
            raise OptionError(f"host_cache: {error}") from error
        device = memory.pages.device
        self._reads = reads or slab_pool.open_copy_stream(device)
        self._writes = writes or slab_pool.open_copy_stream(device)

    @property
    def image_slabs(self) -> int:
        """Slabs that one state image takes."""
        return self._pool.image_slabs

    @property
    def capacity_bytes(self) -> int:
        """Host memory that is reserved."""
        return self._pool.capacity_bytes

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_slabs(self) -> int:
        return self._pool.num_slabs

    def acquire(self, count: int) -> tuple[int, ...]:
        """Take slabs.

        Raises:
            PoolExhausted: fewer are free; none is taken.
            HostMemoryError: their memory could not be touched or page-locked.
        """
        return self._pool.acquire(count)

    def release(self, slabs: Sequence[int]) -> None:
        """Give slabs back.

        Raises:
            StaleSlab: one was not acquired; none is given back.
        """
        self._pool.release(slabs)

    def write(
        self, pages: Sequence[int], slabs: Sequence[int], images: Sequence[Image], tails: Sequence[Tail]
    ) -> Ticket:
        """Start copying pages, images and tails to their slabs, as one batch behind what is computed so far.

        Raises:
            StaleSlab: a slab was not acquired.
        """
        copies = self._page_copies(self._runs(pages, slabs))
        for image in images:
            copies += self._image_copies(image, 0, self._memory.state_layout.image_bytes)
        copies += self._page_copies(self._runs([tail.page for tail in tails], [tail.slab for tail in tails]))
        batch = CopyBatch.of(Direction.DEVICE_TO_HOST, [("write-through", copies)])
        return self._writes.submit(batch, after=self._writes.compute_stream())

    def restore(
        self, pages: Sequence[int], slabs: Sequence[int], image: Image | None, tails: Sequence[Tail]
    ) -> Restore:
        """Start copying slabs to pages, an image to its slot, tails to their pages, in the order of a forward pass.

        Raises:
            StaleSlab: a slab was not acquired.
        """
        states, runs = self._memory.state_layout, self._runs(pages, slabs)
        prelude = self._page_copies(self._runs([tail.page for tail in tails], [tail.slab for tail in tails]))
        if image is not None:
            hidden = states.hidden_range()
            prelude += self._image_copies(image, hidden.begin, hidden.end)
        parts: list[tuple[str, list[Copy]]] = [("prelude", prelude)]
        for number, (is_linear, index) in enumerate(self._memory.layers):
            if is_linear:
                part = states.layer_range(index)
                copies = [] if image is None else self._image_copies(image, part.begin, part.end)
            else:
                part = self._memory.page_layout.layer_range(index)
                copies = self._page_copies(runs, part.begin, part.end)
            parts.append((f"layer {number}", copies))
        batch = CopyBatch.of(Direction.HOST_TO_DEVICE, parts)
        return Restore(self._reads.submit(batch, after=self._reads.compute_stream()), self._reads)

    @property
    def restoring_bytes(self) -> int:
        """Bytes in flight to the device."""
        return self._reads.statistics().in_flight_bytes

    @property
    def restoring(self) -> bool:
        """Whether a restore is in flight."""
        return self._reads.statistics().in_flight_batches > 0

    def poll(self) -> list[Ticket]:
        """The batches that landed since the last call. Never waits.

        Raises:
            CopyFailed: a copy failed. The engine cannot go on.
        """
        return [*self._reads.poll(), *self._writes.poll()]

    def drain(self) -> None:
        """Wait until nothing is in flight. `poll` raises what failed, not this."""
        self._reads.drain()
        self._writes.drain()

    def close(self) -> None:
        self._reads.close()
        self._writes.close()
        self._pool.close()

    def check_invariants(self) -> None:
        self._pool.check_invariants()

    def stats(self) -> HostStats:
        """Counts as of now. Any thread may ask."""
        pool, reads, writes = self._pool.statistics(), self._reads.statistics(), self._writes.statistics()
        return HostStats(
            slabs_free=pool.num_slabs - pool.num_used,
            slabs_total=pool.num_slabs,
            slab_bytes=pool.slab_bytes,
            written_bytes=writes.device_to_host.num_bytes,
            restored_bytes=reads.host_to_device.num_bytes,
            copies_in_flight=reads.in_flight_batches + writes.in_flight_batches,
            writing_bytes=writes.in_flight_bytes,
            restoring_bytes=reads.in_flight_bytes,
        )

    def _runs(self, pages: Sequence[int], slabs: Sequence[int]) -> Runs:
        return self._pool.plan_runs(pages, slabs, record_bytes=self._memory.page_layout.page_bytes)

    def _page_copies(self, runs: Runs, begin: int = 0, end: int | None = None) -> list[Copy]:
        last = self._memory.page_layout.page_bytes if end is None else end
        return slab_pool.record_copies(self._pool, self._memory.pages, runs, begin, last) if runs else []

    def _image_copies(self, image: Image, begin: int, end: int) -> list[Copy]:
        return slab_pool.image_copies(self._pool, self._memory.states, image.slot, image.slabs, begin, end)
