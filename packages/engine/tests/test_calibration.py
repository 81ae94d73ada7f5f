"""Calibration finds the coefficients of a machine that behaves as the cost model says, and is remembered."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from cache_bench import Bench, small_memory
from loop_rig import Rig, tokens_of
from prefix_index import CostModel
from qwen35_engine import Engine, EngineOptions
from qwen35_engine.calibration import (
    Calibration,
    CopyRate,
    RankingCost,
    calibrate,
    calibrate_model,
    calibration_file,
    measure_prefill,
    remember,
)
from qwen35_engine.checkpoint.config import read_config
from qwen35_engine.demo import demo_folder

GIB = 1 << 30
SOME = Calibration(chunk_tokens=512, chunk_seconds=0.25, token_seconds=0.001, pair_seconds=1e-8)


class Machine:
    """Takes as long as a cost model says, by its own clock, and longer the first time."""

    def __init__(self, cost: CostModel, *, first_is_slower: float = 1.0) -> None:
        self.cost = cost
        self.now = 100.0
        self.runs: list[tuple[int, int]] = []
        self._first_is_slower = first_is_slower

    def run(self, base: int, num_tokens: int) -> None:
        seconds = self.cost.prefill_seconds(base, num_tokens)
        first = (base, num_tokens) not in self.runs
        self.runs.append((base, num_tokens))
        self.now += seconds * (self._first_is_slower if first else 1.0)

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("first_is_slower", [1.0, 7.0])
def test_a_machine_of_known_cost_is_found(first_is_slower: float) -> None:
    seed = 3
    print("seed", seed)
    numbers = random.Random(seed)
    for _ in range(50):
        cost = CostModel(
            chunk_tokens=numbers.choice((64, 300, 1024)),
            chunk_seconds=numbers.choice((0.0, 0.02)),
            token_seconds=10 ** numbers.uniform(-6, -4),
            pair_seconds=numbers.choice((0.0, 1e-9, 1e-8)),
        )
        machine = Machine(cost, first_is_slower=first_is_slower)
        found = measure_prefill(machine.run, chunk_tokens=cost.chunk_tokens, max_history=5000, clock=machine.clock)
        for base, length in ((0, 10), (0, 4000), (30_000, 700)):
            assert found.cost_model().prefill_seconds(base, length) == pytest.approx(
                cost.prefill_seconds(base, length), rel=1e-3
            )
        assert max(base + length for base, length in machine.runs) <= 5000 + cost.chunk_tokens


def test_without_a_history_pairs_cost_nothing() -> None:
    machine = Machine(CostModel(token_seconds=1e-3, pair_seconds=1e-9))
    found = measure_prefill(machine.run, chunk_tokens=256, max_history=0, clock=machine.clock)
    assert found.pair_seconds == 0
    assert {base for base, _ in machine.runs} == {0}


def test_a_slow_machine_is_not_kept_busy() -> None:
    machine = Machine(CostModel(token_seconds=1.0))
    found = measure_prefill(machine.run, chunk_tokens=1024, max_history=4096, clock=machine.clock)
    assert machine.runs == [(0, 256)]
    assert found.token_seconds == 1.0
    assert found.chunk_seconds == found.pair_seconds == 0


def test_noise_never_makes_a_coefficient_negative() -> None:
    seed = 4
    print("seed", seed)
    numbers = random.Random(seed)
    for _ in range(300):
        now = 0.0

        def run(base: int, num_tokens: int) -> None:
            nonlocal now
            now += numbers.uniform(1e-6, 0.1)

        found = measure_prefill(run, chunk_tokens=256, max_history=1024, clock=lambda: now)  # noqa: B023
        assert found.token_seconds > 0
        assert min(found.chunk_seconds, found.pair_seconds) >= 0


def test_a_chunk_of_one_token() -> None:
    machine = Machine(CostModel(token_seconds=0.01))
    found = measure_prefill(machine.run, chunk_tokens=1, max_history=10, clock=machine.clock)
    assert found.token_seconds == pytest.approx(0.01)


def test_the_rate_of_copies_follows_the_copies() -> None:
    rate = CopyRate()
    assert rate.bytes_per_second is None
    rate.add(1000, 1.0)  # too small to tell
    rate.add(GIB, 0.0)  # took no measurable time
    assert rate.bytes_per_second is None
    rate.add(GIB, 0.5)
    assert rate.bytes_per_second == pytest.approx(2 * GIB)
    for _ in range(20):
        rate.add(GIB, 0.25)
    assert rate.bytes_per_second == pytest.approx(4 * GIB, rel=1e-3)


def test_many_small_copies_weigh_as_much_as_a_large_one() -> None:
    large, small = CopyRate(1e9), CopyRate(1e9)
    large.add(GIB, 0.1)
    for _ in range(64):
        small.add(GIB // 64, 0.1 / 64)
    assert small.bytes_per_second == pytest.approx(large.bytes_per_second)


def test_a_rate_that_was_given_gives_way() -> None:
    rate = CopyRate(1e9)
    assert rate.bytes_per_second == pytest.approx(1e9)
    rate.add(GIB, 0.1)
    assert 1e9 < (rate.bytes_per_second or 0) < GIB / 0.1


def test_ranking_follows_the_copies_and_the_plain_model_does_not() -> None:
    copies = CopyRate()
    plain = SOME.cost_model()
    ranking = RankingCost.of(plain, copies)
    assert ranking.restore_seconds(GIB) == plain.restore_seconds(GIB)
    assert ranking.prefill_seconds(100, 700) == plain.prefill_seconds(100, 700)
    before = plain.restore_seconds(GIB)
    copies.add(GIB, 2.0)
    assert ranking.restore_seconds(GIB) == pytest.approx(2.0 + plain.batch_seconds)
    assert ranking.restore_seconds(0) == 0
    assert plain.restore_seconds(GIB) == before


def test_it_is_measured_once_and_remembered(tmp_path: Path) -> None:
    path = calibration_file(tmp_path, "model", 2)
    measured = []

    def measure() -> Calibration:
        measured.append(1)
        return SOME

    assert calibrate(path, measure) == calibrate(path, measure) == SOME
    assert measured == [1]
    copies = CopyRate(3e9)
    remember(path, SOME, copies)
    again = calibrate(path, measure)
    assert again.bytes_per_second == pytest.approx(3e9)
    assert again.cost_model().bytes_per_second == pytest.approx(3e9)
    assert measured == [1]
    assert list(tmp_path.iterdir()) == [path]


def test_another_checkpoint_or_machine_is_measured_anew(tmp_path: Path) -> None:
    names = {calibration_file(tmp_path, *what) for what in (("a", 1), ("a", 2), ("b", 1), ("a1",))}
    assert len(names) == 4
    assert calibration_file(tmp_path, "a", 1) in names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "{}",
        '{"chunk_tokens": 0, "chunk_seconds": 0, "token_seconds": 1, "pair_seconds": 0}',
        '{"chunk_tokens": 64, "chunk_seconds": NaN, "token_seconds": 1, "pair_seconds": 0}',
        '{"chunk_tokens": 64, "chunk_seconds": -1, "token_seconds": 1, "pair_seconds": 0}',
        '{"chunk_tokens": 64, "chunk_seconds": 0, "token_seconds": 0, "pair_seconds": 0}',
        '{"chunk_tokens": 64, "chunk_seconds": 0, "token_seconds": "1", "pair_seconds": 0}',
        '{"chunk_tokens": 64, "chunk_seconds": 0, "token_seconds": 1, "pair_seconds": 0, "more": 1}',
    ],
)
def test_a_damaged_file_is_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    assert calibrate(path, lambda: SOME) == SOME
    assert Calibration(**json.loads(path.read_text())) == SOME


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_measurement(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert calibrate(file / "calibration.json", lambda: SOME) == SOME
    assert list(tmp_path.iterdir()) == [file]


class Recording:
    """A model that notes what it is asked to compute, and takes the time its arguments say."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int]] = []

    def prefill(self, *, tokens: torch.Tensor, base: int, block_table: torch.Tensor, slot: int) -> torch.Tensor:
        assert slot == 1
        assert int(block_table.min()) == 1
        assert base + len(tokens) <= len(block_table) * 64
        self.chunks.append((base, len(tokens)))
        return torch.zeros(1)


