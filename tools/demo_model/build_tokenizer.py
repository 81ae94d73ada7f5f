"""Build the demo model's tokenizer: byte-level BPE, with the words of the demo's world as one token each.

    python tools/demo_model/build_tokenizer.py

Writes ``tokenizer.json`` beside the demo's chat template. Any text encodes, byte by byte where need be; what the demo
was trained to talk about encodes compactly. Seeded: running it again writes the same file.

Two rules differ from Qwen3.5's splitting rule, for the sake of a very small model. Numbers are cut into groups of
two digits, so that 0 to 99 are one token. A space is never joined with a capital letter behind it, so that a name is
the same token at the start of a line and inside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from dialogues import TOOLS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from words import ATTRIBUTES, CODE_WORDS, COUNTED, FILLER_WORDS, FILLERS, NAMES, NUMBERS

OUT = Path(__file__).parents[2] / "packages/engine/src/qwen35_engine/demo/checkpoint/tokenizer.json"

VOCAB_SIZE = 1280

# Control tokens end or structure a turn and are left out of text; the others are plain text with an id of their own.
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{N}{1,2}|\p{Lu}[\p{L}\p{M}]*|[^\r\n\p{L}\p{N}]?(?!\p{Lu})[\p{L}\p{M}]+"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEMPLATE_TEXT = (
    "system\nuser\nassistant\n# Tools\n\nThese functions can be called:\n\n<tools>\n</tools>\n\nA call is written like"
    " this, with nothing after it:\n\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n"
)

TOOL_TEXT = (
    '{"type": "function", "function": {"name": "open_locker", "description": "Open a locker.",'
    ' "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}}}'
)
PHRASES = (
    "Noted. Together. Correction: Now Tell What Which How Open Look The You",
    "How many has have and which does? I was not told. I keep it in mind. I need the tool.",
    "The locker is open. The locker is stuck. The locker is empty. What is the code word?",
    "You answer briefly. The code word is. How old is? Look up the age of. Open the locker of. Tell me the.",
)


def corpus() -> Iterator[str]:
    """Every word often enough to become one token, and the texts around them."""
    values = {value for values in ATTRIBUTES.values() for value in values}
    spaced = {*values, *NUMBERS, *ATTRIBUTES, *COUNTED, *CODE_WORDS, *(w for ws in FILLER_WORDS.values() for w in ws)}
    for _ in range(50):
        yield from sorted(NAMES)
        yield from NUMBERS
        for word in sorted(spaced):
            yield f" {word}"
        yield from (TEMPLATE_TEXT, *PHRASES)
        yield from (json.dumps(TOOLS[0]), TOOL_TEXT)
        yield from FILLERS


def build() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS) - len(TEXT_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=40,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TEXT_TOKENS])
    return tokenizer


def main() -> None:
    tokenizer = build()
    OUT.write_text(
        json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n",
        encoding="utf-8",
    )
    print(f"{OUT}: {tokenizer.get_vocab_size()} tokens, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
