"""``POST /v1/chat/completions``: from a checked request to an answer, whole or streamed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from qwen35_engine import (
    Engine,
    EngineError,
    Failed,
    Finished,
    GenerationRequest,
    NewTokens,
    SamplingParams,
    Started,
    TapHints,
    TokenStream,
    Usage,
)

from .answer import AnswerParser, CalledTool, Content, Delta, Thinking
from .errors import ModelNotFound, ServeError, Unavailable, from_engine
from .schema import ChatRequest, parse_chat_request
from .text import ChatPrompt, ChatText, StopStrings

__all__ = ["ChatService"]


@dataclass(frozen=True)
class _End:
    """How an answer ended: OpenAI's finish reason and what it cost."""

    reason: str
    usage: Usage


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

        Raises:
            ServeError: before the answer has begun.
        """
        # Reading and rendering a long conversation takes milliseconds that other streams should not wait for.
        request, prompt = await asyncio.to_thread(self._prepare, body)
        answer = _Answer(self._engine, self._text, request, prompt)
        await answer.start()
        if request.stream:
            return StreamingResponse(self._stream(request, answer), media_type="text/event-stream")
        return await self._whole(http, answer)

    def _prepare(self, body: bytes) -> tuple[ChatRequest, ChatPrompt]:
        request = parse_chat_request(body)
        if request.model != self._model_name:
            raise ModelNotFound(
                f"model: this server serves {self._model_name!r}", param="model", code="model_not_found"
            )
        prompt = self._text.render(
            request.template_messages(),
            tools=request.template_tools(),
            template_arguments=request.template_arguments(),
        )
        return request, prompt

    async def _whole(self, http: Request, answer: _Answer) -> Response:
        """Collect the answer; give up when the client goes away."""
        message = _Message()

        async def collect() -> _End:
            async for item in answer:
                if isinstance(item, _End):
                    return item
                message.add(item)
            raise AssertionError("an answer ends with its end")

        collecting = asyncio.create_task(collect())
        leaving = asyncio.create_task(_disconnected(http))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=499)
            end = collecting.result()
        finally:
            answer.cancel()
            for task in (collecting, leaving):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ServeError):
                    await task
        choice = {"index": 0, "message": message.body(), "logprobs": None, "finish_reason": end.reason}
        return JSONResponse(self._head("chat.completion") | {"choices": [choice], "usage": _usage_body(end.usage)})

    async def _stream(self, request: ChatRequest, answer: _Answer) -> AsyncIterator[str]:
        """The answer as server-sent events. Closing the generator (the client left) cancels the request."""
        head = self._head("chat.completion.chunk")
        if request.include_usage:
            head["usage"] = None

        def event(delta: dict[str, Any], reason: str | None = None) -> str:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            return _sse(head | {"choices": [choice]})

        calls = 0
        try:
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
                    case _End():
                        yield event({}, item.reason)
                        if request.include_usage:
                            yield _sse(head | {"choices": [], "usage": _usage_body(item.usage)})
        except ServeError as error:
            # The status line is long gone; the client learns it from the stream.
            yield _sse(error.body())
        finally:
            answer.cancel()
        yield "data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model_name,
        }


class _Answer:
    """One request in the engine, as deltas of its answer. Iterate once; ends with an ``_End`` or raises ServeError."""

    def __init__(self, engine: Engine, text: ChatText, request: ChatRequest, prompt: ChatPrompt) -> None:
        self._engine = engine
        self._decoder = text.decoder()
        self._stops = StopStrings(request.stop or ())
        self._parser = AnswerParser(thinking=prompt.thinking, tools=request.template_tools())
        self._called = False
        self._wake = asyncio.Event()
        self._stream: TokenStream | None = None
        self._request = _generation(request, prompt, engine)

    async def start(self) -> None:
        """Queue the request.

        Raises:
            ServeError: the engine refuses it.
        """
        loop = asyncio.get_running_loop()

        def notify() -> None:
            # The loop may be gone while the worker still ends its streams.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake.set)

        try:
            self._stream = await asyncio.to_thread(self._engine.submit, self._request, notify=notify)
        except EngineError as error:
            raise from_engine(error) from error

    def cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()

    async def __aiter__(self) -> AsyncIterator[Delta | _End]:
        assert self._stream is not None
        while True:
            await self._wake.wait()
            self._wake.clear()
            for event in self._stream.take():
                match event:
                    case Started():
                        pass
                    case NewTokens(ids):
                        for delta in self._deltas(self._decoder.feed(ids)):
                            yield delta
                        if self._stops.stopped:
                            # What the engine drew meanwhile is not shown; its last event still tells the cost.
                            self.cancel()
                    case Failed(error):
                        raise from_engine(error)
                    case Finished(reason, usage):
                        for delta in (*self._deltas(self._decoder.finish()), *self._rest()):
                            yield delta
                        yield _End(self._finish_reason(reason), usage)
                        return

    def _deltas(self, text: str) -> Sequence[Delta]:
        return self._noted(self._parser.feed(self._stops.feed(text)))

    def _rest(self) -> Sequence[Delta]:
        return self._noted([*self._parser.feed(self._stops.finish()), *self._parser.finish()])

    def _noted(self, deltas: list[Delta]) -> list[Delta]:
        self._called = self._called or any(isinstance(delta, CalledTool) for delta in deltas)
        return deltas

    def _finish_reason(self, reason: str) -> str:
        if self._stops.stopped:
            return "stop"
        if reason == "stop" and self._called:
            return "tool_calls"
        if reason == "cancelled":
            raise Unavailable("the request was cancelled", code="cancelled")
        return reason


def _generation(request: ChatRequest, prompt: ChatPrompt, engine: Engine) -> GenerationRequest:
    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    return GenerationRequest(
        tokens=prompt.tokens,
        sampling=SamplingParams(
            temperature=given(request.temperature, 1.0),
            top_k=given(request.top_k, 0),
            top_p=given(request.top_p, 1.0),
            min_p=given(request.min_p, 0.0),
            seed=request.seed,
        ),
        max_tokens=request.output_limit,
        stop_token_ids=engine.config.eos_token_ids,
        hints=TapHints(opener=prompt.opener),
    )


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _call_body(call: CalledTool) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _sse(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
