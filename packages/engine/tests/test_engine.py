"""The engine through its public face: many lanes, reuse, limits, cancels, failures."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import slab_pool
import tiny_checkpoints
from lanes import ForcingSampler, assert_same_predictions, collect, run
from qwen35_engine import (
    ContextLengthExceeded,
    Engine,
    EngineClosed,
    EngineOptions,
    ExecutionError,
    Failed,
    Finished,
    GenerationRequest,
    NewTokens,
    QueueFull,
    RequestError,
    SamplingParams,
    SamplingRow,
    Started,
    TapHints,
)
from qwen35_engine.checkpoint.config import read_config
from qwen35_engine.model.weights import load_weights
from slab_pool import Copy, Direction, Ticket
from slab_pool.cpu import CpuCopyStream, copy_now

GREEDY = SamplingParams(temperature=0)
VOCAB = tiny_checkpoints.BASE["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.save(tiny_checkpoints.oracle(seed=5), tmp_path_factory.mktemp("model"))


def engine_of(folder: Path, sampler: Any = None, **options: Any) -> Engine:
    return Engine.from_folder(
        folder, EngineOptions(**({"threads": 1, "kv_capacity": 8192, "host_cache_mib": 0} | options)), sampler=sampler
    )


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with engine_of(folder) as engine:
        yield engine


def tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def request(prompt: Sequence[int], max_tokens: int = 4, **changes: Any) -> GenerationRequest:
    return GenerationRequest(**({"tokens": prompt, "max_tokens": max_tokens, "sampling": GREEDY} | changes))


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
            lanes = {lane.job.seed: lane.memory for lane in engine._worker._core._lanes.values()}
            states = engine._model._memory.states
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
        index = warm._cache.index
        warm.close()
        index.hand_over()
        index.check_invariants()
        freed = index.evict_device(stats.pages_total - stats.pages_free)
        assert len(freed.pages) == stats.pages_total - stats.pages_free
        assert len(freed.slots) == stats.snapshot_slots_used


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
    monkeypatch.setattr("qwen35_engine.core.OUTPUT_WINDOW_TOKENS", 64)
    with engine_of(folder, kv_capacity=768, max_context=512, max_concurrency=2, prefix_reuse=False) as engine:
        streams = [engine.submit(request(tokens(64, i), max_tokens=None)) for i in range(2)]
        ends = [list(stream)[-1] for stream in streams]
    assert [end.reason for end in ends] == ["length", "length"]  # type: ignore[union-attr]
    lengths = sorted(end.usage.completion_tokens for end in ends)  # type: ignore[union-attr]
    assert lengths[0] < 448  # ended for want of a page
    assert lengths[1] == 448  # then the other had room to the end of its context


@pytest.mark.parametrize("bad", [[-1], [VOCAB], [2**40]])
def test_tokens_outside_the_vocabulary_are_refused(engine: Engine, bad: list[int]) -> None:
    with pytest.raises(RequestError, match="token ids must be"):
        engine.submit(request([1, *bad]))


class Gate:
    """A sampler that holds the worker at its first draw until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        self.reached.set()
        assert self.open.wait(timeout=60)
        return [3] * len(rows)


def test_the_queue_is_bounded(folder: Path) -> None:
    gate = Gate()
    with engine_of(folder, gate, max_concurrency=1, max_pending=2) as engine:
        streams = [engine.submit(request([1, 2]))]
        assert gate.reached.wait(timeout=60)
        streams += [engine.submit(request([1, 2])) for _ in range(2)]
        with pytest.raises(QueueFull, match="at most 2 requests may wait"):
            engine.submit(request([1, 2]))
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.refused["queue_full"]) == (1, 2, 1)
        gate.open.set()
        for stream in streams:
            assert collect(stream)[0] == [3] * 4
        collect(engine.submit(request([1, 2])))


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


# ---- cancel, close, failure -------------------------------------------------------------------------------------


def test_cancel_while_waiting_and_while_running(folder: Path) -> None:
    gate = Gate()
    with engine_of(folder, gate, max_concurrency=1) as engine:
        running, waiting = engine.submit(request([1, 2], 100)), engine.submit(request([1, 2], 100))
        assert gate.reached.wait(timeout=60)
        waiting.cancel()
        running.cancel()
        gate.open.set()
        for stream in (waiting, running):
            end = list(stream)[-1]
            assert isinstance(end, Finished)
            assert end.reason == "cancelled"
            assert end.usage.completion_tokens < 100
        assert engine.stats().running == engine.stats().waiting == 0
        running.cancel()  # after the end: nothing happens


