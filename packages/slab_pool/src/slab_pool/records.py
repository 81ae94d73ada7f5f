"""Where the bytes of a record lie: in one slab, or across the several slabs of an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from slab_pool.memory import PAGE_BYTES


class Span(NamedTuple):
    """A piece of a record inside one slab.

    Record bytes `[record_begin, record_begin + num_bytes)` are bytes `[slab_begin, slab_begin + num_bytes)` of the
    record's `slab_index`-th slab.
    """

    slab_index: int
    slab_begin: int
    record_begin: int
    num_bytes: int


def record_spans(begin: int, end: int, slab_bytes: int) -> tuple[Span, ...]:
    """Record bytes `[begin, end)` as pieces of slabs, in order, none crossing a slab's border.

    A record larger than a slab is packed: its byte `o` lies in slab `o // slab_bytes` of its list.

    Raises:
        ValueError: unless 0 <= begin <= end.
    """
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
    """Lay one record per arena into a slab.

    They lie in the order given, each from the next 4 KiB border; the whole is rounded up to 4 KiB.

    Raises:
        ValueError: no record, or an empty one.
    """
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
