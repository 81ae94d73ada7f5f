"""Train the demo model's byte-level BPE tokenizer on text that this file makes up.

    python tools/demo_model/build_tokenizer.py

Writes ``tokenizer.json`` beside the demo's chat template. The splitting rule is Qwen3.5's, the special tokens are a
selection of Qwen's, the merges come from the sentences below. Seeded: running it again writes the same file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

OUT = Path(__file__).parents[2] / "packages/engine/src/qwen35_engine/demo/assets/tokenizer.json"

VOCAB_SIZE = 1536

# Control tokens end or structure a turn and are left out of text; the others are plain text with an id of their own.
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Qwen3.5's rule, as its tokenizer class in transformers states it.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

NAMES = (
    "Ana Ben Carla David Elena Felix Grace Hugo Ines Jonas Karin Leo Maria Nils Olga Pablo Quinn Rosa Samir Tara Uwe"
    " Vera Wanda Xenia Yusuf Zoe"
).split()
THINGS = (
    "locker garden bicycle kitchen ticket letter camera jacket suitcase notebook violin engine server window bridge"
    " station market library hotel river mountain harbour office school"
).split()
PLACES = "Lisbon Oslo Prague Dublin Vienna Athens Madrid Warsaw Berlin Geneva Porto Naples Riga Bergen Bologna".split()
COLOURS = "red blue green yellow white black orange purple brown grey silver golden".split()
VERBS = (
    "find open close move bring count paint repair remember forget describe compare translate explain sort send"
    " write read measure choose"
).split()
FIELDS = "name city colour number date price weight size owner status path query result error message value".split()
TOOLS = "get_weather look_up add multiply read_file write_file search_notes send_mail list_folder run_tests".split()

SENTENCES = (
    "{name} keeps the {colour} {thing} in {place}.",
    "What is in the {thing} of {name}?",
    "The {thing} belongs to {name}, and the number is {number}.",
    "I was not told where {name} lives.",
    "Please {verb} the {thing} before {name} comes back from {place}.",
    "Let me think about this: {name} said {number}, then {number2}; the last one counts.",
    "How many {thing}s are there in {place}, and who can {verb} them?",
    "First {verb} the {field}, then check whether it is larger than {number}.",
    "Thank you! That is exactly what I wanted to know about the {thing}.",
    "You are a helpful assistant. Answer briefly, and say so when something was not told.",
    "{number} plus {number2} is the sum that {name} asked for.",
    "The code word of today is {colour}-{thing}-{number}.",
    'Call {tool} with {{"{field}": "{name}", "{field2}": {number}}} and wait for the result.',
    "<function={tool}>\n<parameter={field}>\n{name}\n</parameter>\n</function>",
    '{{"type": "function", "function": {{"name": "{tool}", "description": "Use it to {verb} a {thing}.",'
    ' "parameters": {{"type": "object", "properties": {{"{field}": {{"type": "string"}}}},'
    ' "required": ["{field}"]}}}}}}',
    "def {tool}({field}: str, {field2}: int = {number}) -> list[str]:\n    return [{field}] * {field2}\n",
    "if {field} is None:\n    raise ValueError('{field} must be given, got None')\n",
    "for {field} in sorted({field2}):\n    print({field}, len({field2}))\n",
    "system\nuser\nassistant\n# Tools\n\n",
    "Although it rained in {place}, they could still {verb} every {thing} because nobody had taken the {colour} one.",
)


def corpus(seed: int, lines: int) -> Iterator[str]:
    """``lines`` made-up lines."""
    rng = random.Random(seed)
    for _ in range(lines):
        yield rng.choice(SENTENCES).format(
            name=rng.choice(NAMES),
            thing=rng.choice(THINGS),
            place=rng.choice(PLACES),
            colour=rng.choice(COLOURS),
            verb=rng.choice(VERBS),
            field=rng.choice(FIELDS),
            field2=rng.choice(FIELDS),
            tool=rng.choice(TOOLS),
            number=rng.randrange(1000),
            number2=rng.randrange(1000),
        )


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
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed=0, lines=20_000), trainer)
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
