"""How a variable-length batch is described to the ops that carry state from chunk to chunk.

A call covers N sequences laid end to end along the token axis. Sequence i owns tokens
[cu_seqlens[i], cu_seqlens[i + 1]); its first token has the absolute position bases[i], and its state lives in
slot slots[i]. A tap asks for the state after an absolute position to be written to one more slot.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from qwen35_kernels.contracts import refuse

__all__ = ["SequencePlan", "Tap", "check_cu_seqlens", "plan_sequences"]


@dataclass(frozen=True)
class Tap:
    """Write the state after absolute position `position` of sequence `sequence` into slot `slot`.

    `position` counts tokens: base < position <= base + length. A tap at the end of a call equals the state
    left in the sequence's own slot.
    """

    sequence: int
    position: int
    slot: int


@dataclass(frozen=True)
class SequencePlan:
    """One sequence of a call. `taps` are (tokens of this call up to the tap, slot)."""

    slot: int
    begin: int
    end: int
    base: int
    has_state: bool
    taps: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin


def check_cu_seqlens(op: str, cu_seqlens: Sequence[int], num_sequences: int, num_tokens: int) -> None:
    if len(cu_seqlens) != num_sequences + 1:
        refuse(op, f"cu_seqlens must have {num_sequences + 1} entries", len(cu_seqlens))
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != num_tokens:
        refuse(op, f"cu_seqlens must run from 0 to {num_tokens}", tuple(cu_seqlens))
    if any(b < a for a, b in itertools.pairwise(cu_seqlens)):
        refuse(op, "cu_seqlens must not decrease", tuple(cu_seqlens))


def plan_sequences(
    op: str,
    *,
    num_tokens: int,
    num_slots: int,
    slots: Sequence[int],
    cu_seqlens: Sequence[int],
    bases: Sequence[int],
    taps: Sequence[Tap],
    has_state: Sequence[bool] | None,
) -> tuple[SequencePlan, ...]:
    """Check a call's sequences and taps, and return one plan a sequence.

    Slots written by one call (the sequences' own and the taps') are distinct and never slot 0, so the order
    in which they are written cannot matter.
    """
    num = len(slots)
    check_cu_seqlens(op, cu_seqlens, num, num_tokens)
    if len(bases) != num:
        refuse(op, f"bases must have {num} entries", len(bases))
    if has_state is not None and len(has_state) != num:
        refuse(op, f"has_state must have {num} entries", len(has_state))
    for base in bases:
        if base < 0:
            refuse(op, "bases must not be negative", base)
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
    return tuple(
        SequencePlan(
            slot=slots[i],
            begin=cu_seqlens[i],
            end=cu_seqlens[i + 1],
            base=bases[i],
            has_state=True if has_state is None else has_state[i],
            taps=tuple(per_sequence[i]),
        )
        for i in range(num)
    )
