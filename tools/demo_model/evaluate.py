"""Measure the demo model on conversations it never saw, and print a table.

    python tools/demo_model/evaluate.py [--checkpoint FOLDER] [--count 500] [--threads 2]

Every row is ``--count`` conversations that end in a question about what their first turn told; half of them with a
thinking block. *Right* means that the greedy answer is the expected one, token by token, its thought and its end
included: the expected text is fed in and the largest logit must name the next token everywhere, which is what greedy
decoding comes to. Where a tool call is not right, it is generated, to tell a call that is well-formed with a
wrong argument from one that cannot be parsed.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from dialogues import Dialogue, exam
from network import Network
from rendering import CHECKPOINT, Encoder, pieces
from safetensors.torch import load_file

from qwen35_engine import Engine, EngineOptions, GenerationRequest, NewTokens, SamplingParams

# Skill, and how far back in tokens what it needs was told.
ROWS = (
    ("recall", 250),
    ("recall", 1000),
    ("recall", 4000),
    ("update", 250),
    ("update", 1000),
    ("not_told", 250),
    ("not_told", 1000),
    ("code_word", 1000),
    ("look_up", 500),
    ("open_locker", 500),
    ("sum", 250),
)
CALL = re.compile(
    r"<tool_call>\n<function=\w+>\n<parameter=\w+>\n[^\n<]+\n</parameter>\n</function>\n</tool_call><\|im_end\|>"
)

CALLS = ("look_up", "open_locker")

# Tokens of one forward pass: enough to keep the cores busy, few enough to stay in memory.
BATCH_TOKENS = 8192


def load_network(folder: Path) -> Network:
    network = Network(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    network.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return network.eval()


@dataclass(frozen=True)
class Question:
    """Token ids of a whole conversation, and the ranges of its last turn that the assistant writes."""

    ids: list[int]
    own: list[range]
    thinking: bool


def question(dialogue: Dialogue, encoder: Encoder, *, thinking: bool) -> Question:
    ids: list[int] = []
    own: list[range] = []
    for text, learnt in pieces(dialogue, thinking=thinking):
        encoded = encoder.encode(text)
        if learnt:
            own.append(range(len(ids), len(ids) + len(encoded)))
        ids += encoded
    return Question(ids, own[-2:] if dialogue.turns[-1].call else own[-1:], thinking)


@torch.inference_mode()
def measure(network: Network, encoder: Encoder, questions: Sequence[Question]) -> list[list[bool]]:
    """For each question, for each part that the assistant writes: whether every greedy token is the expected one."""
    marks: list[list[bool]] = [[] for _ in questions]
    order = sorted(range(len(questions)), key=lambda n: len(questions[n].ids))
    while order:
        rows = max(1, BATCH_TOKENS // len(questions[order[-1]].ids))
        order, group = order[:-rows], order[-rows:]
        longest = max(len(questions[n].ids) for n in group)
        ids = torch.full((len(group), longest), encoder.padding)
        for row, n in enumerate(group):
            ids[row, : len(questions[n].ids)] = torch.tensor(questions[n].ids)
        at = [row * longest + t - 1 for row, n in enumerate(group) for part in questions[n].own for t in part]
        flat = torch.tensor(at)
        hits = iter((network(ids, flat).argmax(-1) == ids.flatten()[flat + 1]).tolist())
        for n in group:
            marks[n] = [all(list(islice(hits, len(part)))) for part in questions[n].own]
    return marks


def generated_calls(checkpoint: Path, encoder: Encoder, questions: Sequence[Question]) -> list[str]:
    """The greedy texts where each question's call should stand."""
    with Engine.from_folder(
        checkpoint, EngineOptions(threads=1, calibrate=False, host_cache_mib=0, max_pending=1000)
    ) as engine:
        streams = [
            engine.submit(
                GenerationRequest(
                    tokens=one.ids[: one.own[0].start],
                    sampling=SamplingParams(temperature=0),
                    max_tokens=2 * len(one.own[0]),
                    stop_token_ids=engine.config.eos_token_ids,
                )
            )
            for one in questions
        ]
        ids = [[token for event in stream if isinstance(event, NewTokens) for token in event.ids] for stream in streams]
    return [encoder.decode(one, skip_special_tokens=False) for one in ids]


def share(right: Sequence[bool]) -> str:
    return f"{sum(right) / max(1, len(right)):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--longest", type=int, default=4000, help="leave out rows that look further back")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    network, encoder = load_network(args.checkpoint), Encoder()
    print("| skill | tokens back | conversations | right | without thinking | with thinking | call well-formed |")
    print("|---|---|---|---|---|---|---|")
    begun = time.monotonic()
    for skill, tokens in ROWS:
        if tokens > args.longest:
            continue
        made = [
            question(exam(f"held out {tokens} {n}", skill, tokens=tokens), encoder, thinking=n % 2 == 1)
            for n in range(args.count)
        ]
        marks = measure(network, encoder, made)
        right = [all(parts) for parts in marks]
        shares = [share(right), share(right[::2]), share(right[1::2]), ""]
        if skill in CALLS:
            failed = [one for one, parts in zip(made, marks, strict=True) if not parts[0]]
            broken = [text for text in generated_calls(args.checkpoint, encoder, failed) if not CALL.search(text)]
            shares[3] = f"{1 - len(broken) / len(made):.1%}"
        cells = (skill, tokens, len(made), *shares)
        print("|", " | ".join(map(str, cells)), "|", flush=True)
    print(f"{time.monotonic() - begun:.0f} seconds")


if __name__ == "__main__":
    main()
