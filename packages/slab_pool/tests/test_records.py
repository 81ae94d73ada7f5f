"""Spans of a record across slab borders, and records packed into one slab."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slab_pool import Span, pack_slab, record_spans


@settings(deadline=None)
@given(st.integers(0, 40_000), st.integers(0, 40_000), st.integers(1, 5000))
def test_spans_cover_the_range_once_in_order_and_cross_no_border(begin, length, slab_bytes):
    spans = record_spans(begin, begin + length, slab_bytes)
    covered = [(s.record_begin, s.record_begin + s.num_bytes) for s in spans]
    position = begin
    for (span_begin, span_end), span in zip(covered, spans, strict=True):
        assert span_begin == position < span_end
        position = span_end
        assert span.slab_index * slab_bytes + span.slab_begin == span.record_begin
        assert span.slab_begin >= 0
        assert span.slab_begin + span.num_bytes <= slab_bytes
    assert position == begin + length
    assert len(spans) <= length // slab_bytes + 2


def test_a_range_across_two_borders():
    assert record_spans(90, 230, 100) == (Span(0, 90, 90, 10), Span(1, 0, 100, 100), Span(2, 0, 200, 30))
    assert record_spans(232, 250, 100) == (Span(2, 32, 232, 18),)


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (4, 3)])
def test_a_range_that_does_not_rise_is_refused(begin, end):
    with pytest.raises(ValueError, match="must rise from 0"):
        record_spans(begin, end, 10)


def test_a_slab_holds_each_arena_s_record_from_a_page_border():
    assert pack_slab({"main": 5000, "backend": 4096, "third": 1}) == (
        {"main": 0, "backend": 8192, "third": 12288},
        16384,
    )


@pytest.mark.parametrize("records", [{}, {"main": 0}])
def test_an_empty_slab_is_refused(records):
    with pytest.raises(ValueError, match="pack_slab"):
        pack_slab(records)
