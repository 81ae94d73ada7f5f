"""From a dialogue to token ids and the positions that are learnt.

Writes what the demo's chat template writes, piece by piece, because a template cannot say which of its characters are
the assistant's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from dialogues import Dialogue, Turn
from tokenizers import Tokenizer

__all__ = ["CHECKPOINT", "Encoder", "pieces"]

CHECKPOINT = Path(__file__).parents[2] / "packages/engine/src/qwen35_engine/demo/checkpoint"

NO_THOUGHT = "<think>\n\n</think>\n\n"


def pieces(dialogue: Dialogue, *, thinking: bool, openers: bool = False) -> Iterator[tuple[str, bool]]:
    """Texts of a dialogue in order, each with whether the assistant wrote it.

    The texts are cut where the tokenizer cuts as well: encoding them one by one is encoding the whole.

    Args:
        thinking: whether the last turn's answer (each answer, with ``openers``) thinks first.
        openers: keep the thinking block of every answer, not only of the last turn's as the template does. More of
            what is learnt then stands where answers are generated.
    """
    system = dialogue.system
    if dialogue.tools:
        listed = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in dialogue.tools)
        how = "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"
        system = (
            f"# Tools\n\nThese functions can be called:\n\n<tools>{listed}\n</tools>\n\n"
            f"A call is written like this, with nothing after it:\n\n{how}" + (f"\n\n{system}" if system else "")
        )
    if system:
        yield f"<|im_start|>system\n{system}<|im_end|>\n", False
    for turn in dialogue.turns:
        block = openers or turn is dialogue.turns[-1]
        yield f"<|im_start|>user\n{turn.user}<|im_end|>\n", False
        yield from _answer(turn, block=block, thinking=thinking)


def _answer(turn: Turn, *, block: bool, thinking: bool) -> Iterator[tuple[str, bool]]:
    opener = f"<|im_start|>assistant\n{('<think>' + chr(10) if thinking else NO_THOUGHT) if block else ''}"
    thought = f"{turn.thought}\n</think>\n\n" if block and thinking else ""
    answer = turn.brief if thought else turn.answer
    if turn.call is not None:
        arguments = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in turn.call.arguments.items())
        yield opener, False
        yield f"{thought}<tool_call>\n<function={turn.call.name}>\n{arguments}</function>\n</tool_call><|im_end|>", True
        yield f"\n<|im_start|>user\n<tool_response>\n{turn.call.result}\n</tool_response><|im_end|>\n", False
        thought = "I have the result.\n</think>\n\n" if thought else ""
    yield opener, False
    yield f"{thought}{answer}<|im_end|>", True
    yield "\n", False


class Encoder:
    """The demo's tokenizer, with a memory for the pieces that come again and again."""

    def __init__(self, path: Path = CHECKPOINT / "tokenizer.json") -> None:
        tokenizer = Tokenizer.from_file(str(path))
        self.encode = lru_cache(maxsize=100_000)(lambda text: tuple(tokenizer.encode(text).ids))
        self.decode = tokenizer.decode
        self.padding: int = tokenizer.token_to_id("<|endoftext|>")
        self.end_of_turn: int = tokenizer.token_to_id("<|im_end|>")

    def training(self, parts: Iterable[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        """Token ids of texts that stand one after the other, and for each id whether it is learnt."""
        ids: list[int] = []
        learnt: list[bool] = []
        for text, own in parts:
            encoded = self.encode(text)
            ids += encoded
            learnt += [own] * len(encoded)
        return ids, learnt
