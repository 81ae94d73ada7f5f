"""The worker through the engine's public face: its queue, cancels, ends, and faults that concern one or all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import slab_pool
import tiny_checkpoints
from engines import engine_of, request, tokens
from lanes import collect, run
from qwen35_engine import (
    Engine,
    EngineClosed,
    ExecutionError,
    Failed,
    Finished,
    NewTokens,
    QueueFull,
    SamplingRow,
    TapHints,
)
from slab_pool import Copy, Direction, Ticket
from slab_pool.cpu import CpuCopyStream, copy_now


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.save(tiny_checkpoints.oracle(seed=5), tmp_path_factory.mktemp("model"))


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
        with pytest.raises(QueueFull, match="at most 2 requests may wait"):
            engine.require_room()
        assert engine.stats().refused["queue_full"] == 2
        gate.open.set()
        for stream in streams:
            assert collect(stream)[0] == [3] * 4
        engine.require_room()
        collect(engine.submit(request([1, 2])))
    with pytest.raises(EngineClosed):
        engine.require_room()
    assert engine.stats().refused["queue_full"] == 2


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
            assert time.monotonic() < end, "the worker did not look whether the copies have landed"
        stats = engine.stats()
        cached = stats.index.device_blocks + stats.index.device_tails
        assert stats.index.evictable_device_pages == cached
        assert stats.cache.pages_free + cached == stats.cache.pages_total


def test_a_cancel_that_runs_out_of_memory_does_not_end_the_engine(folder: Path) -> None:
    gate = Gate()
    with engine_of(folder, gate, max_concurrency=1, host_cache_mib=8) as engine:
        host = engine.parts.host
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

        real = engine.parts.model.decode
        poison(engine.parts.model, "decode", one_row)
        streams = [engine.submit(request(prompt, 12)) for prompt in prompts]
        events = [list(stream) for stream in streams]
        failed = [isinstance(list_[-1], Failed) for list_ in events]
        assert failed.count(True) == 1
        ill, well = failed.index(True), failed.index(False)
        assert isinstance(events[ill][-1].error, ExecutionError)  # type: ignore[union-attr]
        ids = [i for event in events[well] if isinstance(event, NewTokens) for i in event.ids]
        assert ids == expected[well]
        engine.parts.model.decode = real  # type: ignore[method-assign]
        # The prompt's own pass was sound, and so is the snapshot it took before its last token; nothing later is there.
        again, usage = run(engine, request(prompts[ill], 12))
        assert (again, usage.cached_tokens) == (expected[ill], 99)


def test_a_prefill_that_raises_fails_its_request_only(folder: Path) -> None:
    with engine_of(folder) as engine:
        model = engine.parts.model
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
    real = engine.parts.model.decode

    def broken(**arguments: Any) -> torch.Tensor:
        if len(arguments["tokens"]) > 1:
            raise ValueError("whose fault?")
        return real(**arguments)

    engine.parts.model.decode = broken  # type: ignore[method-assign]


def memory_is_out(engine: Engine) -> None:
    """Once, in the third pass over a prompt."""
    real, passes = engine.parts.model.prefill, count(1)

    def broken(**arguments: Any) -> torch.Tensor:
        if next(passes) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return real(**arguments)

    engine.parts.model.prefill = broken  # type: ignore[method-assign]


def the_cache_fails(engine: Engine) -> None:
    """Once, while a lane is being ended."""
    real, ends = engine.parts.cache.write_through.start, count(1)  # type: ignore[union-attr]

    def broken(lane: Any) -> None:
        if next(ends) == 2:
            raise KeyError("a bug")
        real(lane)

    engine.parts.cache.write_through.start = broken  # type: ignore[union-attr, method-assign]


@pytest.mark.parametrize("fault", [decode_fails_for_two, memory_is_out, the_cache_fails], ids=lambda f: f.__name__)
def test_a_fault_that_spares_no_request_answers_all_and_the_engine_goes_on(
    folder: Path, fault: Callable[[Engine], None]
) -> None:
    prompts = [tokens(100, seed) for seed in (60, 61, 62, 63)]
    gate = Gate()
    with engine_of(folder, prefix_reuse=False) as cold:
        expected = [run(cold, request(prompt, 12))[0] for prompt in prompts]
    with engine_of(folder, max_concurrency=2, host_cache_mib=64) as engine:
        run(engine, request(prompts[0], 12))
        fault(engine)
        sampler = engine.parts.loop.runner.sampler
        engine.parts.loop.runner.sampler = gate
        streams = [engine.submit(request(prompt, 12)) for prompt in prompts]
        assert gate.reached.wait(timeout=60)
        engine.parts.loop.runner.sampler = sampler
        gate.open.set()
        ends = [list(stream)[-1] for stream in streams]
        failed = [end for end in ends if isinstance(end, Failed)]
        assert failed
        assert all(isinstance(end.error, ExecutionError) and "start afresh" in str(end.error) for end in failed)
        if fault is decode_fails_for_two:
            model = engine.parts.model
            model.decode = type(model).decode.__get__(model)  # type: ignore[method-assign]
        assert engine.is_open
        for prompt, answer in zip(prompts, expected, strict=True):
            again, usage = run(engine, request(prompt, 12))
            assert (again, usage.cached_tokens) == (answer, 0), "the cache was not emptied"
        assert run(engine, request([*prompts[0], *expected[0]], 1))[1].cached_tokens == 111


def test_a_cache_that_cannot_be_emptied_ends_the_engine_and_answers_everyone(folder: Path) -> None:
    def broken(*_: Any) -> list[int]:
        raise KeyError("a bug")

    engine = engine_of(folder, broken)
    engine.parts.cache.allocator.slots.take(1)  # without an owner: it has been lost
    end = list(engine.submit(request([1, 2])))[-1]
    assert isinstance(end, Failed)
    while engine.is_open:  # the answer comes before the end
        pass
    with pytest.raises(EngineClosed):
        engine.submit(request([1]))
    engine.close()