def test_a_notify_that_raises_is_its_own_requests_business(folder: Path) -> None:
    calls = []

    def notify() -> None:
        calls.append(1)
        raise ZeroDivisionError

    with engine_of(folder) as engine:
        other = engine.submit(request(tokens(40, 1), 30))
        stream = engine.submit(request(tokens(40, 2), 3), notify=notify)
        assert len(collect(stream)[0]) == 3
        assert len(collect(other)[0]) == 30
    assert len(calls) == 1


def test_an_idle_engine_settles_what_lands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long after the last request has ended, nothing of it is held or shown as held."""
    open_gate = threading.Event()

    def copy(copies: Sequence[Copy], direction: Direction) -> None:
        assert open_gate.wait(timeout=60)
        copy_now(copies, direction)

    monkeypatch.setattr(slab_pool, "open_copy_stream", lambda _: CpuCopyStream(copy=copy))
    with engine_of(folder, host_cache_mib=8) as engine:
        collect(engine.submit(request(tokens(200, 3))))
        assert engine.stats().index.fills_in_flight > 0
        open_gate.set()
        end = time.monotonic() + 60
        while engine.stats().index.fills_in_flight:
            assert time.monotonic() < end, "nobody looked whether the copies have landed"
        stats = engine.stats()
        cached = stats.index.device_blocks + stats.index.device_tails
        assert stats.index.evictable_device_pages == cached
        assert stats.cache.pages_free + cached == stats.cache.pages_total


def test_a_cancel_that_runs_out_of_memory_does_not_end_the_engine(folder: Path) -> None:
    gate = Gate()
    with engine_of(folder, gate, max_concurrency=1, host_cache_mib=8) as engine:
        host = engine._host
        assert host is not None
        real, failures = host.write, [MemoryError()]

        def write(*what: Any) -> Ticket:
            if failures:
                raise failures.pop()
            return real(*what)

        host.write = write  # type: ignore[method-assign]
        running = engine.submit(request([1, 2], 100))
        assert gate.reached.wait(timeout=60)
        running.cancel()
        gate.open.set()
        end = list(running)[-1]
        assert isinstance(end, Failed)
        assert isinstance(end.error, ExecutionError)
        collect(engine.submit(request([1, 2])))


def test_a_cancelled_prompt_leaves_what_it_computed(folder: Path) -> None:
    prompt = tokens(600, 12)
    with engine_of(folder, prefill_chunk=64) as engine:
        model = engine._model
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


def test_close_answers_everyone(folder: Path) -> None:
    gate = Gate()
    engine = engine_of(folder, gate, max_concurrency=1)
    streams = [engine.submit(request([1, 2], 50)) for _ in range(3)]
    assert gate.reached.wait(timeout=60)
    closer = threading.Thread(target=engine.close)
    closer.start()
    while engine.is_open:  # the flag is set before the worker is let go
        pass
    gate.open.set()
    closer.join(timeout=60)
    for stream in streams:
        end = list(stream)[-1]
        assert isinstance(end, Failed)
        assert isinstance(end.error, EngineClosed)
    with pytest.raises(EngineClosed):
        engine.submit(request([1]))
    engine.close()


def poison(model: Any, method: str, bad_slot_of: Any) -> None:
    """Make one lane's hidden state NaN in each pass that runs it."""
    real = getattr(model, method)

    def poisoned(**arguments: Any) -> torch.Tensor:
        hidden = real(**arguments)
        return bad_slot_of(arguments, hidden)

    setattr(model, method, poisoned)


def test_a_lane_that_turns_nan_ends_alone_and_leaves_nothing(folder: Path) -> None:
    prompts = [tokens(100, seed) for seed in (20, 21)]
    with engine_of(folder, prefix_reuse=False) as engine:
        expected = [run(engine, request(prompt, 12))[0] for prompt in prompts]
    with engine_of(folder) as engine:

        def one_row(arguments: dict[str, Any], hidden: torch.Tensor) -> torch.Tensor:
            if len(hidden) == 2 and int(arguments["positions"].max()) >= 105:
                hidden = hidden.clone()
                hidden[0] = float("nan")
            return hidden

        real = engine._model.decode
        poison(engine._model, "decode", one_row)
        streams = [engine.submit(request(prompt, 12)) for prompt in prompts]
        events = [list(stream) for stream in streams]
        failed = [isinstance(list_[-1], Failed) for list_ in events]
        assert failed.count(True) == 1
        ill, well = failed.index(True), failed.index(False)
        assert isinstance(events[ill][-1].error, ExecutionError)  # type: ignore[union-attr]
        ids = [i for event in events[well] if isinstance(event, NewTokens) for i in event.ids]
        assert ids == expected[well]
        engine._model.decode = real  # type: ignore[method-assign]
        # The prompt's own pass was sound, and so is the snapshot it took before its last token; nothing later is there.
        again, usage = run(engine, request(prompts[ill], 12))
        assert (again, usage.cached_tokens) == (expected[ill], 99)


