"""The engine's errors.

::

    EngineError
    ├── CheckpointError      the model folder cannot be served; names the file and the tensor
    ├── OptionError          an option or a combination of options cannot hold (also a ValueError)
    ├── RequestError         this request can never be served as it is (also a ValueError)
    │   └── ContextLengthExceeded
    ├── QueueFull            the bounded queue has no room; try again later
    ├── QueueTimeout         the request waited longer than it may
    ├── EngineClosed         the engine is stopping or has stopped
    └── ExecutionError       admission or a forward pass failed; the request ended without an answer, or in the middle
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ContextLengthExceeded",
    "EngineClosed",
    "EngineError",
    "ExecutionError",
    "OptionError",
    "QueueFull",
    "QueueTimeout",
    "RequestError",
]


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class CheckpointError(EngineError):
    """A model folder that cannot be served. One line that names the file, and the tensor if there is one."""


class OptionError(EngineError, ValueError):
    """An option out of range, or options that contradict each other.

    Attributes:
        option: the option at fault, with whose name the message begins; None if no single one is.
        complaint: the message without that name.
    """

    def __init__(self, complaint: str, *, option: str | None = None) -> None:
        super().__init__(complaint if option is None else f"{option} {complaint}")
        self.option = option
        self.complaint = complaint


class RequestError(EngineError, ValueError):
    """A request that can never be served as it is."""


class ContextLengthExceeded(RequestError):
    """Prompt and output do not fit the context.

    Attributes:
        prompt_tokens: length of the prompt.
        limit_tokens: the longest sequence this engine serves.
    """

    def __init__(self, *, prompt_tokens: int, limit_tokens: int) -> None:
        super().__init__(
            f"a prompt must leave room for one token in a context of {limit_tokens} tokens, got {prompt_tokens}"
        )
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens


class QueueFull(EngineError):
    """The queue of waiting requests is at its bound."""


class QueueTimeout(EngineError):
    """The request waited for a place longer than ``pending_timeout_seconds``."""


class EngineClosed(EngineError):
    """The engine takes no more requests."""


class ExecutionError(EngineError):
    """Admission or a forward pass failed for this request, or the engine had to start afresh."""
