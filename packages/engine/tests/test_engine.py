"""The engine through its public face: many lanes, reuse, limits."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_checkpoints
from engines import VOCAB, engine_of, request, tokens
from lanes import ForcingSampler, assert_same_predictions, collect, run
from qwen35_engine import (
    ContextLengthExceeded,
    Engine,
    EngineOptions,
    Finished,
    GenerationRequest,
    NewTokens,
    RequestError,
    SamplingParams,
    Started,
    TapHints,
)
from qwen35_engine.checkpoint.config import read_config
from qwen35_engine.model.weights import load_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.save(tiny_checkpoints.oracle(seed=5), tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with engine_of(folder) as engine:
        yield engine


# ---- many lanes equal one ---------------------------------------------------------------------------------------

LENGTHS = (1, 5, 63, 64, 65, 130, 200, 257)
STEPS = 24
FORCED = {seed: tokens(STEPS, 100 + seed) for seed in range(len(LENGTHS))}


def forced(seed: int, **changes: Any) -> GenerationRequest:
    return request(tokens(LENGTHS[seed], seed), STEPS, sampling=SamplingParams(seed=seed), **changes)


def alone(folder: Path) -> list[torch.Tensor]:
    """Each prompt's predictions when nothing else runs and nothing is reused."""
    sampler = ForcingSampler(FORCED)
    with engine_of(folder, sampler, prefix_reuse=False) as engine:
        for seed in FORCED:
            run(engine, forced(seed))
    return [sampler.of(seed) for seed in FORCED]


def together(folder: Path, sampler: ForcingSampler) -> Engine:
    """All prompts at once, in small chunks so that prompts and answers mix; returned closed."""
    engine = engine_of(folder, sampler, max_concurrency=len(LENGTHS), prefill_chunk=32)
    with engine:
        for stream in [engine.submit(forced(seed)) for seed in FORCED]:
            collect(stream)
    return engine


def test_eight_prompts_at_once_predict_what_each_predicts_alone(folder: Path) -> None:
    sampler = ForcingSampler(FORCED)
    together(folder, sampler)
    for seed, expected in enumerate(alone(folder)):
        assert_same_predictions(sampler.of(seed), expected)


def test_the_comparison_sees_two_lanes_with_swapped_states(folder: Path) -> None:
    """The same run with the states of two lanes exchanged half way; it must not pass for right."""
    expected = alone(folder)
    done = []

    def swap(seed: int, step: int) -> None:
        if not done and seed == 7 and step == 4:  # the longest prompt is past its prefill, so all lanes decode
            lanes = {lane.seed: lane for lane in engine.parts.loop.running}
            states = engine.parts.memory.states
            a, b = lanes[6].slot, lanes[7].slot
            states[[a, b]] = states[[b, a]]
            done.append(True)

    sampler = ForcingSampler(FORCED, on_draw=swap)
    engine = engine_of(folder, sampler, max_concurrency=len(LENGTHS), prefill_chunk=32)
    with engine:
        for stream in [engine.submit(forced(seed)) for seed in FORCED]:
            collect(stream)
    assert done
    for seed in (6, 7):
        with pytest.raises(AssertionError):
            assert_same_predictions(sampler.of(seed), expected[seed])
    assert_same_predictions(sampler.of(0), expected[0])


def test_predictions_equal_those_of_transformers(folder: Path) -> None:
    """Through the whole engine: chunks, lanes, pages, slots."""
    oracle = tiny_checkpoints.oracle(seed=5)
    sampler = ForcingSampler(FORCED)
    together(folder, sampler)
    for seed, length in enumerate(LENGTHS):
        whole = tokens(length, seed) + FORCED[seed]
        expected = tiny_checkpoints.oracle_log_probabilities(oracle, whole)[length - 1 : -1]
        assert_same_predictions(sampler.of(seed), expected)


# ---- reuse ------------------------------------------------------------------------------------------------------


def test_a_following_turn_computes_only_what_is_new(engine: Engine) -> None:
    prompt = tokens(150, 1)
    answer, usage = run(engine, request(prompt, 10))
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (150, 0, 10)
    following = [*prompt, *answer, *tokens(20, 2)]
    _, usage = run(engine, request(following, 3))
    # All but the last token of the answer, which was drawn and never computed.
    assert usage.cached_tokens == 159


def test_a_tap_serves_a_turn_that_renders_the_answer_differently(engine: Engine) -> None:
    prompt = tokens(150, 3)
    run(engine, request(prompt, 10, hints=TapHints(explicit=(141,))))
    _, usage = run(engine, request([*prompt[:141], *tokens(30, 4)], 3))
    assert usage.cached_tokens == 141


