"""What chat and completions answer with: the shapes they share, streams, and what happens when a client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from qwen35_engine import Usage

from .errors import ServeError
from .generation import Generation

__all__ = ["head", "respond", "usage_body"]


def head(prefix: str, kind: str, model_name: str) -> dict[str, Any]:
    """The fields every answer begins with; a stream repeats them in every event."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model_name,
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object, and beside its fields where the reused tokens were, why there were no more, and times."""
    reuse = asdict(usage.reuse) | {"taps_taken": usage.taps_taken, "taps_skipped": usage.taps_skipped}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "reuse": reuse,
        "timing": {name: None if value is None else round(value, 6) for name, value in asdict(usage.timing).items()},
    }


async def respond(
    http: Request,
    generation: Generation,
    *,
    events: AsyncIterator[dict[str, Any]] | None,
    whole: Callable[[], Awaitable[Response]],
) -> Response:
    """The response to a started generation. A client that leaves cancels it.

    Its ``x-request-id`` is the number under which the request log knows the request.

    Args:
        http: the client's request.
        generation: started, and cancelled once the response has ended in whatever way.
        events: what a stream says; None where the client wants no stream.
        whole: makes the response where there are no events.

    Raises:
        ServeError: the whole answer failed. A stream tells it in its last event.
    """
    response: Response
    if events is not None:
        response = _Stream(generation, events)
    else:
        response = await _unless_client_leaves(http, generation, whole)
    response.headers["x-request-id"] = str(generation.request_id)
    return response


class _Stream(StreamingResponse):
    """Server-sent events; cancels the generation also where the client leaves before the first of them."""

    def __init__(self, generation: Generation, events: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(_server_sent(events), media_type="text/event-stream")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()


async def _server_sent(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield _event(event)
    except ServeError as error:
        # The status line is long gone; the client learns it from the stream.
        yield _event(error.body())
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _unless_client_leaves(
    http: Request, generation: Generation, collect: Callable[[], Awaitable[Response]]
) -> Response:
    """The collected answer; when the client goes away before it is there, the request is cancelled."""
    collecting = asyncio.ensure_future(collect())
    leaving = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return collecting.result() if collecting.done() else Response(status_code=499)
    finally:
        generation.cancel()
        for task in (collecting, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ServeError):
                await task


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
