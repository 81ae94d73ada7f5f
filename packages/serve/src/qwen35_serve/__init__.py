"""The HTTP server of the hybrid prefix cache: OpenAI's protocol, text, no tensors."""

from .app import create_app
from .cli import main
from .errors import ServeError
from .text import ChatPrompt, ChatText

__all__ = ["ChatPrompt", "ChatText", "ServeError", "create_app", "main"]
