"""Between text and token ids: the chat template, the tokenizer, decoding as tokens come, stop strings."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from qwen35_engine import TapHints

from .errors import InvalidRequest, ModelFolderError

__all__ = ["ChatPrompt", "ChatText", "StopStrings", "TokenDecoder", "possible_beginning"]

# What a template raises for messages it cannot render.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
        tokens: what the model continues.
        hints: where later prompts may continue differently.
        thinking: whether the opener leaves a thinking block open.
    """

    tokens: tuple[int, ...]
    hints: TapHints
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
        vocabulary = self._tokenizer.get_vocab()
        largest = max(vocabulary.values())
        if largest >= vocab_size:
            raise ModelFolderError(
                f"{folder / 'tokenizer.json'}: token ids must be below vocab_size {vocab_size}, got {largest}"
            )
        self._pieces = _token_bytes(self._tokenizer, folder)
        self._start, self._end = (vocabulary.get(mark) for mark in ("<|im_start|>", "<|im_end|>"))
        self._preamble = tuple(self.encode("<|im_start|>system"))

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
        try:
            text = self._apply(messages, tools, template_arguments)
            text.encode()  # half a surrogate pair is no text, though JSON can say it
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {_one_line(error)}", param="messages"
            ) from error
        tokens = tuple(self.encode(text))
        hints = self.hints(tokens)
        if tools and hints.structural and messages[0].get("role") in ("system", "developer"):
            with contextlib.suppress(*_TEMPLATE_ERRORS):  # a template may refuse an empty text there
                silent = self._apply([{**messages[0], "content": ""}, *messages[1:]], tools, template_arguments)
                before_text = self.encode(text[: _common_length(text, silent)])
                end_of_tools = _common_length(tokens, tuple(before_text))
                if 0 < end_of_tools < hints.structural[0]:
                    hints = replace(hints, structural=(end_of_tools, *hints.structural))
        return ChatPrompt(tokens, hints, thinking=text.rstrip().endswith("<think>"))

    def hints(self, tokens: Sequence[int]) -> TapHints:
        """What a prompt's control tokens tell of its structure, whether it was rendered here or by the client: where
        messages begin, where a system message in front ends, where an answer is opened."""
        if self._start is None or self._end is None:
            return TapHints()
        starts = []
        at = -1
        with contextlib.suppress(ValueError):
            while True:
                at = tokens.index(self._start, at + 1)
                starts.append(at)
        boundaries = tuple(place for place in starts if place)
        opened = bool(boundaries) and self._end not in tokens[boundaries[-1] :]
        has_preamble = tuple(tokens[: len(self._preamble)]) == self._preamble
        return TapHints(
            opener=boundaries[-1] if opened else None,
            structural=boundaries[:1] if has_preamble else (),
            message_boundaries=boundaries,
        )

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=True, tokenize=False, **arguments
        )
        return text

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


def _common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences of one kind have in common in front."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class TokenDecoder:
    """Turns ids into text as they come; holds back the bytes of a character that is not complete.

    Control tokens are left out. Bytes that cannot become a character give U+FFFD.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is complete with these tokens."""
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
