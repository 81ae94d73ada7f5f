"""What the ops of a pass are told about its sequences: made and checked once, then given to the ops of every layer.

A prefill pass covers N sequences laid end to end along the token axis. Sequence i owns tokens
[cu_seqlens[i], cu_seqlens[i + 1]), and its first token has the absolute position bases[i]. A decode pass covers
one token of each of B lanes. `PrefillStates` and `DecodeStates` say in which state slots they find their states,
`PrefillPages` and `DecodePages` in which pages they find their keys and values.

What an op derives from a plan alone (an index tensor, a table for a kernel) it derives with `once`, and the next
layer finds it there.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from qwen35_kernels.contracts import (
    check_device,
    check_dtype,
    check_index,
    check_rank,
    check_shape,
    refuse,
    smallest_and_largest,
)
from qwen35_kernels.layout import BLOCK_TOKENS

__all__ = [
    "DecodePages",
    "DecodeStates",
    "PrefillPages",
    "PrefillStates",
    "StateSequence",
    "StateTap",
    "TokenPages",
    "TokenRows",
]

Derived = TypeVar("Derived")


class _Plan:
    """Keeps what ops derive from a plan, for as long as the plan lives."""

    def __init__(self) -> None:
        self._derived: dict[Hashable, Any] = {}

    def once(self, key: Hashable, derive: Callable[[], Derived]) -> Derived:
        """What `derive` returned when it was first asked for under `key`."""
        try:
            found: Derived = self._derived[key]
        except KeyError:
            found = self._derived[key] = derive()
        return found


def _check_chunks(op: str, cu_seqlens: Sequence[int], bases: Sequence[int], num_sequences: int) -> None:
    if len(cu_seqlens) != num_sequences + 1:
        refuse(op, f"cu_seqlens must have {num_sequences + 1} entries", len(cu_seqlens))
    if cu_seqlens[0] != 0:
        refuse(op, "cu_seqlens must start at 0", tuple(cu_seqlens))
    if any(b < a for a, b in itertools.pairwise(cu_seqlens)):
        refuse(op, "cu_seqlens must not decrease", tuple(cu_seqlens))
    if len(bases) != num_sequences:
        refuse(op, f"bases must have {num_sequences} entries", len(bases))
    for base in bases:
        if base < 0:
            refuse(op, "bases must not be negative", base)


def check_tokens(op: str, name: str, x: Tensor, num_tokens: int) -> None:
    """The rows of x are the tokens of the plan."""
    if x.shape[0] != num_tokens:
        refuse(op, f"{name} must have the plan's {num_tokens} tokens", x.shape[0])


def check_slots(op: str, name: str, arena: Tensor, num_slots: int) -> None:
    """The slots that the plan was checked against are those of the arena."""
    if arena.shape[0] != num_slots:
        refuse(op, f"{name} must have the plan's {num_slots} slots", arena.shape[0])


# -- states ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateTap:
    """Write the state after absolute position `position` of sequence `sequence` into slot `slot`.

    `position` counts tokens: base < position <= base + length. A tap at the end of a call equals the state
    left in the sequence's own slot.
    """

    sequence: int
    position: int
    slot: int


@dataclass(frozen=True)
class StateSequence:
    """One sequence of a prefill pass. `taps` are (tokens of this pass up to the tap, slot)."""

    slot: int
    begin: int
    end: int
    base: int
    taps: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin


class PrefillStates(_Plan):
    """The state slots of a prefill pass, one a sequence and one a tap.

    Slots written by one pass (the sequences' own and the taps') are distinct and never slot 0, so the order
    in which they are written cannot matter.

    Attributes:
        sequences: one a sequence, in order.
        num_tokens: of all sequences together.
        num_slots: of the state arena; slots lie below.
    """

    def __init__(
        self,
        *,
        slots: Sequence[int],
        cu_seqlens: Sequence[int],
        bases: Sequence[int],
        num_slots: int,
        taps: Sequence[StateTap] = (),
    ) -> None:
        """Check them together.

        Raises:
            KernelInputError: lists of other lengths, a slot out of range or used twice, a tap outside its sequence.
        """
        super().__init__()
        op, num = "PrefillStates", len(slots)
        _check_chunks(op, cu_seqlens, bases, num)
        written: set[int] = set()
        for slot in slots:
            if not 0 < slot < num_slots:
                refuse(op, f"slots must lie in [1, {num_slots}) (slot 0 is scratch)", slot)
            if slot in written:
                refuse(op, "each slot may be used once in a call", slot)
            written.add(slot)
        per_sequence: list[list[tuple[int, int]]] = [[] for _ in range(num)]
        for tap in taps:
            if not 0 <= tap.sequence < num:
                refuse(op, f"a tap's sequence must lie in [0, {num})", tap)
            length = cu_seqlens[tap.sequence + 1] - cu_seqlens[tap.sequence]
            base = bases[tap.sequence]
            if not base < tap.position <= base + length:
                refuse(op, f"a tap's position must lie in [{base + 1}, {base + length}]", tap)
            if not 0 < tap.slot < num_slots:
                refuse(op, f"a tap's slot must lie in [1, {num_slots}) (slot 0 is scratch)", tap)
            if tap.slot in written:
                refuse(op, "a tap's slot must not be written by anything else in the call", tap)
            written.add(tap.slot)
            per_sequence[tap.sequence].append((tap.position - base, tap.slot))
        self.num_tokens = cu_seqlens[-1]
        self.num_slots = num_slots
        self.sequences = tuple(
            StateSequence(slots[i], cu_seqlens[i], cu_seqlens[i + 1], bases[i], tuple(per_sequence[i]))
            for i in range(num)
        )


class DecodeStates(_Plan):
    """The state slots of a decode pass, one a lane: distinct, except for scratch slot 0, which padding lanes may share.

    Attributes:
        slots: int64 [B].
        num_slots: of the state arena; slots lie below.
    """

    def __init__(self, *, slots: Tensor, num_slots: int) -> None:
        """Check the slots; their numbers only on a CPU.

        Raises:
            KernelInputError: another shape or dtype, or a slot out of range.
        """
        super().__init__()
        check_rank("DecodeStates", "slots", slots, 1)
        check_index("DecodeStates", "slots", slots, slots.shape[0], begin=0, end=num_slots)
        self.slots = slots
        self.num_slots = num_slots
        self.num_tokens = slots.shape[0]

    @functools.cached_property
    def numbers(self) -> list[int]:
        """The slots as a list, read from wherever they are."""
        values: list[int] = self.slots.tolist()
        return values


# -- pages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenPages:
    """The pages of one sequence's tokens in their order, and the span of numbers from the smallest to the largest
    (None on a device that would stall for it)."""

    numbers: Tensor
    span: range | None

    @property
    def count(self) -> int:
        # Not len(): what torch does for that costs a decode step several microseconds.
        return self.numbers.shape[0]


def _token_pages(op: str, table: Tensor, length: int, num_pages: int) -> TokenPages:
    """The pages that hold `length` tokens, checked: inside the arena, and none of them scratch."""
    blocks = -(-length // BLOCK_TOKENS)
    if blocks > table.shape[0]:
        refuse(op, f"block_tables must cover {length} tokens", table.shape[0] * BLOCK_TOKENS)
    pages = table[:blocks]
    if blocks == 0 or pages.device.type != "cpu":
        return TokenPages(pages, None)
    low, high = smallest_and_largest(pages)
    if low < 1 or high >= num_pages:
        refuse(op, f"pages must lie in [1, {num_pages}) (page 0 is scratch)", low if low < 1 else high)
    return TokenPages(pages, range(low, high + 1))


class TokenRows:
    """Where the keys and values of a pass's new tokens go: token t to row rows[t] of page pages[t].

    (page, row) pairs are distinct, except on scratch page 0, where padding may collide.
    """

    def __init__(self, *, pages: Tensor, rows: Tensor, num_pages: int) -> None:
        """Check the two int64 [T]; their numbers only on a CPU.

        Raises:
            KernelInputError: another shape, dtype or device, or a number out of range.
        """
        op = "TokenRows"
        check_rank(op, "pages", pages, 1)
        check_index(op, "pages", pages, pages.shape[0], begin=0, end=num_pages)
        check_index(op, "rows", rows, pages.shape[0], begin=0, end=BLOCK_TOKENS)
        check_device(op, "rows", rows, pages.device)
        self.pages, self.rows, self.num_pages = pages, rows, num_pages
        self.num_tokens = pages.shape[0]

    @functools.cached_property
    def only(self) -> tuple[int, int] | None:
        """Page and row where there is one token and a CPU: a plain copy is faster than an indexed store."""
        if self.num_tokens != 1 or self.pages.device.type != "cpu":
            return None
        return int(self.pages), int(self.rows)


class PrefillPages(_Plan):
    """The pages of a prefill pass. The chunks' own tokens are in them: token j of sequence i stands at bases[i] + j.

    Attributes:
        block_tables: int64 [N, max_blocks].
        sequences: per sequence its pages, as many as its tokens take; none where the pass has none of its tokens.
        num_tokens: of all sequences together.
        num_pages: of the page arena; pages lie below.
    """

    def __init__(
        self, *, block_tables: Tensor, cu_seqlens: Sequence[int], bases: Sequence[int], num_pages: int
    ) -> None:
        """Check them together; the numbers of pages only on a CPU.

        Raises:
            KernelInputError: lists of other lengths, too short a table, or a page out of range.
        """
        super().__init__()
        op = "PrefillPages"
        check_rank(op, "block_tables", block_tables, 2)
        check_dtype(op, "block_tables", block_tables, (torch.int64,))
        _check_chunks(op, cu_seqlens, bases, block_tables.shape[0])
        self.block_tables, self.cu_seqlens, self.bases = block_tables, tuple(cu_seqlens), tuple(bases)
        self.num_tokens = cu_seqlens[-1]
        self.num_pages = num_pages
        lengths = [
            base + end - begin if end > begin else 0
            for base, (begin, end) in zip(bases, itertools.pairwise(cu_seqlens), strict=True)
        ]
        self.sequences = tuple(
            _token_pages(op, table, length, num_pages)
            for table, length in zip(block_tables.unbind(0), lengths, strict=True)
        )

    @functools.cached_property
    def positions(self) -> Tensor:
        """The absolute position of each token, int64 [T]."""
        chunks = [
            torch.arange(base, base + end - begin, device=self.block_tables.device)
            for base, (begin, end) in zip(self.bases, itertools.pairwise(self.cu_seqlens), strict=True)
        ]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    @functools.cached_property
    def rows(self) -> TokenRows:
        """Where the chunks' tokens are stored."""
        blocks = self.positions // BLOCK_TOKENS
        chunks = itertools.pairwise(self.cu_seqlens)
        tables = zip(self.block_tables.unbind(0), chunks, strict=True)
        pages = torch.cat([table[blocks[begin:end]] for table, (begin, end) in tables])
        return TokenRows(pages=pages, rows=self.positions % BLOCK_TOKENS, num_pages=self.num_pages)


