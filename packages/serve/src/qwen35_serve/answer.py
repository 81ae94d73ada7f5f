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
    """A piece of what stands before the answer."""

    text: str


@dataclass(frozen=True)
class Content:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True)
class CalledTool:
    """A complete call; ``arguments`` is JSON text, as OpenAI's protocol has it."""

    name: str
    arguments: str


Delta = Thinking | Content | CalledTool


class AnswerParser:
    """Splits the text of one answer. Feed it pieces; it holds back what may be the beginning of a tag.

    Tags are recognised only where the model may write them: the end of thinking while the prompt left a thinking block
    open, tool calls while the request has tools. A call that cannot be read is passed on as content, word for word.
    Each character is searched once, but for the few that may begin a tag: the work is linear in the answer's length.
    """

    def __init__(self, *, thinking: bool, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """``thinking``: the prompt left a thinking block open. ``tools``: as OpenAI's."""
        self._thinking = thinking
        self._tools = {_name(tool): _parameters(tool) for tool in tools or ()}
        self._held = ""  # may be the beginning of a tag
        self._call: list[str] | None = None  # the pieces of a call that has begun
        self._space: list[str] = []  # held back: answer if more text follows, layout if a call does
        self._blank = True  # nothing of the answer since its beginning or the last call

    def feed(self, text: str) -> list[Delta]:
        """What is certain now that ``text`` follows."""
        return list(self._split(text))

    def finish(self) -> list[Delta]:
        """What was held back, once nothing more can come. A call without its end is content."""
        text, self._held = self._held, ""
        if self._call is not None:
            text = "".join((_BEGIN_CALL, *self._call, text))
            self._call = None
        deltas = list(self._plain(text))
        space = "".join(self._space)
        return [*deltas, Content(space)] if space else deltas

    def _split(self, text: str) -> Iterator[Delta]:
        text = self._held + text
        start = 0
        while (tag := self._awaited_tag()) and (at := _find(text, tag, start)) >= 0:
            before, start = text[start:at], at + len(tag)
            if self._call is not None:
                yield from self._end_call("".join((*self._call, before)))
            else:
                yield from self._plain(before)
                self._thinking, self._call = False, [] if tag == _BEGIN_CALL else None
        text = text[start:]
        split = len(text) - (possible_beginning(text, (tag,)) if tag else 0)
        text, self._held = text[:split], text[split:]
        if self._call is not None:
            self._call.append(text)
        else:
            yield from self._plain(text)

    def _awaited_tag(self) -> str | None:
        if self._thinking:
            return _END_OF_THINKING
        if self._call is not None:
            return _END_CALL
        return _BEGIN_CALL if self._tools else None

    def _end_call(self, text: str) -> Iterator[Delta]:
        self._call = None
        called = self._read_call(text)
        if called is None:
            yield from self._plain(f"{_BEGIN_CALL}{text}{_END_CALL}")
        else:
            self._space, self._blank = [], True
            yield called

    def _plain(self, text: str) -> Iterator[Delta]:
        """Pass text on. White space at the beginning of the answer and around calls is layout, so it waits for more."""
        if self._thinking:
            if text:
                yield Thinking(text)
            return
        if self._blank:
            text = text.lstrip()
        shown = text.rstrip() if self._tools else text
        if not shown:
            self._space.append(text)
            return
        yield Content("".join((*self._space, shown)))
        self._space, self._blank = [text[len(shown) :]], False

    def _read_call(self, text: str) -> CalledTool | None:
        call = _CALL.fullmatch(text)
        if call is None:
            return None
        name, body = call.groups()
        kinds = self._tools.get(name, {})
        arguments: dict[str, Any] = {}
        end, length = 0, len(body.rstrip())
        while end < length:
            parameter = _PARAMETER.match(body, end)
            if parameter is None:
                return None
            key, value = parameter.groups()
            arguments[key] = _typed(value, kinds.get(key))
            end = parameter.end()
        return CalledTool(name, json.dumps(arguments, ensure_ascii=False))


def _find(text: str, tag: str, start: int) -> int:
    return text.find(tag, start)


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