def test_an_edited_prompt_reuses_nothing_beyond_the_edit(engine: Engine) -> None:
    prompt = tokens(200, 5)
    run(engine, request(prompt, 5, hints=TapHints(explicit=(64, 150))))
    edited = [*prompt[:149], (prompt[149] + 1) % VOCAB, *prompt[150:]]
    _, usage = run(engine, request(edited))
    assert usage.cached_tokens == 64


def test_a_repeated_prompt_keeps_at_least_one_token_to_compute(engine: Engine) -> None:
    prompt = tokens(128, 6)
    first, _ = run(engine, request(prompt, 5, hints=TapHints(explicit=(128, 127))))
    again, usage = run(engine, request(prompt, 5))
    assert usage.cached_tokens == 127
    assert again == first


def test_namespaces_share_nothing(engine: Engine) -> None:
    prompt = tokens(150, 7)
    run(engine, request(prompt, 10, hints=TapHints(explicit=(141,)), namespace=b"a"))
    assert run(engine, request(prompt, namespace=b"b"))[1].cached_tokens == 0
    assert run(engine, request(prompt, namespace=b"a"))[1].cached_tokens == 141


def test_a_request_that_opts_out_neither_takes_nor_leaves(engine: Engine) -> None:
    prompt = tokens(150, 8)
    before = engine.stats().cache
    run(engine, request(prompt, 10, hints=TapHints(explicit=(141,)), reuse=False))
    assert engine.stats().cache == before
    run(engine, request(prompt, 10, hints=TapHints(explicit=(141,))))
    assert run(engine, request(prompt, reuse=False))[1].cached_tokens == 0
    assert run(engine, request(prompt))[1].cached_tokens == 141


def test_prefix_reuse_can_be_switched_off(folder: Path) -> None:
    with engine_of(folder, prefix_reuse=False) as engine:
        prompt = tokens(150, 9)
        before = engine.stats().cache
        for _ in range(2):
            assert run(engine, request(prompt, hints=TapHints(explicit=(141,))))[1].cached_tokens == 0
        assert engine.stats().cache == before


def test_a_recycled_slot_starts_from_nothing(folder: Path) -> None:
    """A short new prompt after the only lane's slot held another state."""
    with engine_of(folder, max_concurrency=1, prefix_reuse=False) as engine:
        fresh, _ = run(engine, request([1, 2, 3], 8))
        run(engine, request(tokens(300, 10), 8))
        assert run(engine, request([1, 2, 3], 8))[0] == fresh


def test_the_cache_under_pressure_stays_right(folder: Path) -> None:
    """Few pages and slots, many conversations: whatever is evicted, warm equals cold, and nothing leaks."""
    rng = random.Random(11)
    with (
        engine_of(folder, kv_capacity=1024, max_context=512, device_snapshot_slots=3, max_concurrency=2) as warm,
        engine_of(folder, prefix_reuse=False) as cold,
    ):
        conversations = [tokens(rng.randint(20, 150), 200 + i) for i in range(5)]
        hits = 0
        for turn in range(40):
            i = rng.randrange(len(conversations))
            if len(conversations[i]) > 440:
                conversations[i] = conversations[i][: rng.randint(1, 300)]
            asked = request(conversations[i], 6, hints=TapHints(opener=len(conversations[i])))
            answer, usage = run(warm, asked)
            assert answer == run(cold, asked)[0], f"turn {turn} of conversation {i}, {usage}"
            hits += usage.cached_tokens > 0
            conversations[i] = [*conversations[i], *answer, *tokens(rng.randint(1, 60), 300 + turn)]
        assert hits > 5
        stats = warm.stats().cache
        assert stats.snapshot_slots_used <= 3
        # Every lane has ended: what is not free belongs to the cache, and the cache can give all of it back.
        assert stats.slots_total - stats.slots_free == stats.snapshot_slots_used
        index = warm.parts.cache.index
        warm.close()
        index.hand_over()
        index.check_invariants()
        freed = index.evict_device(stats.pages_total - stats.pages_free)
        assert len(freed.pages) == stats.pages_total - stats.pages_free
        assert len(freed.slots) == stats.snapshot_slots_used


