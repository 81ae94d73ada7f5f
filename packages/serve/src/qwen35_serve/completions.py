"""``POST /v1/completions``: plain continuation of text or token ids, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from qwen35_engine import Engine, GenerationRequest

from .errors import require_model
from .generation import End, Generation, Piece, sampling_of
from .responses import head, respond, usage_body
from .schema import CompletionRequest, parse_completion_request
from .text import ChatText

__all__ = ["CompletionService"]


class CompletionService:
    """Answers completion requests with one engine."""

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
        # Milliseconds, for a long prompt, that other streams should not wait for.
        request, generation = await asyncio.to_thread(self._prepare, body)
        await generation.start()
        events = self._events(request, generation) if request.stream else None
        return await respond(http, generation, events=events, whole=lambda: self._whole(request, generation))

    def _prepare(self, body: bytes) -> tuple[CompletionRequest, Generation]:
        request = parse_completion_request(body)
        require_model(request.model, served=self._model_name)
        prompt = request.prompt
        tokens = self._text.encode(prompt) if isinstance(prompt, str) else prompt
        generation = Generation(
            self._engine,
            self._text.decoder(),
            GenerationRequest(
                tokens=tokens,
                sampling=sampling_of(request),
                max_tokens=request.max_tokens or _DEFAULT_MAX_TOKENS,
                stop_token_ids=frozenset() if request.ignore_eos else self._engine.config.eos_token_ids,
                logprobs=request.logprobs,
                hints=self._text.hints(tokens),
                reuse=request.reuse,
            ),
            prompt="prompt",
            stops=request.stop or (),
        )
        return request, generation

    async def _whole(self, request: CompletionRequest, generation: Generation) -> Response:
        pieces: list[Piece] = []
        async for item in generation:
            if isinstance(item, End):
                choice = self._choice(request, pieces, item.reason)
                body = {"choices": [choice], "usage": usage_body(item.usage)}
                return JSONResponse(head("cmpl", "text_completion", self._model_name) | body)
            pieces.append(item)
        raise AssertionError("a generation ends with its end")

    async def _events(self, request: CompletionRequest, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        first = head("cmpl", "text_completion", self._model_name)
        if request.include_usage:
            first["usage"] = None
        async for item in generation:
            if isinstance(item, End):
                yield first | {"choices": [self._choice(request, [], item.reason)]}
                if request.include_usage:
                    yield first | {"choices": [], "usage": usage_body(item.usage)}
            elif item.text or item.logprobs:
                yield first | {"choices": [self._choice(request, [item], None)]}

    def _choice(self, request: CompletionRequest, pieces: list[Piece], reason: str | None) -> dict[str, Any]:
        logprobs = None if request.logprobs is None else self._logprobs(pieces)
        text = "".join(piece.text for piece in pieces)
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any]:
        """OpenAI's lists. Tokens of equal text among the most likely keep the likeliest."""
        show = self._text.show
        tokens, drawn, top = [], [], []
        for piece in pieces:
            for token, entry in zip(piece.ids, piece.logprobs, strict=True):
                tokens.append(show(token))
                drawn.append(entry.drawn)
                top.append({show(i): value for i, value in reversed(entry.top)})
        return {"tokens": tokens, "token_logprobs": drawn, "top_logprobs": top}


# OpenAI's default for this route.
_DEFAULT_MAX_TOKENS = 16
