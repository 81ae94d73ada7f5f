"""The ledger against the tensors that are really there."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_checkpoints
from lanes import run
from qwen35_engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from qwen35_engine.ledger import bytes_of

ASK = GenerationRequest(tokens=[1] * 200, max_tokens=3, sampling=SamplingParams(temperature=0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.save(tiny_checkpoints.oracle(seed=5), tmp_path_factory.mktemp("model"))


def storages() -> dict[int, int]:
    """Bytes of every storage that any tensor of this process refers to, by address."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"host_cache_mib": 0},
        {"host_cache_mib": 3},
        {"prefix_reuse": False},
        {"kv_dtype": "bfloat16", "device_snapshot_slots": 9},
    ],
    ids=str,
)
def test_the_ledger_names_every_byte_that_lives_with_the_engine(folder: Path, options: dict[str, Any]) -> None:
    """Whatever tensor an engine that has answered still holds is in the ledger, and nothing else is."""
    with Engine.from_folder(
        folder, EngineOptions(threads=1, calibrate=False, kv_capacity=4096, host_cache_mib=0)
    ) as other:  # lives on, so that none of its addresses is used again
        run(other, ASK)  # small constants that the kernels make once for the whole process
    before = storages()
    with Engine.from_folder(folder, EngineOptions(threads=1, calibrate=False, kv_capacity=4096, **options)) as engine:
        run(engine, ASK)
        engine.parts.worker.close()  # its last step may still hold what it computed with
        held = {address: size for address, size in storages().items() if address not in before}
        ledger = engine.ledger()
        assert ledger.total_bytes("device") + ledger.total_bytes("host") == sum(held.values())
        parts = {entry.what: entry.num_bytes for entry in ledger.entries}
        pages, states = engine.parts.memory.pages, engine.parts.memory.states
        assert (parts["KV pages"], parts["state slots"]) == (pages.nbytes, states.nbytes)
        assert parts["Host slabs"] <= engine.options.host_cache_bytes
        assert parts["workspace"] > 0
        assert ledger.free_bytes is None


def test_kv_in_bfloat16_takes_half_the_bytes(folder: Path) -> None:
    sizes = []
    for kv_dtype in ("float32", "bfloat16"):
        options = EngineOptions(threads=1, calibrate=False, kv_capacity=4096, host_cache_mib=0, kv_dtype=kv_dtype)
        with Engine.from_folder(folder, options) as engine:
            assert engine.options.kv_dtype == kv_dtype
            sizes.append({entry.what: entry.num_bytes for entry in engine.ledger().entries})
    assert sizes[0]["KV pages"] == 2 * sizes[1]["KV pages"]
    assert sizes[0]["state slots"] == sizes[1]["state slots"]


def test_a_shared_storage_counts_once() -> None:
    whole = torch.zeros(10, dtype=torch.float32)
    assert bytes_of(whole, (whole[:3], [whole[5:]])) == 40
    assert bytes_of(whole, torch.zeros(1, dtype=torch.uint8)) == 41
