"""Requests are checked where they are made; a stream hands on events in order and ends once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from qwen35_engine import (
    Failed,
    Finished,
    GenerationRequest,
    NewTokens,
    RequestError,
    SamplingParams,
    Started,
    TapHints,
    Timing,
    TokenStream,
    Usage,
)

END = Finished("stop", Usage(prompt_tokens=1, completion_tokens=1, timing=Timing(queued_seconds=0, total_seconds=1)))


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("temperature", -0.1, "temperature must be between 0 and 100, got -0.1"),
        ("temperature", float("nan"), "temperature must be between 0 and 100, got nan"),
        ("top_k", -1, "top_k must be between 0 and 2147483647, got -1"),
        ("top_p", 0, "top_p must be above 0 and at most 1, got 0"),
        ("top_p", 1.5, "top_p must be above 0 and at most 1, got 1.5"),
        ("min_p", 2, "min_p must be between 0 and 1, got 2"),
        ("seed", 2**63, "seed must be a signed 64-bit integer, got"),
    ],
)
def test_sampling_out_of_range(field: str, value: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokens": ()}, "a prompt must have at least one token, got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"hints": TapHints(explicit=(4,))}, "a hint's position must lie inside the prompt, got 4"),
        ({"hints": TapHints(opener=0)}, "a hint's position must lie inside the prompt, got 0"),
        ({"hints": TapHints(message_boundaries=(2, 9))}, "a hint's position must lie inside the prompt, got 9"),
    ],
)
def test_requests_out_of_range(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        GenerationRequest(**({"tokens": (1, 2, 3)} | changes))


def test_events_come_in_order_and_nothing_after_the_last() -> None:
    stream = TokenStream(1, lambda *_: None, None)
    events = [Started(0), NewTokens((4,)), NewTokens((5,)), END]
    for event in events:
        stream.put(event)
    stream.put(NewTokens((6,)))
    stream.put(Failed(RequestError("late"), END.usage))
    assert list(stream) == events
    assert stream.take() == []


def test_a_stream_that_has_been_read_to_its_end_is_empty() -> None:
    for read in (list, TokenStream.take):
        stream = TokenStream(1, lambda *_: None, None)
        stream.put(END)
        assert read(stream) == [END]
        again: list[Any] = []
        reader = threading.Thread(target=lambda stream=stream, again=again: again.append(list(stream)), daemon=True)
        reader.start()
        reader.join(timeout=10)
        assert again == [[]]


def test_a_reader_waits_for_a_writer_on_another_thread() -> None:
    stream = TokenStream(1, lambda *_: None, None)
    read: list[Any] = []
    reader = threading.Thread(target=lambda: read.extend(stream))
    reader.start()
    stream.put(Started(3))
    stream.put(END)
    reader.join(timeout=10)
    assert read == [Started(3), END]


def test_take_never_waits_and_notify_tells_of_each_event() -> None:
    told: list[int] = []
    stream = TokenStream(1, lambda *_: None, lambda: told.append(1))
    assert stream.take() == []
    stream.put(Started(0))
    stream.put(NewTokens((1,)))
    assert stream.take() == [Started(0), NewTokens((1,))]
    assert len(told) == 2


def test_an_end_names_the_request_and_why() -> None:
    ended: list[tuple[int, str]] = []
    stream = TokenStream(17, lambda request_id, reason: ended.append((request_id, reason)), None)
    stream.stop()
    stream.cancel()
    assert ended == [(17, "stop"), (17, "cancelled")]
