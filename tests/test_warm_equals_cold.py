"""Nobody can tell a warm answer from a cold one.

A follow-up turn that resumes from a snapshot is held against the same turn computed from its first token by an engine
that reuses nothing: whole log-probabilities at every forced position, at every residue of the frontier modulo 64. Equal
greedy tokens would prove nothing on a random model, so the last tests damage the resumed lane and must see it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny_checkpoints
from lanes import ForcingSampler, assert_same_predictions, run
from qwen35_engine import Engine, EngineOptions, GenerationRequest, SamplingParams

VOCAB = tiny_checkpoints.BASE["vocab_size"]
FIRST, FOLLOWING = 1, 2  # seeds, by which the sampler tells the turns apart
ANSWER_TOKENS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.save(tiny_checkpoints.oracle(seed=8), tmp_path_factory.mktemp("model"))


class Pair:
    """A warm and a cold engine over the same weights, and the two turns of a conversation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rng = random.Random(13)
        self.damage: Callable[[Engine], None] | None = None

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(count)]

    def compare(self, frontier: int, positions: int, *, tap: bool) -> None:
        """Resume at ``frontier``, from a tap or from the first turn's endpoint, and compare predictions."""
        length = frontier + 7 if tap else frontier + 1 - ANSWER_TOKENS
        prompt, answer = self.tokens(length), self.tokens(ANSWER_TOKENS)
        history = prompt[:frontier] if tap else [*prompt, *answer[:-1]]
        following = [*history, *self.tokens(self._rng.randint(1, 90))]
        continuations = {FIRST: answer, FOLLOWING: self.tokens(positions)}
        predictions = []
        for reuse in (True, False):
            sampler = ForcingSampler(continuations, on_draw=self._on_draw if reuse else None)
            options = EngineOptions(threads=1, kv_capacity=2048, prefill_chunk=96, prefix_reuse=reuse)
            with Engine.from_folder(self._folder, options, sampler=sampler) as self._engine:
                run(self._engine, turn(FIRST, prompt, ANSWER_TOKENS, (frontier,) if tap else ()))
                _, usage = run(self._engine, turn(FOLLOWING, following, positions))
                assert usage.cached_tokens == (frontier if reuse else 0)
            predictions.append(sampler.of(FOLLOWING))
        assert_same_predictions(*predictions)

    def _on_draw(self, seed: int, step: int) -> None:
        if self.damage is not None and (seed, step) == (FOLLOWING, 0):
            self.damage(self._engine)


def turn(seed: int, prompt: list[int], max_tokens: int, taps: tuple[int, ...] = ()) -> GenerationRequest:
    return GenerationRequest(
        tokens=prompt, max_tokens=max_tokens, sampling=SamplingParams(seed=seed), tap_positions=taps
    )


@pytest.fixture
def pair(folder: Path) -> Pair:
    return Pair(folder)


@pytest.mark.parametrize("residues", [range(begin, begin + 16) for begin in range(0, 64, 16)], ids=str)
def test_at_every_residue_from_an_endpoint(pair: Pair, residues: range) -> None:
    for residue in residues:
        pair.compare(128 + residue, 16, tap=False)


@pytest.mark.parametrize("residues", [range(begin, begin + 16) for begin in range(0, 64, 16)], ids=str)
def test_at_every_residue_from_a_tap(pair: Pair, residues: range) -> None:
    for residue in residues:
        pair.compare(64 + residue, 16, tap=True)


@pytest.mark.parametrize("frontier", [6, 63, 64, 65, 191])
def test_over_256_positions(pair: Pair, frontier: int) -> None:
    pair.compare(frontier, 256, tap=frontier % 2 == 1)


# ---- the comparison can fail ------------------------------------------------------------------------------------


def zero_recurrent_state(engine: Engine) -> None:
    memory, slot, _ = resumed_lane(engine)
    for layer in range(memory.state_layout.num_layers):
        memory.state_layout.recurrent(memory.states, layer)[slot] = 0


def zero_conv_history(engine: Engine) -> None:
    memory, slot, _ = resumed_lane(engine)
    for layer in range(memory.state_layout.num_layers):
        memory.state_layout.conv(memory.states, layer)[slot] = 0


def take_another_state(engine: Engine) -> None:
    """That of the snapshot the lane resumed from: right once, but tokens behind."""
    memory, slot, _ = resumed_lane(engine)
    other = next(s for s in range(1, len(memory.states)) if not torch.equal(memory.states[s], memory.states[slot]))
    memory.states[slot] = memory.states[other]


def zero_a_page(engine: Engine) -> None:
    memory, _, pages = resumed_lane(engine)
    memory.pages[pages[0]] = 0


def take_another_page(engine: Engine) -> None:
    """Exchanging two whole pages of one lane would change nothing: keys carry their positions."""
    memory, _, pages = resumed_lane(engine)
    memory.pages[pages[0]] = memory.pages[pages[1]]


def resumed_lane(engine: Engine):  # type: ignore[no-untyped-def]
    (lane,) = engine._worker._lanes.values()
    return engine._worker._model._memory, lane.memory.slot, lane.memory.pages


@pytest.mark.parametrize(
    "damage",
    [zero_recurrent_state, zero_conv_history, take_another_state, zero_a_page, take_another_page],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_lane_is_seen(pair: Pair, damage: Callable[[Engine], None]) -> None:
    damaged = []

    def once(engine: Engine) -> None:
        damage(engine)
        damaged.append(True)

    pair.damage = once
    with pytest.raises(AssertionError, match="log-probabilities differ by"):
        pair.compare(140, 16, tap=False)
    assert damaged
