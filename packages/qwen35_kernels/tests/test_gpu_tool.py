"""The script for a card, as far as it goes without one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "tools" / "gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)


def test_a_dry_run_collects_the_tests_and_prints_every_line_of_the_table() -> None:
    result = run("--dry-run")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    for line in ("delta prefill", "delta step", "rms_norm"):
        assert f"\n{line}" in result.stdout
    for profile in ("bf16", "int8", "fp8", "nvfp4", "k8v4"):
        for op in ("store", "attention prefill", "attention decode"):
            assert f"\n{op} {profile}" in result.stdout
    assert result.stdout.count("SDPA / ours") == 10
    assert "not measured" not in result.stdout
    assert "test_delta_rule.py::test_prefill_matches_the_recurrence" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_nothing_is_run() -> None:
    result = run()
    assert result.returncode == 1
    assert result.stdout.startswith("no CUDA device")
