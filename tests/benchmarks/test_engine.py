"""The bench runs and prints every number it promises; what they are is not for a test to say."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import engine as bench
from benchmarks.engine_model import ModelSizes
from benchmarks.engine_storage import StorageSizes

NUMBERS = (
    "prefill_ratio",
    "decode_1_ratio",
    "decode_8_ratio",
    "warm_ttft_ratio",
    "step_overhead_us",
    "restore_bandwidth_ratio",
    "quote_stage_240k_p99_ms",
)
TINY = bench.Sizes(
    ModelSizes(prompt=80, context=8, steps=2, history=70, new=5, prefill_turns=1, decode_turns=1, warm_turns=1),
    StorageSizes(restored=256, prompt=1000, edges=3, restores=1, admissions=2),
)


def test_the_quick_bench_prints_one_object_with_every_number(monkeypatch):
    monkeypatch.setattr(bench, "QUICK", TINY)
    threads = torch.get_num_threads()
    written: list[str] = []
    try:
        bench.main(["--quick", "--threads", "1"], written.append)
    finally:
        torch.set_num_threads(threads)
    (text,) = written
    result = json.loads(text)
    for name in NUMBERS:
        assert isinstance(result[name], float), name
        assert math.isfinite(result[name]), name
        assert result[name] > 0, name
    assert result["threads"] == 1
    assert result["quick"] is True
    assert isinstance(result["load"], float)
    assert isinstance(result["contended"], bool)
    assert result["contended"] == bool(result["details"]["contended"])
    for name, value in result["details"]["cpu_time"].items():
        assert name in NUMBERS
        assert value > 0


def test_without_transformers_the_bench_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(RuntimeError, match="the bench compares with transformers, which cannot be imported"):
        bench.measure(TINY)
