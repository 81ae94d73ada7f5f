"""Record layouts: parts are byte ranges, also across slab borders."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slab_pool import Part, RecordLayout, Span, pack_slab, record_spans


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


def test_a_part_across_two_borders():
    layout = RecordLayout(record_bytes=250, parts=[("head", 0, 90), ("layer 0", 90, 230), ("hidden", 232, 250)])
    assert layout.spans("layer 0", 100) == (Span(0, 90, 90, 10), Span(1, 0, 100, 100), Span(2, 0, 200, 30))
    assert layout.spans("hidden", 100) == (Span(2, 32, 232, 18),)
    assert layout.num_slabs(100) == 3
    assert layout.num_slabs(250) == 1
    assert layout.part("head") == Part("head", 0, 90)
    assert layout.parts[1].name == "layer 0"


def test_an_unknown_part_is_a_key_error():
    with pytest.raises(KeyError, match="tail"):
        RecordLayout(record_bytes=10, parts=[("all", 0, 10)]).part("tail")


@pytest.mark.parametrize(
    ("record_bytes", "parts", "message"),
    [
        (0, [], "record_bytes must be at least 1, got 0"),
        (10, [("a", 0, 5), ("a", 5, 10)], "part names must differ"),
        (10, [("a", 0, 5), ("b", 4, 10)], "apart and inside 10 bytes"),
        (10, [("a", 0, 11)], "apart and inside 10 bytes"),
        (10, [("a", 3, 3)], "non-empty"),
        (10, [("a", -1, 3)], "apart and inside"),
    ],
)
def test_bad_layouts_are_named(record_bytes, parts, message):
    with pytest.raises(ValueError, match=message):
        RecordLayout(record_bytes=record_bytes, parts=parts)


def test_parts_may_come_in_any_order():
    layout = RecordLayout(record_bytes=10, parts=[("b", 5, 10), ("a", 0, 5)])
    assert [part.name for part in layout.parts] == ["b", "a"]


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
