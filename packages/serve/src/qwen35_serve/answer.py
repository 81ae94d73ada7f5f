"""What a model writes, taken apart as it comes: thinking, answer, tool calls (the format of Qwen3.5's template)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .text import possible_beginning

__all__ = ["AnswerParser", "CalledTool", "Content", "Delta", "Thinking"]

_END_OF_THINKING = "</think>"
_BEGIN_CALL = "<tool_call>"
_END_CALL = "</tool_call>"

_CALL = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


@dataclass(frozen=True)
class Thinking:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CalledTool:
    """``arguments`` is JSON text, as OpenAI's protocol has it."""

    name: str
    arguments: str


Delta = Thinking | Content | CalledTool


class AnswerParser:
    """Splits the text of one answer. Feed it pieces; it holds back what may be the beginning of a tag.

    Tags are recognised only where the model may write them: the end of thinking while the prompt left a thinking block
    open, tool calls while the request has tools. A call that cannot be read is passed on as content, word for word.
    """

    def __init__(self, *, thinking: bool, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._thinking = thinking
        self._tools = {_name(tool): _parameters(tool) for tool in tools or ()}
        self._in_call = False
        self._text = ""
        self._space = ""  # held back: answer if more text follows, layout if a call does
        self._blank = True  # nothing of the answer since its beginning or the last call

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        return list(self._split())

    def finish(self) -> list[Delta]:
        """What was held back, once nothing more can come. A call without its end is content."""
        deltas = list(self._split())
        if self._in_call:
            self._text, self._in_call = _BEGIN_CALL + self._text, False
        deltas += self._plain(self._take(len(self._text)))
        return [*deltas, Content(self._space)] if self._space else deltas

    def _split(self) -> Iterator[Delta]:
        while True:
            if self._thinking:
                marker = _END_OF_THINKING
            elif self._in_call:
                marker = _END_CALL
            elif self._tools:
                marker = _BEGIN_CALL
            else:
                yield from self._plain(self._take(len(self._text)))
                return
            at = self._text.find(marker)
            if at < 0:
                if not self._in_call:
                    yield from self._plain(self._take(len(self._text) - possible_beginning(self._text, (marker,))))
                return
            before = self._take(at)
            self._take(len(marker))
            if marker == _END_CALL:
                self._in_call = False
                call = self._read_call(before)
                if call is None:
                    yield from self._plain(f"{_BEGIN_CALL}{before}{_END_CALL}")
                else:
                    self._space, self._blank = "", True
                    yield call
            else:
                yield from self._plain(before)
                self._thinking, self._in_call = False, marker == _BEGIN_CALL

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def _plain(self, text: str) -> Iterator[Delta]:
        """Pass text on. White space at the beginning of the answer and around calls is layout, so it waits for more."""
        if self._thinking:
            if text:
                yield Thinking(text)
            return
        text = self._space + text
        if self._blank:
            text = text.lstrip()
        shown = text.rstrip() if self._tools else text
        self._space = text[len(shown) :]
        if shown:
            self._blank = False
            yield Content(shown)

    def _read_call(self, text: str) -> CalledTool | None:
        call = _CALL.fullmatch(text)
        if call is None:
            return None
        name, body = call.groups()
        kinds = self._tools.get(name, {})
        arguments: dict[str, Any] = {}
        end = 0
        while end < len(body.rstrip()):
            parameter = _PARAMETER.match(body, end)
            if parameter is None:
                return None
            key, value = parameter.groups()
            arguments[key] = _typed(value, kinds.get(key))
            end = parameter.end()
        return CalledTool(name, json.dumps(arguments, ensure_ascii=False))


def _typed(value: str, schema: object) -> Any:
    """A parameter's value: text where the tool's schema says so, else JSON where it is JSON that a client can read."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    try:
        read = json.loads(value)
        # Python reads more than JSON has, such as NaN, and escapes that are no characters.
        json.dumps(read, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return value
    return read


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def _name(tool: Mapping[str, Any]) -> str:
    return str(_function(tool).get("name", ""))


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = _function(tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}
