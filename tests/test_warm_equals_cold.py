"""A warm answer cannot be told from a cold one.

A follow-up turn that resumes from a snapshot is held against the same turn computed from its first token by an engine
that reuses nothing: whole log-probabilities at every forced position, at every residue of the frontier modulo 64. Equal
greedy tokens would prove nothing on a random model, so the last tests damage the resumed lane and must see it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tiny_checkpoints
from lanes import ForcingSampler, assert_same_predictions, collect, run
from qwen35_engine import Engine, EngineOptions, GenerationRequest, SamplingParams, TapHints
from qwen35_engine.memory import DeviceMemory
from qwen35_engine.sequence import Sequence as Running

VOCAB = tiny_checkpoints.BASE["vocab_size"]
FIRST, FOLLOWING, BESIDE = 1, 2, 3  # seeds, by which the sampler tells the turns apart
ANSWER_TOKENS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.save(tiny_checkpoints.oracle(seed=8), tmp_path_factory.mktemp("model"))


class Pair:
    """A warm and a cold engine over the same weights, and the two turns of a conversation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rng = random.Random(13)
        self.prepare: Callable[[Engine], None] = lambda _: None
        self.damage: Callable[[Engine], None] | None = None

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(count)]

    def compare(self, frontier: int, positions: int, *, tap: bool) -> None:
        """Resume at ``frontier``, from a tap or from the first turn's endpoint, and compare predictions. In the warm
        engine another conversation decodes beside the resumed turn."""
        length = frontier + 7 if tap else frontier + 1 - ANSWER_TOKENS
        prompt, answer = self.tokens(length), self.tokens(ANSWER_TOKENS)
        history = prompt[:frontier] if tap else [*prompt, *answer[:-1]]
        following = [*history, *self.tokens(self._rng.randint(1, 90))]
        continuations = {FIRST: answer, FOLLOWING: self.tokens(positions), BESIDE: self.tokens(900)}
        predictions = []
        for reuse in (True, False):
            sampler = ForcingSampler(continuations, on_draw=self._on_draw if reuse else None)
            options = EngineOptions(
                threads=1, calibrate=False, kv_capacity=2048, prefill_chunk=96, host_cache_mib=0, prefix_reuse=reuse
            )
            with Engine.from_folder(self._folder, options, sampler=sampler) as self._engine:
                self.prepare(self._engine)
                run(self._engine, turn(FIRST, prompt, ANSWER_TOKENS, (frontier,) if tap else ()))
                beside = self._engine.submit(turn(BESIDE, self.tokens(70), 900)) if reuse else None
                _, usage = run(self._engine, turn(FOLLOWING, following, positions))
                assert usage.cached_tokens == (frontier if reuse else 0)
                if beside is not None:
                    beside.cancel()
            predictions.append(sampler.of(FOLLOWING))
        assert_same_predictions(*predictions)

    def _on_draw(self, seed: int, step: int) -> None:
        if self.damage is not None and (seed, step) == (FOLLOWING, 0):
            self.damage(self._engine)