class DecodePages(_Plan):
    """The pages of a decode pass. A lane's new token is its last: it stands at lengths[b] - 1.

    Attributes:
        block_tables: int64 [B, max_blocks].
        lengths: int64 [B], the keys a lane sees, at least 1.
        num_tokens: the lanes.
        num_pages: of the page arena; pages lie below.
    """

    def __init__(self, *, block_tables: Tensor, lengths: Tensor, num_pages: int) -> None:
        """Check them together; numbers only on a CPU.

        Raises:
            KernelInputError: another shape or dtype, too short a table, a length or page out of range.
        """
        super().__init__()
        op = "DecodePages"
        check_rank(op, "block_tables", block_tables, 2)
        check_dtype(op, "block_tables", block_tables, (torch.int64,))
        check_shape(op, "lengths", lengths, (block_tables.shape[0],))
        check_dtype(op, "lengths", lengths, (torch.int64,))
        check_device(op, "lengths", lengths, block_tables.device)
        self.block_tables, self.lengths = block_tables, lengths
        self.num_tokens = block_tables.shape[0]
        self.num_pages = num_pages
        if block_tables.device.type == "cpu":
            _ = self.lanes

    @functools.cached_property
    def counts(self) -> list[int]:
        """The lengths as a list, read from wherever they are."""
        counts: list[int] = self.lengths.tolist()
        for count in counts:
            if count < 1:
                refuse("DecodePages", "lengths must be at least 1", count)
        return counts

    @functools.cached_property
    def lanes(self) -> tuple[TokenPages, ...]:
        """Per lane its pages, as many as its keys take."""
        tables = zip(self.block_tables.unbind(0), self.counts, strict=True)
        return tuple(_token_pages("DecodePages", table, count, self.num_pages) for table, count in tables)

    @functools.cached_property
    def rows(self) -> TokenRows:
        """Where the lanes' new tokens are stored."""
        positions = self.lengths - 1
        pages = self.block_tables.gather(1, (positions // BLOCK_TOKENS).unsqueeze(1)).squeeze(1)
        return TokenRows(pages=pages, rows=positions % BLOCK_TOKENS, num_pages=self.num_pages)