def test_a_prefill_that_raises_fails_its_request_only(folder: Path) -> None:
    with engine_of(folder) as engine:
        model = engine._model
        real = model.prefill

        def broken(**arguments: Any) -> torch.Tensor:
            if arguments["tokens"].shape[0] == 77:
                raise ValueError("a bug")
            return real(**arguments)

        model.prefill = broken  # type: ignore[method-assign]
        before = engine.stats().cache
        end = list(engine.submit(request(tokens(77, 1), hints=TapHints(explicit=(50,)))))[-1]
        assert isinstance(end, Failed)
        assert isinstance(end.error, ExecutionError)
        assert engine.stats().cache == before
        assert len(run(engine, request(tokens(78, 1)))[0]) == 4
        assert engine.is_open


def decode_fails_for_two(engine: Engine) -> None:
    real = engine._model.decode

    def broken(**arguments: Any) -> torch.Tensor:
        if len(arguments["tokens"]) > 1:
            raise ValueError("whose fault?")
        return real(**arguments)

    engine._model.decode = broken  # type: ignore[method-assign]


def memory_is_out(engine: Engine) -> None:
    """Once, in the third pass over a prompt."""
    real, passes = engine._model.prefill, count(1)

    def broken(**arguments: Any) -> torch.Tensor:
        if next(passes) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return real(**arguments)

    engine._model.prefill = broken  # type: ignore[method-assign]


def the_cache_fails(engine: Engine) -> None:
    """Once, while a lane is being ended."""
    real, ends = engine._cache._backup.write_through, count(1)  # type: ignore[union-attr]

    def broken(lane: Any) -> None:
        if next(ends) == 2:
            raise KeyError("a bug")
        real(lane)

    engine._cache._backup.write_through = broken  # type: ignore[union-attr, method-assign]


@pytest.mark.parametrize("fault", [decode_fails_for_two, memory_is_out, the_cache_fails], ids=lambda f: f.__name__)
def test_a_fault_that_spares_nobody_answers_everyone_and_the_engine_goes_on(
    folder: Path, fault: Callable[[Engine], None]
) -> None:
    prompts = [tokens(100, seed) for seed in (60, 61, 62, 63)]
    gate = Gate()
    with engine_of(folder, prefix_reuse=False) as cold:
        expected = [run(cold, request(prompt, 12))[0] for prompt in prompts]
    with engine_of(folder, max_concurrency=2, host_cache_mib=64) as engine:
        run(engine, request(prompts[0], 12))
        fault(engine)
        sampler = engine._worker._core._sampler
        engine._worker._core._sampler = gate
        streams = [engine.submit(request(prompt, 12)) for prompt in prompts]
        assert gate.reached.wait(timeout=60)
        engine._worker._core._sampler = sampler
        gate.open.set()
        ends = [list(stream)[-1] for stream in streams]
        failed = [end for end in ends if isinstance(end, Failed)]
        assert failed
        assert all(isinstance(end.error, ExecutionError) and "start afresh" in str(end.error) for end in failed)
        if fault is decode_fails_for_two:
            engine._model.decode = type(engine._model).decode.__get__(engine._model)  # type: ignore[method-assign]
        assert engine.is_open
        for prompt, answer in zip(prompts, expected, strict=True):
            again, usage = run(engine, request(prompt, 12))
            assert (again, usage.cached_tokens) == (answer, 0), "the cache was not emptied"
        assert run(engine, request([*prompts[0], *expected[0]], 1))[1].cached_tokens == 111


def test_a_cache_that_cannot_be_emptied_ends_the_engine_and_answers_everyone(folder: Path) -> None:
    def broken(*_: Any) -> list[int]:
        raise KeyError("a bug")

    engine = engine_of(folder, broken)
    engine._cache._space.slots.take(1)  # nobody's: it has been lost
    end = list(engine.submit(request([1, 2])))[-1]
    assert isinstance(end, Failed)
    while engine.is_open:  # the answer comes before the end
        pass
    with pytest.raises(EngineClosed):
        engine.submit(request([1]))
    engine.close()


def test_started_comes_first_and_tells_what_is_skipped(engine: Engine) -> None:
    events = list(engine.submit(request(tokens(70, 30), hints=TapHints(explicit=(69,)))))
    assert events[0] == Started(0)
    events = list(engine.submit(request(tokens(70, 30))))
    assert events[0] == Started(69)


def test_weights_can_be_given_directly(folder: Path) -> None:
    config = read_config(folder)
    weights = load_weights(folder, config, device=torch.device("cpu"), dtype=torch.bfloat16)
    with Engine(config, weights, EngineOptions(threads=1, kv_capacity=1024)) as engine:
        prompt = tokens(80, 31)
        answer, _ = run(engine, request(prompt, 6))
        assert len(answer) == 6
        assert run(engine, request([*prompt, *answer, 1]))[1].cached_tokens == 85