def turn(seed: int, prompt: list[int], max_tokens: int, taps: tuple[int, ...] = ()) -> GenerationRequest:
    return GenerationRequest(
        tokens=prompt, max_tokens=max_tokens, sampling=SamplingParams(seed=seed), hints=TapHints(explicit=taps)
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


# ---- the Host tier ----------------------------------------------------------------------------------------------

LOSING = 3  # the seed of a request during which everything cached leaves the device


def lose_device(engine: Engine) -> None:
    """As under pressure: only what has a Host copy is left."""
    cache = engine.parts.cache
    cache.transfers.drain()
    while (freed := cache.index.claim_slot()) is not None:
        cache.allocator.reclaim(freed)
    cache.allocator.reclaim(cache.index.evict_device(cache.stats().pages_total))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("frontier", [64, 101, 128, 191])
def test_restored_from_the_host_equals_resumed_from_the_device_bit_for_bit(
    folder: Path, frontier: int, dtype: str
) -> None:
    rng = random.Random(frontier)
    prompt, answer, new, forced = (
        [rng.randrange(VOCAB) for _ in range(count)] for count in (frontier + 1 - ANSWER_TOKENS, ANSWER_TOKENS, 40, 32)
    )
    continuations = {FIRST: answer, LOSING: [1], FOLLOWING: forced}
    predictions = []
    for lose in (False, True):
        engines: list[Engine] = []

        def on_draw(seed: int, step: int, *, lose: bool = lose, engines: list[Engine] = engines) -> None:
            if lose and seed == LOSING:
                lose_device(engines[0])

        sampler = ForcingSampler(continuations, on_draw=on_draw)
        options = EngineOptions(threads=1, calibrate=False, kv_capacity=2048, host_cache_mib=64, dtype=dtype)
        with Engine.from_folder(folder, options, sampler=sampler) as engine:
            engines.append(engine)
            run(engine, turn(FIRST, prompt, ANSWER_TOKENS))
            run(engine, turn(LOSING, [5, 6, 7], 1))
            _, usage = run(engine, turn(FOLLOWING, [*prompt, *answer[:-1], *new], len(forced)))
            host = engine.stats().cache.host
            assert host is not None
            assert usage.cached_tokens == frontier
            assert (host.restored_bytes > 0) == lose
        predictions.append(sampler.of(FOLLOWING))
    assert torch.equal(*predictions)


# ---- the comparison can fail ------------------------------------------------------------------------------------


def zero_recurrent_state(engine: Engine) -> None:
    for recurrent in recurrent_states(engine):
        recurrent[lane_of(engine, FOLLOWING).slot] = 0


def zero_conv_history(engine: Engine) -> None:
    for conv in conv_histories(engine):
        conv[lane_of(engine, FOLLOWING).slot] = 0


def take_another_state(engine: Engine) -> None:
    """That of the snapshot the lane resumed from: right once, but tokens behind."""
    memory, slot, _ = resumed_lane(engine)
    lane = lane_of(engine, FOLLOWING)
    assert lane.lease is not None
    memory.states[slot] = memory.states[lane.lease.slot]


def swap_states(engine: Engine) -> None:
    for recurrent in recurrent_states(engine):
        swap(recurrent, *slots_of_both(engine))


def swap_conv_histories(engine: Engine) -> None:
    for conv in conv_histories(engine):
        swap(conv, *slots_of_both(engine))


def zero_a_page(engine: Engine) -> None:
    memory, _, pages = resumed_lane(engine)
    memory.pages[pages[0]] = 0


def take_another_page(engine: Engine) -> None:
    """Exchanging two whole pages of one lane would change nothing: keys carry their positions."""
    memory, _, pages = resumed_lane(engine)
    memory.pages[pages[0]] = memory.pages[pages[1]]


def swap_pages(engine: Engine) -> None:
    memory, _, pages = resumed_lane(engine)
    swap(memory.pages, pages[0], lane_of(engine, BESIDE).pages[0])


def swap(rows: torch.Tensor, one: int, other: int) -> None:
    rows[[one, other]] = rows[[other, one]]


def recurrent_states(engine: Engine) -> list[torch.Tensor]:
    """A view of every slot for each Gated DeltaNet layer."""
    memory = engine.parts.memory
    layout = memory.state_layout
    return [layout.recurrent(memory.states, layer) for layer in range(layout.num_layers)]


def conv_histories(engine: Engine) -> list[torch.Tensor]:
    """A view of every slot for each Gated DeltaNet layer."""
    memory = engine.parts.memory
    layout = memory.state_layout
    return [layout.conv(memory.states, layer) for layer in range(layout.num_layers)]


def slots_of_both(engine: Engine) -> tuple[int, int]:
    return lane_of(engine, FOLLOWING).slot, lane_of(engine, BESIDE).slot


def lane_of(engine: Engine, seed: int) -> Running:
    (lane,) = [lane for lane in engine.parts.loop.running if lane.seed == seed]
    return lane


def resumed_lane(engine: Engine) -> tuple[DeviceMemory, int, list[int]]:
    lane = lane_of(engine, FOLLOWING)
    return engine.parts.memory, lane.slot, lane.pages


@pytest.mark.parametrize(
    "damage",
    [
        zero_recurrent_state,
        zero_conv_history,
        zero_a_page,
        swap_states,
        swap_conv_histories,
        swap_pages,
        take_another_state,
        take_another_page,
    ],
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


def test_a_state_taken_one_token_early_is_seen(pair: Pair) -> None:
    """Every tap takes the state before its last token, and says it was after it."""
    taken = []

    def early(engine: Engine) -> None:
        real = engine.parts.model.prefill

        def prefill(*, taps: Sequence[tuple[int, int]] = (), **arguments: Any) -> torch.Tensor:
            taken.extend(taps)
            return real(taps=[(position - 1, slot) for position, slot in taps], **arguments)

        engine.parts.model.prefill = prefill  # type: ignore[method-assign]

    pair.prepare = early
    with pytest.raises(AssertionError, match="log-probabilities differ by"):
        pair.compare(101, 16, tap=True)
    assert taken


# ---- in bf16 ----------------------------------------------------------------------------------------------------

CONVERSATIONS = 8
POSITIONS = 256


class Differences(NamedTuple):
    """Between two runs, over the whole vocabulary at ``CONVERSATIONS * POSITIONS`` positions."""

    mean: float
    disagreement: float


def differences(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> Differences:
    a, b = torch.cat(ours), torch.cat(reference)
    assert len(a) == CONVERSATIONS * POSITIONS
    return Differences((a - b).abs().mean().item(), (a.argmax(-1) != b.argmax(-1)).double().mean().item())


class Conversations:
    """Eight conversations of two turns in bf16, each with its own forced answers."""

    def __init__(self, folder: Path) -> None:
        rng = random.Random(17)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(VOCAB) for _ in range(count)]

        self._folder = folder
        self._prompts = [tokens(rng.randint(100, 260)) for _ in range(CONVERSATIONS)]
        self._answers = {100 + i: tokens(ANSWER_TOKENS) for i in range(CONVERSATIONS)}
        self._forced = {200 + i: tokens(POSITIONS) for i in range(CONVERSATIONS)}
        self._new = [tokens(rng.randint(1, 90)) for _ in range(CONVERSATIONS)]

    def predictions(self, *, reuse: bool, chunk: int, lanes: int) -> list[torch.Tensor]:
        """Of every second turn. With ``lanes`` above one they run at once."""
        sampler = ForcingSampler(self._answers | self._forced)
        options = EngineOptions(
            threads=1,
            calibrate=False,
            kv_capacity=16_384,
            prefill_chunk=chunk,
            host_cache_mib=0,
            prefix_reuse=reuse,
            dtype="bfloat16",
            max_concurrency=lanes,
            device_snapshot_slots=16 if reuse else None,
        )
        with Engine.from_folder(self._folder, options, sampler=sampler) as engine:
            for i, prompt in enumerate(self._prompts):
                run(engine, turn(100 + i, prompt, ANSWER_TOKENS))
            streams = []
            for i, prompt in enumerate(self._prompts):
                following = [*prompt, *self._answers[100 + i], *self._new[i]]
                streams.append(engine.submit(turn(200 + i, following, POSITIONS)))
                if lanes == 1:
                    collect(streams.pop())
            for stream in streams:
                _, usage = collect(stream)
                assert (usage.cached_tokens > 0) == reuse
        return [sampler.of(seed) for seed in self._forced]


def test_in_bf16_warm_differs_from_cold_no_more_than_cold_from_cold_in_other_chunks(
    folder: Path, record_property: Callable[[str, object], None]
) -> None:
    """Rounding to bf16 hides nothing larger: the yardstick is what another way of cutting the prompt changes.

    Resumed turns that run together are held against cold ones that run alone."""
    conversations = Conversations(folder)
    cold = conversations.predictions(reuse=False, chunk=512, lanes=1)
    # Chunks of whole blocks change no bit here, so the other way of cutting has to leave the grid.
    yardstick = differences(conversations.predictions(reuse=False, chunk=33, lanes=1), cold)
    warm = differences(conversations.predictions(reuse=True, chunk=512, lanes=CONVERSATIONS), cold)
    for name, value in (("yardstick", yardstick), ("warm", warm)):
        record_property(name, value)
        print(f"{name}: mean |d log p| {value.mean:.2e}, argmax disagreement {value.disagreement:.2%}")
    assert yardstick.mean > 0
    assert warm.mean <= 1.5 * yardstick.mean
    assert warm.disagreement <= 1.5 * yardstick.disagreement
