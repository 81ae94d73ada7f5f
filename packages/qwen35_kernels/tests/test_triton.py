"""The Triton kernels without a GPU: run by the interpreter, and compiled for two generations of cards.

Both need processes of their own: the interpreter is chosen before triton is imported, and nothing compiles
under it.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: the torch path is complete"
)

# The same tests that judge the torch implementations, with the backend forced: a choice that the
# interpreter, at some milliseconds a program, gets through in a minute. `tools/gpu.py` runs them all on a
# card.
_CORE = (
    "test_delta_rule and (65-1-heads1-dtype0 or merge or taps_change)"
    " or test_conv and (taps_equal and dtype0 or 130-4-dtype0)"
    " or test_attention and (merging or matches and 6-dtype0-int8)"
    " or test_records and round_trip and int8 or test_moe and 37-dtype0"
)
INTERPRETED = {
    "natural": (
        "test_delta_rule and (has_the_bits and 1 or identity or 65-1-heads1 or 0-3-heads1 or step_matches and heads1)"
        " or test_conv and (taps_equal or 3-4 or 130-4 or steps_match)"
        " or test_norms and matches or test_mlp and matches or test_rotary and matches and 16"
        " or test_moe and (37 or shared or one_expert)"
        " or test_records"
        # fp8 rows are read by the code that reads the keys of k8v4.
        " or test_attention and (matches_the_oracle and 6-dtype0 and not fp8 or partitions or gate)"
        " or test_kv_store and (nearest or named_rows or finite)"
        " or gibibytes and not nvfp4"
    ),
    "reversed": _CORE,
    "shuffled": _CORE,
}
FILES = "delta_rule conv norms mlp rotary moe attention kv_store".split()


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("order", INTERPRETED)
def test_interpreted_kernels_pass_the_tests_of_their_ops(order: str) -> None:
    files = [f"test_{name}.py" for name in FILES]
    result = run(
        ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, "-k", INTERPRETED[order]],
        TRITON_INTERPRET="1",
        QWEN35_KERNELS_BACKEND="triton",
        QWEN35_TEST_PROGRAM_ORDER=order,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout


# Shared memory of one block: 227 KiB on sm_90, 99 KiB on sm_120. The compiler itself refuses nothing.
SHARED_BYTES = {90: 227 * 1024, 120: 99 * 1024}
# Bytes of stack (spilled registers) of kernels that are allowed some, with what was measured when they were
# listed. Hot kernels with bf16 operands and pages: none. Quantised prefill holds two halves of a
# dequantised page.
STACK_BYTES = {
    90: {
        "attend_prefill/int8": 88,
        "attend_prefill/fp8": 56,
        "attend_prefill/nvfp4": 96,
        "attend_prefill/k8v4": 128,
        "attend_decode/k8v4": 16,
    },
    120: {
        "attend_prefill/int8": 32,
        "attend_prefill/fp8": 48,
        "attend_prefill/nvfp4": 40,
        "attend_prefill/k8v4": 32,
        "attend_decode/k8v4": 24,
    },
}
HOT = ("delta_prepare", "delta_scan", "delta_step", "attend_prefill", "attend_decode", "conv_prefill", "conv_step")


def problems(kernel: dict[str, Any], capability: int) -> list[str]:
    """What is wrong with one compiled kernel."""
    found = []
    if kernel["promises_fp32"] and kernel["single_pass_tf32"]:
        found.append("single-pass tf32 where float32 is promised")
    if "shared" not in kernel:
        return found
    if kernel["shared"] > SHARED_BYTES[capability]:
        found.append(f"{kernel['shared']} bytes of shared memory")
    profile = kernel["label"].rpartition("/")[2]
    name = kernel["kernel"]
    usual = 0 if name in HOT and not kernel["promises_fp32"] else 256
    allowed = STACK_BYTES[capability].get(f"{name}/{profile}", usual)
    if kernel["stack"] > allowed:
        found.append(f"{kernel['stack']} bytes of stack, {allowed} allowed")
    return found


@pytest.mark.compile
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_within_its_means(capability: int) -> None:
    # The choice is ours, launch by launch; the variable only keeps the compiler from warning that it was
    # made.
    result = run(["compile_checks.py", str(capability)], TRITON_DEFAULT_FP_FUSION="0", TRITON_INTERPRET="0")
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads(result.stdout)
    names = {kernel["kernel"] for kernel in report["kernels"]}
    assert len(names) == 17, sorted(names)
    wrong = {f"{k['label']} {k['kernel']}": problems(k, capability) for k in report["kernels"]}
    assert {name: found for name, found in wrong.items() if found} == {}
    # Small instances of the kernels that are too large in float32 to be compiled: three passes for every one.
    assert set(report["passes"]) == {"delta_prepare", "delta_scan", "attend_prefill", "attend_decode"}
    for name, (single, triple) in report["passes"].items():
        assert triple == 3 * single > 0, f"{name}: {triple} tf32 products where one pass needs {single}"
    # And the checks can fail: this one breaks every rule.
    bad = {**report["oversized"], "promises_fp32": True}
    assert bad["tf32_instructions"] > 0
    assert len(problems(bad, capability)) == 3
