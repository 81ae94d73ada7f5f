"""Where named parts of a record lie: in one slab, or across the several slabs of an image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from slab_pool.memory import PAGE_BYTES


class Part(NamedTuple):
    """Bytes `[begin, end)` of a record."""

    name: str
    begin: int
    end: int


class Span(NamedTuple):
    """A piece of a record inside one slab: record bytes `[record_begin, record_begin + num_bytes)` are bytes
    `[slab_begin, slab_begin + num_bytes)` of the record's `slab_index`-th slab."""

    slab_index: int
    slab_begin: int
    record_begin: int
    num_bytes: int


class RecordLayout:
    """A record of `record_bytes` with named parts, e.g. one per layer. Immutable.

    Parts do not overlap and lie inside the record; bytes of no part (padding) are allowed. A record larger
    than a slab is packed: its byte `o` lies in slab `o // slab_bytes` of its list, whichever slabs those are.
    ValueError for parts that overlap, are empty, lie outside or share a name.
    """

    __slots__ = ("_by_name", "parts", "record_bytes")

    def __init__(self, *, record_bytes: int, parts: Iterable[tuple[str, int, int]]) -> None:
        self.record_bytes = record_bytes
        self.parts = tuple(Part(*part) for part in parts)
        self._by_name = {part.name: part for part in self.parts}
        if record_bytes < 1:
            raise ValueError(f"RecordLayout: record_bytes must be at least 1, got {record_bytes!r}")
        if len(self._by_name) != len(self.parts):
            raise ValueError(f"RecordLayout: part names must differ, got {[p.name for p in self.parts]!r}")
        end = 0
        for part in sorted(self.parts, key=lambda part: part.begin):
            if not end <= part.begin < part.end <= record_bytes:
                raise ValueError(
                    f"RecordLayout: parts must be non-empty, apart and inside {record_bytes} bytes, got {part!r}"
                )
            end = part.end

    def part(self, name: str) -> Part:
        """The part called `name`, or KeyError."""
        return self._by_name[name]

    def spans(self, name: str, slab_bytes: int) -> tuple[Span, ...]:
        """The pieces of a part, in order, across slabs of `slab_bytes`; KeyError for no such part."""
        _, begin, end = self._by_name[name]
        return record_spans(begin, end, slab_bytes)

    def num_slabs(self, slab_bytes: int) -> int:
        """Slabs one such record takes."""
        return -(-self.record_bytes // slab_bytes)


def record_spans(begin: int, end: int, slab_bytes: int) -> tuple[Span, ...]:
    """Record bytes `[begin, end)` as pieces of slabs, in order, none crossing a slab's border. ValueError unless
    0 <= begin <= end."""
    if not 0 <= begin <= end:
        raise ValueError(f"record_spans: begin and end must rise from 0, got {begin!r} and {end!r}")
    spans = []
    while begin < end:
        index, offset = divmod(begin, slab_bytes)
        length = min(slab_bytes - offset, end - begin)
        spans.append(Span(index, offset, begin, length))
        begin += length
    return tuple(spans)


class SlabLayout(NamedTuple):
    """One slab that holds one record of each of several arenas: where each begins, and the slab's size."""

    offsets: Mapping[str, int]
    slab_bytes: int


def pack_slab(record_bytes: Mapping[str, int]) -> SlabLayout:
    """Lay one record per arena into a slab: in the order given, each from the next 4 KiB border, and the whole
    rounded up to 4 KiB. ValueError for no record, or an empty one."""
    if not record_bytes:
        raise ValueError("pack_slab: at least one record must be given, got none")
    offsets = {}
    end = 0
    for name, num_bytes in record_bytes.items():
        if num_bytes < 1:
            raise ValueError(f"pack_slab: a record must have at least 1 byte, got {name!r} of {num_bytes!r}")
        offsets[name] = end
        end += -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    return SlabLayout(offsets, end)
