"""A model whose every output depends on every byte it should have read, and nothing else.

Its "recurrent state" is a rolling hash of all tokens so far, written all over the layer's part of the image; the KV row
of a token is a number made of its position and id, written all over the row. A pass reads both back, the state and
every row up to its own position, and its hidden state is a hash of what it found. So a page, a slot or a tail that is
another's, is late, or was never written, gives another next token than the oracle ``continuation`` says, which sees
tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qwen35_engine.memory import DeviceMemory
from qwen35_kernels import BLOCK_TOKENS

VOCAB = 97
_PRIME = 65_521


class FakeModel:
    """``nan_slots`` names slots whose next pass is not finite, ``broken_slots`` those whose next prefill raises;
    ``next_error`` is what the next pass raises, whatever is in it."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.nan_slots: set[int] = set()
        self.broken_slots: set[int] = set()
        self.next_error: Exception | None = None
        self.computed_tokens = 0

    def prefill(
        self,
        *,
        tokens: Tensor,
        base: int,
        block_table: Tensor,
        slot: int,
        taps: Sequence[tuple[int, int]] = (),
        before_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        self._raise_next()
        if slot in self.broken_slots:
            self.broken_slots.discard(slot)
            raise ValueError("injected")
        if before_layer is not None:
            before_layer(0)
        state = self._read_state(slot)
        tap_slots = dict(taps)
        for at, token in enumerate(tokens.tolist(), start=base + 1):
            state = advance(state, token)
            if at in tap_slots:
                self._write_state(tap_slots[at], state)
        self._write_state(slot, state)
        if before_layer is not None:
            before_layer(1)
        self._write_rows(block_table, base, tokens.tolist())
        self.computed_tokens += len(tokens)
        return self._hidden(state, self._read_rows(block_table, base + len(tokens)), slot)

    def decode(self, *, tokens: Tensor, positions: Tensor, block_tables: Tensor, slots: Tensor) -> Tensor:
        self._raise_next()
        rows = []
        for token, position, table, slot in zip(
            tokens.tolist(), positions.tolist(), block_tables, slots.tolist(), strict=True
        ):
            state = advance(self._read_state(slot), token)
            self._write_state(slot, state)
            self._write_rows(table, position, [token])
            rows.append(self._hidden(state, self._read_rows(table, position + 1), slot))
        self.computed_tokens += len(rows)
        return torch.stack(rows)

    def _raise_next(self) -> None:
        error, self.next_error = self.next_error, None
        if error is not None:
            raise error

    def logits(self, hidden: Tensor) -> Tensor:
        best = (hidden[:, 0].long() * 31 + hidden[:, 1].long() * 17) % VOCAB
        return torch.nn.functional.one_hot(best, VOCAB).float()

    def _hidden(self, state: int, rows: int, slot: int) -> Tensor:
        bad = slot in self.nan_slots
        self.nan_slots.discard(slot)
        return torch.tensor([float("nan") if bad else float(state), float(rows)])

    # A whole part is one value; where it is not, another sequence wrote there, and the hash says so.

    def _state_part(self, slot: int) -> Tensor:
        part = self._memory.state_layout.layer_range(0)
        return self._memory.states[slot, part.begin : part.end].view(torch.int32)

    def _read_state(self, slot: int) -> int:
        part = self._state_part(slot)
        first = int(part[0])
        return first if bool((part == first).all()) else -1

    def _write_state(self, slot: int, state: int) -> None:
        self._state_part(slot).fill_(state)

    def _plane(self, which: int) -> Tensor:
        """``[pages, rows, bytes of a row as int32]`` of K (0) or V (1): one KV head."""
        kv = self._memory.page_layout.kv(self._memory.pages, 0)
        return (kv.k, kv.v)[which].values[:, 0].view(torch.int32)

    def _write_rows(self, table: Tensor, begin: int, tokens: Sequence[int]) -> None:
        positions = torch.arange(begin, begin + len(tokens))
        values = row_values(positions, torch.tensor(tokens))
        for which in (0, 1):
            plane = self._plane(which)
            plane[table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS] = (values + which)[:, None].to(
                torch.int32
            )

    def _read_rows(self, table: Tensor, length: int) -> int:
        positions = torch.arange(length)
        total = 0
        for which in (0, 1):
            rows = self._plane(which)[table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS].long()
            if not bool((rows == rows[:, :1]).all()):
                return -1
            total += int(((rows[:, 0] - which) * (positions % 251 + 1)).sum())
        return total % _PRIME


def advance(state: int, token: int) -> int:
    """The rolling hash; a fresh state is 0."""
    return (state * 263 + token + 1) % _PRIME


def row_values(positions: Tensor, tokens: Tensor) -> Tensor:
    return (positions * 7919 + tokens * 104_729 + 13) % _PRIME


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The oracle: the next ``count`` tokens, from the tokens alone."""
    tokens = list(prompt)
    state = 0
    for token in tokens:
        state = advance(state, token)
    for _ in range(count):
        positions = torch.arange(len(tokens))
        values = row_values(positions, torch.tensor(tokens))
        rows = int((2 * values * (positions % 251 + 1)).sum()) % _PRIME
        token = (state * 31 + rows * 17) % VOCAB
        tokens.append(token)
        state = advance(state, token)
    return tokens[len(prompt) :]
