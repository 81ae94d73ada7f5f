"""Lanes: the memory a sequence runs in, taken whole or not at all, and given back at its end."""

from __future__ import annotations

from contextlib import ExitStack
from struct import pack_into
from typing import cast

import torch
from torch import Tensor

from prefix_index import Lease, PrefixIndex, Tier
from qwen35_kernels import BLOCK_TOKENS

from ..memory import DeviceMemory
from ..metrics import Reuse
from ..sequence import Sequence
from .allocator import Allocator
from .quotes import AdmissionQuote
from .restores import Missing, Restorer
from .transfers import Transfers

__all__ = ["Lanes"]


class Lanes:
    """Gives sequences their lanes.

    Attributes:
        block_tables: int64 ``[max_concurrency, blocks]`` on the device. Row r is that of the sequence with this row;
            unused entries are 0, the scratch page.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        index: PrefixIndex,
        allocator: Allocator,
        restorer: Restorer | None,
        transfers: Transfers,
        *,
        max_concurrency: int,
        context_blocks: int,
    ) -> None:
        self._memory = memory
        self._index = index
        self._allocator = allocator
        self._restorer = restorer
        self._transfers = transfers
        self._rows = set(range(max_concurrency))
        self.block_tables: Tensor = torch.zeros(
            (max_concurrency, context_blocks), dtype=torch.int64, device=memory.pages.device
        )

    @property
    def num_free(self) -> int:
        """Rows of the block tables that no sequence has."""
        return len(self._rows)

    def start(self, sequence: Sequence, quote: AdmissionQuote) -> None:
        """Give a sequence its lane by a quote that is ready, with nothing in between.

        All or nothing: where a step raises, everything that was pinned and taken is given back, and only what was
        evicted for it stays evicted. Afterwards its slot holds the state of its frontier, once ``restore``, if there is
        one, has landed.
        """
        with ExitStack() as undo:
            self._stage(sequence, quote, undo)
            undo.pop_all()

    def _stage(self, sequence: Sequence, quote: AdmissionQuote, undo: ExitStack) -> None:
        index = self._index
        lease = self._acquire(quote, undo)
        missing = Missing.of(index, lease)
        # Pins what a restore reads until it has landed, whatever becomes of the sequence.
        guard = self._acquire(quote, undo) if missing else None
        depth = 0 if lease is None else lease.depth
        taken = self._take_pages(quote.blocks - depth + missing.num_pages, undo)
        restored, taken = taken[: missing.blocks], taken[missing.blocks :]
        new_tail, own = (taken[:1], taken[1:]) if missing.tail else ([], taken)
        held = () if lease is None else index.handles(lease, Tier.DEVICE, 0, depth - missing.blocks)
        pages = [*cast(tuple[int, ...], held), *restored, *own]
        (slot,) = self._allocator.slots.take(1)
        undo.callback(self._allocator.slots.give_back, [slot])
        row = self._rows.pop()
        undo.callback(self._rows.add, row)
        self._write_row(row, pages)
        if lease is None or lease.snapshot is None:
            self._memory.clear_state(slot)
        elif lease.slot is not None:
            self._memory.copy_state(lease.slot, slot)
        if lease is not None and lease.tail_pages:
            self._memory.copy_page(lease.tail_pages[0], own[0])
        restore = None
        if lease is not None and guard is not None:
            assert self._restorer is not None
            tails = [*new_tail, own[0]] if missing.tail else []
            restore = self._restorer.bring(lease, missing, guard, pages=restored, tails=tails, slot=slot, undo=undo)
        if lease is not None and quote.match is not None:
            host_tokens = missing.blocks * BLOCK_TOKENS + (lease.frontier % BLOCK_TOKENS if missing.tail else 0)
            sequence.reuse = Reuse(
                device_tokens=lease.frontier - host_tokens,
                host_tokens=host_tokens,
                matched_tokens=quote.match.matched_tokens,
                restored_bytes=restore.num_bytes if restore is not None else 0,
                reason=quote.reason,
            )
            sequence.frontier = sequence.computed = sequence.last_capture = lease.frontier
        sequence.lease, sequence.row, sequence.slot = lease, row, slot
        sequence.pages, sequence.committed, sequence.private = pages, depth, set(pages[depth:])
        sequence.restore = restore

    def _acquire(self, quote: AdmissionQuote, undo: ExitStack) -> Lease | None:
        if quote.match is None:
            return None
        lease = self._index.acquire(quote.match, quote.source)
        undo.callback(self._index.cancel, lease)
        return lease

    def _take_pages(self, count: int, undo: ExitStack) -> list[int]:
        pages = self._allocator.take_pages(count)
        undo.callback(self._allocator.pages.give_back, pages)
        return pages

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Make room for the KV of ``tokens`` tokens; False when no page is free or can be evicted now."""
        begin = len(sequence.pages)
        short = -(-tokens // BLOCK_TOKENS) - begin
        if short <= 0:
            return True
        if short > self._allocator.page_room():
            return False
        own = self._allocator.take_pages(short)
        sequence.pages += own
        sequence.private.update(own)
        self.block_tables[sequence.row, begin : begin + short] = torch.tensor(own, device=self.block_tables.device)
        return True

    def retire(self, sequence: Sequence) -> None:
        """Take back the row of a sequence that computes no more. A second time changes nothing."""
        if sequence.row is not None:
            self._rows.add(sequence.row)
            sequence.row = None

    def end(self, sequence: Sequence) -> None:
        """Take back pages and slot; those a restore still writes to, when it has landed. The sequence holds nothing
        afterwards."""
        pages, slot, restore = sorted(sequence.private), sequence.slot, sequence.restore

        def give_back() -> None:
            self._allocator.pages.give_back(pages)
            if slot:
                self._allocator.slots.give_back([slot])

        sequence.pages, sequence.private, sequence.slot, sequence.restore = [], set(), 0, None
        if restore is None or restore.done():
            give_back()
        else:
            self._transfers.afterwards(restore.ticket, give_back)

    def _write_row(self, number: int, pages: list[int]) -> None:
        row = self.block_tables[number]
        # Of thousands of numbers: a third of what an array takes, a tenth of what a tensor does.
        numbers = bytearray(8 * row.shape[0])
        pack_into(f"{len(pages)}q", numbers, 0, *pages)
        row.copy_(torch.frombuffer(numbers, dtype=torch.int64))
