"""Taking an answer apart, whatever the pieces it comes in."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_serve import answer
from qwen35_serve.answer import AnswerParser, CalledTool, Content, Delta, Thinking

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {"properties": {"name": {"type": "string"}, "limit": {"type": "integer"}}},
        },
    }
]
CALL = (
    "<tool_call>\n<function=look_up>\n<parameter=name>\n12\n</parameter>\n"
    "<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>"
)


def parse(text: str, cuts: list[int] | None = None, *, thinking: bool = False, tools: bool = False) -> list[Delta]:
    """Parse ``text`` cut at the given places; neighbouring texts of one kind are joined."""
    parser = AnswerParser(thinking=thinking, tools=TOOLS if tools else None)
    places = [0, *sorted(cuts or []), len(text)]
    deltas = [delta for a, b in pairwise(places) for delta in parser.feed(text[a:b])]
    joined: list[Delta] = []
    for delta in [*deltas, *parser.finish()]:
        last = joined[-1] if joined else None
        if isinstance(delta, Content | Thinking) and type(last) is type(delta):
            joined[-1] = type(delta)(last.text + delta.text)  # type: ignore[union-attr]
        else:
            joined.append(delta)
    return joined


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("Hello", False, [Content("Hello")]),
        ("let me see\n</think>\n\nHello", True, [Thinking("let me see\n"), Content("Hello")]),
        ("never done", True, [Thinking("never done")]),
        ("</think>Hello", True, [Content("Hello")]),
        ("a </think> b", False, [Content("a </think> b")]),
        ("x</think>\n\nthe tag </think> again", True, [Thinking("x"), Content("the tag </think> again")]),
        ("", False, []),
        ("x</thin", True, [Thinking("x</thin")]),
    ],
)
def test_thinking_and_answer(text: str, thinking: bool, expected: list[Delta]) -> None:
    for cut in range(len(text) + 1):
        assert parse(text, [cut], thinking=thinking) == expected


def test_a_call_with_typed_arguments() -> None:
    expected = CalledTool("look_up", json.dumps({"name": "12", "limit": 3}))
    assert parse(CALL, tools=True) == [expected]
    assert parse(f"Wait.\n\n{CALL}\n{CALL}", tools=True) == [Content("Wait."), expected, expected]


@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "[1e999]", '{"a": NaN}', '"\\ud800"', '{"\\ud800": 1}', "[" * 100_000, "9" * 5000]
)
def test_what_is_not_standard_json_stays_text(value: str) -> None:
    call = f"<tool_call>\n<function=look_up>\n<parameter=any>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (called,) = parse(call, tools=True)
    assert called == CalledTool("look_up", json.dumps({"any": value}))


def test_json_with_escapes_is_read() -> None:
    call = '<tool_call><function=look_up><parameter=any>["\\ud83d\\ude00", 1e3]</parameter></function></tool_call>'
    assert parse(call, tools=True) == [CalledTool("look_up", '{"any": ["😀", 1000.0]}')]


def test_without_tools_the_tags_are_text() -> None:
    assert parse(CALL) == [Content(CALL)]


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\nnothing like it\n</tool_call>",
        "<tool_call>\n<function=look_up>\n<parameter=name>\nAna\n</function>\n</tool_call>",
        "<tool_call>\n<function=look_up>\n<parameter=name>",
    ],
)
def test_a_call_that_cannot_be_read_is_passed_on_word_for_word(broken: str) -> None:
    assert parse(f"a {broken}", tools=True) == [Content(f"a {broken}")]


def work(monkeypatch: pytest.MonkeyPatch, text: str, *, thinking: bool = False) -> int:
    """Characters that are searched while ``text`` comes in pieces of four."""
    searched = 0

    def find(text: str, tag: str, start: int) -> int:
        nonlocal searched
        searched += len(text) - start
        return text.find(tag, start)

    monkeypatch.setattr(answer, "_find", find)
    parser = AnswerParser(thinking=thinking, tools=TOOLS)
    deltas = [delta for at in range(0, len(text), 4) for delta in parser.feed(text[at : at + 4])]
    deltas += parser.finish()
    assert sum(isinstance(delta, CalledTool) for delta in deltas) == text.count("</tool_call>")
    return searched


@pytest.mark.parametrize(
    "grown",
    [
        lambda length: CALL.replace("12", "x" * length),
        lambda length: CALL.replace("12", "<" * length),
        lambda length: CALL.replace("12", "</tool_cal" * (length // 10)),
        lambda length: CALL * (length // len(CALL)),
        lambda length: "x" + "\n" * length + CALL,
        lambda length: "x" * length,
    ],
    ids=["a long argument", "angle brackets", "beginnings of the end", "many calls", "white space", "no call"],
)
def test_the_work_on_an_answer_is_linear_in_its_length(
    monkeypatch: pytest.MonkeyPatch, grown: Callable[[int], str]
) -> None:
    short, long = work(monkeypatch, grown(100_000)), work(monkeypatch, grown(400_000))
    assert long <= 4.1 * short
    assert long <= 5 * 400_000
    assert work(monkeypatch, "x" * 400_000, thinking=True) <= 5 * 400_000


@given(st.integers(0, 2**32))
def test_pieces_do_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    parts = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "text", "\n", " ", "<", "</", "<tool"]
    text = "".join(rng.choices(parts, k=rng.randint(0, 8)))
    cuts = [rng.randint(0, len(text)) for _ in range(rng.randint(0, 12))]
    thinking, tools = rng.random() < 0.5, rng.random() < 0.5
    whole = parse(text, thinking=thinking, tools=tools)
    assert parse(text, cuts, thinking=thinking, tools=tools) == whole
