"""Text on one side, token ids on the other: the chat template, the tokenizer, decoding as tokens come, stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from .errors import InvalidRequest, ModelFolderError

__all__ = ["ChatPrompt", "ChatText", "StopStrings", "TokenDecoder", "possible_beginning"]


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
        tokens: what the model continues.
        opener: position of the generation opener, from which the next turn's rendering of the same conversation may
            differ; None where it cannot be told.
        thinking: whether the opener leaves a thinking block open.
    """

    tokens: tuple[int, ...]
    opener: int | None
    thinking: bool


class ChatText:
    """The tokenizer and the chat template of one model folder. Thread-safe."""

    def __init__(self, folder: Path, *, vocab_size: int) -> None:
        """Load them.

        Raises:
            ModelFolderError: a file is missing or broken, the template is missing, the tokenizer is not a byte-level
                one, or it knows ids that the model does not have.
        """
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever the loader raises means the same here
            raise ModelFolderError(f"{folder}: no usable tokenizer: {_one_line(error)}") from error
        if not self._tokenizer.chat_template:
            raise ModelFolderError(f"{folder}: no chat_template.jinja, and no chat_template in tokenizer_config.json")
        largest = max(self._tokenizer.get_vocab().values())
        if largest >= vocab_size:
            raise ModelFolderError(
                f"{folder / 'tokenizer.json'}: token ids must be below vocab_size {vocab_size}, got {largest}"
            )
        self._pieces = _token_bytes(self._tokenizer, folder)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any],
    ) -> ChatPrompt:
        """Render and tokenise a conversation, ending with the opener of the answer.

        Args:
            messages, tools: as OpenAI's, arguments of calls as objects.
            template_arguments: further variables of the template.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        arguments = dict(template_arguments)
        try:
            history, whole = (
                self._tokenizer.apply_chat_template(
                    list(messages), tools=tools, add_generation_prompt=opener, tokenize=False, **arguments
                )
                for opener in (False, True)
            )
            whole.encode()  # half a surrogate pair is no text, though JSON can say it
        except (TemplateError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {_one_line(error)}", param="messages"
            ) from error
        thinking = whole.rstrip().endswith("<think>")
        opener_text = whole[len(history) :]
        if whole.startswith(history) and opener_text.startswith("<|im_start|>"):
            # A control token always splits the text, so both parts can be tokenised on their own.
            before = self.encode(history)
            return ChatPrompt((*before, *self.encode(opener_text)), len(before) or None, thinking)
        return ChatPrompt(tuple(self.encode(whole)), None, thinking)

    def show(self, token: int) -> str:
        """One token as text, U+FFFD for bytes that are no character by themselves."""
        return TokenDecoder(self._pieces).feed([token]) or self._pieces[token].decode(errors="replace")

    def decoder(self) -> TokenDecoder:
        """A decoder for one answer."""
        return TokenDecoder(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Token ids of text as it is, without a template."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


class TokenDecoder:
    """Turns ids into text as they come; holds back the bytes of a character that is not complete.

    Control tokens are left out. Bytes that cannot become a character give U+FFFD.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(self._piece(i) for i in ids))

    def finish(self) -> str:
        """What is left at the end of the answer."""
        return self._utf8.decode(b"", final=True)

    def _piece(self, token: int) -> bytes:
        # A model's vocabulary may be padded beyond the tokenizer's.
        return self._pieces[token] if token < len(self._pieces) else b""


class StopStrings:
    """Passes text on until one of the stop strings appears; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The part of the text so far that may be shown; nothing after a stop string, nor the string itself."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        split = len(self._held) - possible_beginning(self._held, self._stops)
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def finish(self) -> str:
        """What was held back, once nothing more can come."""
        held, self._held = self._held, ""
        return "" if self.stopped else held


def possible_beginning(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is the beginning of a marker, but not yet the whole of it."""
    longest = max(len(marker) for marker in markers) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def _token_bytes(tokenizer: Any, folder: Path) -> list[bytes]:
    """The bytes of each token, by id; nothing for control tokens and for ids in between that no token has."""
    backend = tokenizer.backend_tokenizer
    if type(backend.decoder).__name__ != "ByteLevel":
        raise ModelFolderError(
            f"{folder / 'tokenizer.json'}: the decoder must be ByteLevel, got {type(backend.decoder).__name__}"
        )
    bytes_of = _byte_level_alphabet()
    added = backend.get_added_tokens_decoder()
    vocab = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocab.values()) + 1)
    for text, i in vocab.items():
        if i in added:
            pieces[i] = b"" if added[i].special else text.encode()
        else:
            pieces[i] = bytes(bytes_of[character] for character in text)
    return pieces


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level BPE vocabulary, as introduced with GPT-2."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
