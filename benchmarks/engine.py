"""``python -m benchmarks.engine``: the engine's speed on this machine, as one JSON object.

Every ratio is one of medians, the two sides having taken turns in one process, and is above 1 where ours is faster;
``warm_ttft_ratio`` alone is our time over the other. ``"contended": true`` says that some times varied by more than
30 % around their median, so that they tell more of the machine's other work than of the engine. For that case the
details hold the same ratios of processor times, which other processes disturb less; they mean something on one thread
only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import command_line, load, write_result
from benchmarks.engine_model import ModelBench, ModelSizes
from benchmarks.engine_storage import StorageSizes, admission_times, restore_times
from benchmarks.timing import Times, frozen_heap, percentile

__all__ = ["FULL", "QUICK", "Sizes", "main", "measure"]


@dataclass(frozen=True)
class Sizes:
    model: ModelSizes
    storage: StorageSizes


FULL = Sizes(
    ModelSizes(prefill_turns=5, decode_turns=4, warm_turns=15),
    StorageSizes(restores=20, admissions=1000),
)
QUICK = Sizes(
    ModelSizes(prompt=1024, steps=16, history=1000, prefill_turns=2, decode_turns=1, warm_turns=3),
    StorageSizes(restored=16_384, restores=6, admissions=200),
)


def measure(sizes: Sizes, *, threads: int = 1) -> dict[str, Any]:
    """Everything, as the object that is printed. Sets torch's number of threads.

    Raises:
        RuntimeError: transformers cannot be imported.
    """
    torch.set_num_threads(threads)
    load_before = load()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = ModelBench(folder, sizes.model, threads=threads)
        with frozen_heap():
            result: dict[str, Any] = {
                "prefill_ratio": model.prefill_ratio(),
                "decode_1_ratio": model.decode_ratio(1),
                "decode_8_ratio": model.decode_ratio(8),
                "warm_ttft_ratio": model.warm_ttft_ratio(),
                "step_overhead_us": model.step_overhead_us(1),
            }
            restores = restore_times(folder, sizes.storage, threads=threads)
            admissions = admission_times(sizes.storage)
    times = model.times | restores | {"admission": admissions}
    result["restore_bandwidth_ratio"] = times["restore reference"].median / times["restore"].median
    result["quote_stage_240k_p99_ms"] = percentile(admissions.wall, 0.99) * 1e3
    return result | {
        "threads": threads,
        "load": load_before,
        "contended": any(each.contended for each in times.values()),
        "details": _details(times),
    }


def _details(times: dict[str, Times]) -> dict[str, Any]:
    def ratio(name: str, side: str = "") -> float:
        return times[f"{name} reference"].cpu_median / times[f"{name}{side}"].cpu_median

    return {
        "reference": f"transformers {version('transformers')}, torch {version('torch')}",
        "median_ms": {name: each.median * 1e3 for name, each in times.items()},
        # A restore is the work of a thread whose clock is not read here.
        "cpu_median_ms": {
            name: each.cpu_median * 1e3 for name, each in times.items() if not name.startswith("restore")
        },
        "cpu_time": {
            "prefill_ratio": ratio("prefill"),
            "decode_1_ratio": ratio("decode 1"),
            "decode_8_ratio": ratio("decode 8"),
            "warm_ttft_ratio": 1 / ratio("warm turn"),
            "step_overhead_us": times["decode 1 outside the model"].cpu_median * 1e6,
            "quote_stage_240k_p99_ms": percentile(times["admission"].cpu, 0.99) * 1e3,
        },
        "step_overhead_8_us": times["decode 8 outside the model"].median * 1e6,
        "restore_short_ratio": times["restore short reference"].median / times["restore short"].median,
        "restore_scattered_ratio": times["restore reference"].median / times["restore scattered"].median,
        "contended": [name for name, each in times.items() if each.contended],
    }


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> None:
    options = command_line("engine", __doc__).parse_args(arguments)
    result = measure(QUICK if options.quick else FULL, threads=options.threads)
    write_result(result | {"quick": options.quick}, write)


if __name__ == "__main__":
    main()
