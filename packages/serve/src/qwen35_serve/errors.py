"""The server's errors and their OpenAI shape.

::

    ServeError                 has an HTTP status and OpenAI's error fields
    ├── InvalidRequest         400, the client's mistake
    ├── ModelNotFound          404
    ├── BodyTooLarge           413
    ├── Overloaded             429
    ├── Unavailable            503
    └── AnswerFailed           500, the forward pass of this request failed
    ModelFolderError           the folder's text files cannot be served (start-up only)
    SettingsError              a flag, a file or an address that cannot be used (start-up only)
"""

from __future__ import annotations

from typing import Any

from qwen35_engine import (
    CheckpointError,
    ContextLengthExceeded,
    EngineClosed,
    EngineError,
    QueueFull,
    QueueTimeout,
    RequestError,
)

__all__ = [
    "AnswerFailed",
    "BodyTooLarge",
    "InvalidRequest",
    "ModelFolderError",
    "ModelNotFound",
    "Overloaded",
    "ServeError",
    "SettingsError",
    "Unavailable",
    "from_engine",
    "require_model",
]


class ModelFolderError(CheckpointError):
    """Tokenizer or template of a model folder cannot be used; one line that names the file."""


class SettingsError(Exception):
    """The server cannot start as it was asked to; one line."""


class ServeError(Exception):
    """An error that a client is told.

    Attributes:
        status: the HTTP status.
        kind: OpenAI's ``type`` of the error.
        message: what the client reads.
        param: the request's field at fault, if one is.
        code: a word a program can test for.
    """

    status = 500
    kind = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class InvalidRequest(ServeError):
    status = 400
    kind = "invalid_request_error"


class ModelNotFound(ServeError):
    status = 404
    kind = "invalid_request_error"


class BodyTooLarge(ServeError):
    status = 413
    kind = "invalid_request_error"


class Overloaded(ServeError):
    status = 429
    kind = "rate_limit_error"


class Unavailable(ServeError):
    status = 503


class AnswerFailed(ServeError):
    status = 500


def require_model(requested: str, *, served: str) -> None:
    """Refuse every name but the served model's.

    Raises:
        ModelNotFound: another one was asked for.
    """
    if requested != served:
        raise ModelNotFound(f"model: this server serves {served!r}", param="model", code="model_not_found")


def from_engine(error: EngineError, *, prompt: str | None) -> ServeError:
    """What a client is told of an error of the engine; ``prompt`` is the field that its prompt came in."""
    match error:
        case ContextLengthExceeded():
            return InvalidRequest(str(error), param=prompt, code="context_length_exceeded")
        case RequestError():
            return InvalidRequest(str(error), param=prompt)
        case QueueFull():
            return Overloaded(str(error), code="server_overloaded")
        case QueueTimeout():
            return Unavailable(str(error), code="request_queue_timeout")
        case EngineClosed():
            return Unavailable(str(error), code="engine_closed")
        case _:
            return AnswerFailed(str(error), code="answer_failed")
