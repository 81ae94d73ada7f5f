"""``POST /v1/chat/completions``: from a checked request to an answer, whole or streamed."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from qwen35_engine import Engine, GenerationRequest

from .answer import AnswerParser, CalledTool, Content, Delta, Thinking
from .errors import InvalidRequest, require_model
from .generation import End, Generation, sampling_of
from .responses import head, respond, usage_body
from .schema import ChatRequest, parse_chat_request
from .text import ChatPrompt, ChatText

__all__ = ["ChatService"]


@dataclass
class _Message:
    """An answer that is being put together."""

    thinking: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[CalledTool] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        match delta:
            case Thinking(text):
                self.thinking.append(text)
            case Content(text):
                self.content.append(text)
            case CalledTool():
                self.calls.append(delta)

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if self.thinking:
            body["reasoning_content"] = "".join(self.thinking)
        if self.calls:
            body["content"] = body["content"] or None
            body["tool_calls"] = [_call_body(call) for call in self.calls]
        return body


class ChatService:
    """Answers chat requests with one engine."""

    def __init__(self, engine: Engine, text: ChatText, *, model_name: str) -> None:
        self._engine = engine
        self._text = text
        self._model_name = model_name

    async def respond(self, http: Request, body: bytes) -> Response:
        """Answer one request.

        Args:
            http: the client's request.
            body: its body.

        Raises:
            ServeError: the request is refused, or its whole answer failed.
        """
        # Reading and rendering a long conversation takes milliseconds that other streams should not wait for.
        request, answer = await asyncio.to_thread(self._prepare, body)
        await answer.generation.start()
        events = self._events(request, answer) if request.stream else None
        return await respond(http, answer.generation, events=events, whole=lambda: self._whole(answer))

    def _prepare(self, body: bytes) -> tuple[ChatRequest, _Answer]:
        try:
            request = parse_chat_request(body)
            require_model(request.model, served=self._model_name)
            prompt = self._text.render(
                request.template_messages(),
                tools=request.template_tools(),
                template_arguments=request.template_arguments(),
            )
        except RecursionError:
            # Reading, checking and rendering each go down into what a client nests: tools, arguments of calls.
            raise InvalidRequest("the request body is nested too deeply", code="invalid_json") from None
        return request, _Answer(self._engine, self._text, request, prompt)

    async def _whole(self, answer: _Answer) -> Response:
        message = _Message()
        async for item in answer:
            if isinstance(item, End):
                choice = {"index": 0, "message": message.body(), "logprobs": None, "finish_reason": item.reason}
                body = {"choices": [choice], "usage": usage_body(item.usage)}
                return JSONResponse(head("chatcmpl", "chat.completion", self._model_name) | body)
            message.add(item)
        raise AssertionError("an answer ends with its end")

    async def _events(self, request: ChatRequest, answer: _Answer) -> AsyncIterator[dict[str, Any]]:
        first = head("chatcmpl", "chat.completion.chunk", self._model_name)
        if request.include_usage:
            first["usage"] = None

        def event(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            return first | {"choices": [choice]}

        calls = 0
        yield event({"role": "assistant", "content": ""})
        async for item in answer:
            match item:
                case Thinking(text):
                    yield event({"reasoning_content": text})
                case Content(text):
                    yield event({"content": text})
                case CalledTool():
                    yield event({"tool_calls": [{"index": calls} | _call_body(item)]})
                    calls += 1
                case End():
                    yield event({}, item.reason)
                    if request.include_usage:
                        yield first | {"choices": [], "usage": usage_body(item.usage)}


class _Answer:
    """A generation as deltas of a chat answer. Iterate once, as a ``Generation``."""

    def __init__(self, engine: Engine, text: ChatText, request: ChatRequest, prompt: ChatPrompt) -> None:
        self.generation = Generation(
            engine,
            text.decoder(),
            GenerationRequest(
                tokens=prompt.tokens,
                sampling=sampling_of(request),
                max_tokens=request.output_limit,
                stop_token_ids=engine.config.eos_token_ids,
                hints=prompt.hints,
                reuse=request.reuse,
            ),
            prompt="messages",
            stops=request.stop or (),
        )
        self._one_call = request.parallel_tool_calls is False
        self._parser = AnswerParser(thinking=prompt.thinking, tools=request.template_tools())

    async def __aiter__(self) -> AsyncIterator[Delta | End]:
        called = complete = False
        async for item in self.generation:
            for delta in self._parser.finish() if isinstance(item, End) else self._parser.feed(item.text):
                if complete:  # drawn before the engine heard of it
                    break
                yield delta
                if isinstance(delta, CalledTool):
                    called, complete = True, self._one_call
                    if complete:
                        self.generation.stop()
            if isinstance(item, End):
                yield End("tool_calls" if called and (complete or item.reason == "stop") else item.reason, item.usage)


def _call_body(call: CalledTool) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
