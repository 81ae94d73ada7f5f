"""Train the demo model on made-up dialogues. Plain torch, CPU, resumable.

    python tools/demo_model/train.py --out FOLDER [--minutes 90] [--threads 2]

Keeps ``state.pt`` in FOLDER and goes on from it when it is there; prints one line of progress every 50 steps. Each
batch is made from its step's number, so that a resumed run sees what an uninterrupted one would.
``export.py`` turns the state into the checkpoint that the package ships.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from dialogues import SKILLS, dialogue, drill, exam
from network import Network
from orthogonal import Orthogonal
from rendering import Encoder, pieces
from teaching import Teacher
from torch import Tensor
from words import VALUES

CONFIG = json.loads((Path(__file__).parent / "config.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Stage:
    """``rows`` sequences of up to ``length`` tokens a step, for at most ``steps`` steps.

    It ends early when ``goal`` of the values of ``WINDOW_STEPS`` steps are right. The shape of the dialogues: at most
    so many ``people`` and ``kinds`` of attributes, one of the ``filler`` shares, ``tools`` in this share of them, and
    this share of ``exams``, which ask about something told long before; and this share of ``drills`` instead of them,
    of which this share is ``late``.
    """

    steps: int
    goal: float
    rows: int
    length: int
    people: int
    kinds: int
    filler: tuple[float, ...] = (0.0,)
    tools: float = 0.0
    exams: float = 0.0
    drills: float = 0.0
    late: float = 0.0


# Look-up appears first among few facts; then facts, kinds of questions and distances grow.
STAGES = (
    Stage(800, 0.88, 16, 64, people=2, kinds=2, drills=1.0),
    Stage(800, 0.90, 12, 128, people=4, kinds=4, filler=(0.0, 0.3), drills=0.5),
    Stage(800, 0.91, 8, 256, people=4, kinds=4, filler=(0.0, 0.3), tools=0.4, exams=0.3, drills=0.5, late=0.5),
    Stage(1500, 0.93, 4, 512, people=5, kinds=4, filler=(0.0, 0.3), tools=0.3, exams=0.4, drills=0.4, late=0.5),
    Stage(1500, 0.95, 2, 1024, people=6, kinds=5, filler=(0.0, 0.3, 0.6), tools=0.3, exams=0.8, drills=0.6, late=0.9),
    Stage(9999, 1.01, 1, 4096, people=6, kinds=5, filler=(0.3, 0.6, 0.8), tools=0.3, exams=0.8, drills=0.6, late=0.9),
)
WINDOW_STEPS = 50
SAVE_STEPS = 50

PEAK_RATE = 3e-3
MATRIX_RATE = 0.02
WARMUP_STEPS = 100
TEACHER_RATE = 1e-2
TEACHING = 0.5  # weight of what is taught beside what is said


def batch(step: int, stage: Stage, encoder: Encoder) -> tuple[Tensor, Tensor]:
    """Token ids ``[rows, length]`` and, for each, whether it is learnt."""
    rng = random.Random(f"batch {step}")
    ids = torch.full((stage.rows, stage.length), encoder.padding)
    learnt = torch.zeros(stage.rows, stage.length, dtype=torch.bool)
    for row in range(stage.rows):
        shape = {
            "tokens": stage.length if rng.random() < 0.7 else rng.randint(stage.length // 2, stage.length),
            "people": rng.randint(1, stage.people),
            "kinds": rng.randint(1, stage.kinds),
        }
        filler = rng.choice(stage.filler)
        seed = f"train {step} {row}"
        if rng.random() < stage.drills:
            parts = iter(drill(seed, **shape, filler=filler, late=rng.random() < stage.late))
        else:
            if rng.random() < stage.exams:
                made = exam(seed, rng.choice(SKILLS), **shape, filler=filler)
            else:
                made = dialogue(seed, **shape, filler=filler, tools=rng.random() < stage.tools)
            parts = pieces(made, thinking=rng.random() < 0.3, openers=rng.random() < 0.5)
        one, own = encoder.training(parts)
        one, own = one[: stage.length], own[: stage.length]  # lengths asked for are approximate
        ids[row, : len(one)] = torch.tensor(one)
        learnt[row, : len(own)] = torch.tensor(own)
    return ids, learnt


def stage_of(number: int, step: int) -> Stage:
    """What a step trains on. In the last stage two steps of three are the one before's.

    With sequences of 4,096 tokens alone, looking back over 1,000 was soon unlearnt.
    """
    return STAGES[number - 1] if number == len(STAGES) - 1 and step % 3 else STAGES[number]


def _values(encoder: Encoder) -> Tensor:
    """For each token id whether it is a value, a code word or "not told": what only the dialogue itself can tell."""
    marked = torch.zeros(CONFIG["vocab_size"], dtype=torch.bool)
    marked[[encoder.encode(text)[0] for text in ("?", *(f" {value}" for value in VALUES))]] = True
    return marked


def rate(done: float, step: int) -> float:
    """Share of the peak learning rates after ``done`` of the run: warm up, hold, then fall in a straight line."""
    return min((step + 1) / WARMUP_STEPS, 1, max(0.02, 1.5 * (1 - done)))


def optimizers_of(network: Network, teacher: Teacher) -> list[torch.optim.Optimizer]:
    """Matrices inside the layers by ``Orthogonal``, the rest and the teacher by AdamW."""
    matrices, rest = [], []
    for name, parameter in network.named_parameters():
        inner = parameter.ndim == 2 and min(parameter.shape) >= 32 and "embed" not in name
        (matrices if inner else rest).append(parameter)
    return [
        Orthogonal(matrices, lr=MATRIX_RATE),
        torch.optim.AdamW(rest, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0),
        torch.optim.AdamW(teacher.parameters(), lr=TEACHER_RATE, weight_decay=0.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=90, help="of the whole run, all resumptions together")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    encoder = Encoder()
    network = Network(CONFIG)
    teacher = Teacher(network, encoder)
    optimizers = optimizers_of(network, teacher)
    step, number, entered, spent = 0, 0, 0, 0.0
    saved = args.out / "state.pt"
    if saved.exists():
        state = torch.load(saved)
        network.load_state_dict(state["network"])
        teacher.load_state_dict(state["teacher"])
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        step, number, entered, spent = (state[key] for key in ("step", "stage", "entered", "seconds"))
    print(f"{sum(p.numel() for p in network.parameters())} parameters, from step {step}", flush=True)
    begun = time.monotonic() - spent
    values = _values(encoder)
    pointed: list[float] = []
    losses: list[float] = []
    right = asked = tokens = 0
    since = time.monotonic()
    while number < len(STAGES) and time.monotonic() - begun < 60 * args.minutes:
        stage = stage_of(number, step)
        ids, learnt = batch(step, stage, encoder)
        positions = learnt[:, 1:].flatten().nonzero().squeeze(1)
        positions = positions + positions // (stage.length - 1)  # as positions of [rows, length]
        targets = ids.flatten()[positions + 1]
        now = rate((time.monotonic() - begun) / 60 / args.minutes, step)
        for optimizer, peak in zip(optimizers, (MATRIX_RATE, PEAK_RATE, TEACHER_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = now * peak
        logits = network(ids, positions)
        # Values are few and hard, the words around them many and soon learnt.
        weights = 1 + 2 * values[targets].float()
        loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()
        loss = loss + TEACHING * teacher.loss(ids)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        # An overflow must stop the run before it reaches the state that is kept.
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0, error_if_nonfinite=True)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        losses.append(loss.item())
        pointed.append(teacher.pointed)
        hard = values[targets]
        right += int((logits.argmax(-1) == targets)[hard].sum())
        asked += int(hard.sum())
        tokens += ids.numel()
        ended = step - entered == STAGES[number].steps
        if step % WINDOW_STEPS == 0:
            seconds = time.monotonic() - since
            print(
                f"step {step:5d}  {(time.monotonic() - begun) / 60:5.1f} min  length {stage.length:4d}"
                f"  loss {sum(losses) / len(losses):.4f}  values right {right / max(1, asked):.3f}"
                f"  pointed {sum(pointed) / len(pointed):.3f}  rate {now:.2f}  {tokens / seconds:.0f} tokens/s",
                flush=True,
            )
            ended = ended or right >= STAGES[number].goal * asked
            losses, pointed, right, asked, tokens, since = [], [], 0, 0, 0, time.monotonic()
        if ended:
            number, entered = number + 1, step
        if ended or step % SAVE_STEPS == 0:
            state = {
                "network": network.state_dict(),
                "teacher": teacher.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step,
                "stage": number,
                "entered": entered,
                "seconds": time.monotonic() - begun,
            }
            torch.save(state, args.out / "state.new")
            os.replace(args.out / "state.new", saved)


if __name__ == "__main__":
    main()
