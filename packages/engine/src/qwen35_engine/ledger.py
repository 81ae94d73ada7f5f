"""The ledger: where every byte went that the engine holds for as long as it lives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Ledger", "LedgerEntry", "bytes_of", "free_bytes"]


@dataclass(frozen=True)
class LedgerEntry:
    """``num_bytes`` of ``what``: memory of the device the model runs on, or the cache's own Host memory."""

    what: str
    tier: Literal["device", "host"]
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What was taken and is not given back while the engine runs.

    Attributes:
        entries: each part once, the device's first.
        free_bytes: what the device has left beside it; None on a CPU, whose memory is not the engine's alone.
    """

    entries: tuple[LedgerEntry, ...]
    free_bytes: int | None

    def total_bytes(self, tier: Literal["device", "host"]) -> int:
        """The sum of a tier's entries."""
        return sum(entry.num_bytes for entry in self.entries if entry.tier == tier)


def free_bytes(device: torch.device) -> int | None:
    """What ``device`` has left now; None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def bytes_of(*parts: object) -> int:
    """Bytes of the tensors in ``parts``, which are tensors, dataclasses and sequences of such. A storage that several
    share counts once, and whole."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(parts)}
    return sum(storages.values())


def _tensors(parts: Iterable[object]) -> Iterator[Tensor]:
    for part in parts:
        if isinstance(part, Tensor):
            yield part
        elif dataclasses.is_dataclass(part):
            yield from _tensors(getattr(part, field.name) for field in dataclasses.fields(part))
        elif isinstance(part, tuple | list):
            yield from _tensors(part)
