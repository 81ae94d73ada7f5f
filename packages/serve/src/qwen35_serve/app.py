"""The HTTP application: routes, body limits, errors in OpenAI's shape."""

from __future__ import annotations

import logging
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qwen35_engine import Engine, EngineError, RequestLog

from .cache_page import cache_page
from .chat import ChatService
from .completions import CompletionService
from .errors import BodyTooLarge, InvalidRequest, ServeError, Unavailable, from_engine, require_model
from .text import ChatText

__all__ = ["create_app"]

logger = logging.getLogger(__name__)

# A prompt of a few million tokens; anything larger is a mistake or an attack.
_MAX_BODY_BYTES = 64 * 2**20


def create_app(
    engine: Engine, text: ChatText, *, model_name: str, created: int, request_log: RequestLog | None = None
) -> Starlette:
    """The application over a running engine.

    Args:
        engine: answers; the caller closes it.
        text: tokenizer and template of the engine's model.
        model_name: the name clients use.
        created: start of the server, seconds since the epoch.
        request_log: the engine's listener, if it is one; the caller closes it.
    """
    chat = ChatService(engine, text, model_name=model_name)
    completion = CompletionService(engine, text, model_name=model_name)
    card = {"id": model_name, "object": "model", "created": created, "owned_by": "qwen35-serve"}

    async def body_of(request: Request) -> bytes:
        body = await _read_body(request)
        # Before any work on the prompt. The body is read first: a client that is still sending reads no answer.
        try:
            engine.require_room()
        except EngineError as error:
            raise from_engine(error, prompt=None) from error
        return body

    async def chat_completions(request: Request) -> Response:
        return await chat.respond(request, await body_of(request))

    async def completions(request: Request) -> Response:
        return await completion.respond(request, await body_of(request))

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def model(request: Request) -> Response:
        require_model(request.path_params["name"], served=model_name)
        return JSONResponse(card)

    async def health(request: Request) -> Response:
        if not engine.is_open:
            raise Unavailable("the engine is closed", code="engine_closed")
        return JSONResponse({"status": "ok"})

    async def cache(request: Request) -> Response:
        return JSONResponse(cache_page(engine, request_log))

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", model, methods=["GET"]),
            Route("/v1/cache", cache, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
        ],
        exception_handlers={
            ServeError: _serve_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _unexpected,
        },
    )


async def _read_body(request: Request) -> bytes:
    """The whole body, refused as soon as it is larger than the limit."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise BodyTooLarge(f"the request body must be at most {_MAX_BODY_BYTES} bytes", code="body_too_large")
    return bytes(body)


async def _serve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    return JSONResponse(error.body(), status_code=error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the shape clients can read."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    told = InvalidRequest(f"{request.method} {request.url.path}: {phrase}", code=phrase.lower().replace(" ", "_"))
    return JSONResponse(told.body(), status_code=error.status_code, headers=error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the record: the client has left


async def _unexpected(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed: %s", request.method, request.url.path, type(error).__name__)
    return JSONResponse(ServeError("internal error", code="internal_error").body(), status_code=500)
