"""Hypothesis strategies and small builders shared by the slab_pool tests."""

from __future__ import annotations

from hypothesis import strategies as st

from slab_pool import SlabPool

SLAB = 4096


def small_pool(num_slabs: int = 8, *, slabs_per_chunk: int = 4, slab_bytes: int = SLAB, **options) -> SlabPool:
    """An unpinned pool of several chunks."""
    return SlabPool(
        budget_bytes=num_slabs * slab_bytes,
        slab_bytes=slab_bytes,
        max_chunk_bytes=slabs_per_chunk * slab_bytes,
        pinned=False,
        **options,
    )


@st.composite
def page_slab_pairs(draw: st.DrawFn, *, max_pages: int = 60, max_slabs: int = 60) -> list[tuple[int, int]]:
    """Pairs with plenty of regular stretches, so that runs of every kind come up; repetitions too."""
    pairs: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 6))):
        page = draw(st.integers(0, max_pages - 1))
        slab = draw(st.integers(0, max_slabs - 1))
        page_step = draw(st.integers(-2, 4))
        slab_step = draw(st.integers(-2, 4))
        for _ in range(draw(st.integers(1, 8))):
            if not (0 <= page < max_pages and 0 <= slab < max_slabs):
                break
            pairs.append((page, slab))
            page += page_step
            slab += slab_step
    return pairs