def test_a_cancelled_prompt_leaves_what_it_computed(folder: Path) -> None:
    prompt = tokens(600, 12)
    with engine_of(folder, prefill_chunk=64) as engine:
        model = engine.parts.model
        passes = []
        third = threading.Event()
        cancelled = threading.Event()
        real = model.prefill

        def slow(**arguments: Any) -> torch.Tensor:
            passes.append(arguments["base"])
            if len(passes) == 3:
                third.set()
                assert cancelled.wait(timeout=60)
            return real(**arguments)

        model.prefill = slow  # type: ignore[method-assign]
        stream = engine.submit(request(prompt))
        assert third.wait(timeout=60)
        stream.cancel()
        cancelled.set()
        end = list(stream)[-1]
        assert isinstance(end, Finished)
        assert end.reason == "cancelled"
        assert run(engine, request(prompt))[1].cached_tokens == 192


# ---- limits -----------------------------------------------------------------------------------------------------


def test_stop_tokens_belong_to_the_answer(folder: Path) -> None:
    with engine_of(folder, ForcingSampler({1: [9, 8, 7, 6]})) as engine:
        stream = engine.submit(request([1, 2], 4, sampling=SamplingParams(seed=1), stop_token_ids=frozenset({7})))
        events = list(stream)
    assert [event.ids for event in events if isinstance(event, NewTokens)] == [(9,), (8,), (7,)]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "stop"


def test_an_answer_ends_with_the_context(folder: Path) -> None:
    with engine_of(folder, max_context=100) as engine:
        events = list(engine.submit(request(tokens(90, 1), max_tokens=None, reuse=False)))
        assert isinstance(events[-1], Finished)
        assert (events[-1].reason, events[-1].usage.completion_tokens) == ("length", 10)
        with pytest.raises(ContextLengthExceeded, match="in a context of 100 tokens, got 100"):
            engine.submit(request(tokens(100, 1)))


def test_an_answer_that_no_page_is_left_for_ends_early(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers that may both run to the end of the context share pages for one and a half."""
    monkeypatch.setattr("qwen35_engine.admission.OUTPUT_WINDOW_TOKENS", 64)
    with engine_of(folder, kv_capacity=768, max_context=512, max_concurrency=2, prefix_reuse=False) as engine:
        streams = [engine.submit(request(tokens(64, i), max_tokens=None)) for i in range(2)]
        ends = [list(stream)[-1] for stream in streams]
        totals = engine.stats().totals
    assert [end.reason for end in ends] == ["length", "length"]  # type: ignore[union-attr]
    assert (totals.length, totals.out_of_pages) == (2, 1)
    lengths = sorted(end.usage.completion_tokens for end in ends)  # type: ignore[union-attr]
    assert lengths[0] < 448  # ended for want of a page
    assert lengths[1] == 448  # then the other had room to the end of its context


@pytest.mark.parametrize("bad", [[-1], [VOCAB], [2**40]])
def test_tokens_outside_the_vocabulary_are_refused(engine: Engine, bad: list[int]) -> None:
    with pytest.raises(RequestError, match="token ids must be"):
        engine.submit(request([1, *bad]))


def test_log_probabilities_are_those_of_transformers(engine: Engine) -> None:
    prompt = tokens(50, 40)
    events = list(engine.submit(request(prompt, 5, logprobs=4)))
    drawn = [(i, entry) for e in events if isinstance(e, NewTokens) for i, entry in zip(e.ids, e.logprobs, strict=True)]
    whole = [*prompt, *(i for i, _ in drawn)]
    expected = tiny_checkpoints.oracle_log_probabilities(tiny_checkpoints.oracle(seed=5), whole)[49:-1]
    assert len(drawn) == 5
    for (i, entry), row in zip(drawn, expected, strict=True):
        assert entry.drawn == pytest.approx(float(row[i]), abs=1e-4)
        assert [token for token, _ in entry.top] == row.topk(4).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
    assert all(not e.logprobs for e in engine.submit(request(prompt, 2)) if isinstance(e, NewTokens))


def test_started_comes_first_and_tells_what_is_skipped(engine: Engine) -> None:
    events = list(engine.submit(request(tokens(70, 30), hints=TapHints(explicit=(69,)))))
    assert events[0] == Started(0)
    events = list(engine.submit(request(tokens(70, 30))))
    assert events[0] == Started(69)


def test_weights_can_be_given_directly(folder: Path) -> None:
    config = read_config(folder)
    weights = load_weights(folder, config, device=torch.device("cpu"), dtype=torch.bfloat16)
    with Engine(config, weights, EngineOptions(threads=1, calibrate=False, kv_capacity=1024)) as engine:
        prompt = tokens(80, 31)
        answer, _ = run(engine, request(prompt, 6))
        assert len(answer) == 6
        assert run(engine, request([*prompt, *answer, 1]))[1].cached_tokens == 85