@pytest.mark.parametrize(("max_context", "expected"), [(10_000, (4 * 128, 128)), (300, (172, 128)), (64, None)])
def test_calibrating_a_model_stays_inside_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_context: int, expected: tuple[int, int] | None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory = small_memory(1 + 12, 2)
    memory.pages.fill_(0xFF)
    options = Rig(slabs=0, prefill_chunk=128).options
    options = options.model_copy(update={"max_context": max_context})
    config = read_config(demo_folder())
    model = Recording()
    path, found = calibrate_model(model, memory, config, options)
    histories = {chunk for chunk in model.chunks if chunk[0]}
    assert histories == ({expected} if expected else set())
    assert path.parent == tmp_path / "qwen35"
    assert calibrate_model(model, memory, config, options) == (path, found)
    assert len(model.chunks) == (6 if expected else 4)
    other, _ = calibrate_model(model, memory, config, options.model_copy(update={"threads": 2}))
    assert other != path


def test_an_engine_ranks_by_what_it_measured_and_remembers_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = EngineOptions(threads=1, calibrate=True, prefill_chunk=256, max_context=512, host_cache_mib=16)
    folder = demo_folder()
    with Engine.from_folder(folder, options) as engine:
        measured = engine.parts.cache.cost
        assert measured.token_seconds != CostModel().token_seconds
        assert measured.chunk_tokens == 256
        assert engine.options.calibrate
        engine.parts.cache.copy_rate.add(GIB, 2.0)
    with Engine.from_folder(folder, options) as engine:
        assert engine.parts.cache.cost.token_seconds == measured.token_seconds
        assert engine.parts.cache.cost.bytes_per_second == pytest.approx(GIB / 2)
    assert len(list((tmp_path / "qwen35").iterdir())) == 1


@pytest.mark.parametrize("chunk_seconds", [0.0, 1.0])
def test_an_endpoint_just_behind_a_tap_does_not_displace_it_where_chunks_cost_much(chunk_seconds: float) -> None:
    calibration = Calibration(chunk_tokens=96, chunk_seconds=chunk_seconds, token_seconds=0.001, pair_seconds=0.0)
    rig = Rig(snapshots=1, max_taps=1, calibration=calibration)
    prompt = list(range(1, 91))
    skipped = [rig.ask(prompt, 4).reuse.cached_tokens for _ in range(2)]
    assert skipped == [0, 89]


def test_restores_that_landed_set_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(slabs=60)
    seen: list[int] = []
    monkeypatch.setattr(bench.cache.copy_rate, "add", lambda num_bytes, seconds: seen.append(num_bytes))
    history = tokens_of(1, 200)
    bench.on_host_only(history)
    assert not seen, "a write-through is not a restore"
    lane = bench.admit([*history, 1])
    assert lane is not None
    assert lane.restore is not None
    bench.reads.land_all()
    bench.cache.transfers.poll()
    assert seen == [lane.restore.num_bytes]
