"""Device memory: the page arena, the state arena, and the free lists of their pages and slots.

Everything the cache moves is one contiguous record: a page is one row of ``uint8[num_pages, page_bytes]``, the state
of a sequence one row of ``uint8[num_slots, image_bytes]``. Page 0 and slot 0 are scratch: padding may write there,
nothing reads them as data, and they are never handed out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qwen35_kernels import PageLayout, StateLayout

from .errors import OptionError

__all__ = ["DeviceMemory", "IdPool"]


class IdPool:
    """The free ids of an arena, lowest first; id 0 is scratch and never in it.

    Deliberately knows nothing of owners: a caller that takes an id keeps track of it.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self._size = size
        self._free = list(range(1, size))
        self._is_free = bytearray(b"\x00" + b"\x01" * (size - 1))

    def __len__(self) -> int:
        """Ids that are free now."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Ids that can be handed out in all."""
        return self._size - 1

    def take(self, count: int) -> list[int]:
        """Take the ``count`` lowest free ids, ascending.

        Raises:
            RuntimeError: fewer are free; nothing is taken.
        """
        if count > len(self._free):
            raise RuntimeError(f"{self.name}: {count} wanted, {len(self._free)} free")
        ids = [heapq.heappop(self._free) for _ in range(count)]
        for i in ids:
            self._is_free[i] = 0
        return ids

    def give_back(self, ids: Iterable[int]) -> None:
        """Return ids.

        Raises:
            RuntimeError: an id is out of range or free already; nothing is returned.
        """
        ids = list(ids)
        for i in ids:
            if not 1 <= i < self._size or self._is_free[i]:
                raise RuntimeError(f"{self.name}: id {i} was not taken")
        if len(set(ids)) != len(ids):
            raise RuntimeError(f"{self.name}: ids given back twice in {ids}")
        for i in ids:
            self._is_free[i] = 1
            heapq.heappush(self._free, i)


class DeviceMemory:
    """The two arenas and their layouts.

    Attributes:
        pages: uint8 ``[num_pages, page_bytes]``.
        states: uint8 ``[num_slots, image_bytes]``.
        layers: per layer of the model, whether it is a Gated DeltaNet layer (else full attention), and which of that
            kind it is, counted from 0: its place in the image, or in the page record.
    """

    def __init__(
        self,
        *,
        page_layout: PageLayout,
        state_layout: StateLayout,
        layers: Sequence[bool],
        num_pages: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        self.page_layout = page_layout
        self.state_layout = state_layout
        self.layers = tuple((linear, layers[:i].count(linear)) for i, linear in enumerate(layers))
        self.pages = _arena("KV pages", num_pages, page_layout.page_bytes, device)
        self.states = _arena("state slots", num_slots, state_layout.image_bytes, device)
        # A scratch page or slot may be read under a mask; it must at least hold numbers.
        self.pages[0].zero_()
        self.states[0].zero_()

    def clear_state(self, slot: int) -> None:
        """The state before any token: all zeros."""
        self.states[slot].zero_()

    def copy_state(self, source: int, destination: int) -> None:
        self.states[destination].copy_(self.states[source])

    def copy_page(self, source: int, destination: int) -> None:
        self.pages[destination].copy_(self.pages[source])


def _arena(what: str, rows: int, row_bytes: int, device: torch.device) -> Tensor:
    try:
        return torch.empty((rows, row_bytes), dtype=torch.uint8, device=device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        mib = rows * row_bytes / 2**20
        raise OptionError(
            f"{what}: {rows} x {row_bytes} bytes ({mib:.0f} MiB) do not fit on {device}: {error}"
        ) from error
