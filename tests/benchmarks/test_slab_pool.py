"""The bench runs and prints every number it promises; what they are is not for a test to say."""

import json
import math
import os

import torch

from benchmarks import slab_pool as bench

PROMISED = ("acquire_release_us", "plan_runs_4096_us", "copy_bandwidth_ratio", "save_ratio", "load_ratio")


def test_the_quick_bench_prints_one_object_with_every_number(tmp_path):
    threads = torch.get_num_threads()
    written = []
    try:
        bench.main(["--quick", "--device", "cpu", "--folder", str(tmp_path)], written.append)
    finally:
        torch.set_num_threads(threads)
    (text,) = written
    result = json.loads(text)
    for name in PROMISED:
        assert math.isfinite(result[name]), name
        assert result[name] > 0, name
    assert result["threads"] == 1
    assert isinstance(result["contended"], bool)
    ratios = result["details"]["copies"]["ratio"]
    assert len(ratios) == len(result["details"]["copies"]["cpu_time_ratio"]) == 12
    assert result["copy_bandwidth_ratio"] == min(ratios.values())
    assert os.listdir(tmp_path) == []
