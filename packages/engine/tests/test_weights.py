"""Loading a checkpoint: every tensor in its place or one clear line, and never two models in memory."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

import tiny_checkpoints
from qwen35_engine import CheckpointError
from qwen35_engine.checkpoint.config import read_config
from qwen35_engine.demo import demo_folder
from qwen35_engine.model.weights import ModelWeights, allocate_weights, load_weights, stored_tensors

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(folder, read_config(folder), device=CPU, dtype=dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoints.save(tiny_checkpoints.oracle(), tmp_path)


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a one-file checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_every_stored_tensor_is_read_bit_for_bit(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    ours = dict(stored_tensors(read_config(folder), load(folder)))
    assert set(ours) == set(stored)
    for name, tensor in ours.items():
        assert torch.equal(tensor, stored[name]), name


def test_a_multimodal_checkpoint_gives_its_text_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = tiny_checkpoints.BASE | {"model_type": "qwen3_5_text"}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    }
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    stored["mtp.fc.weight"] = torch.zeros(3, 3)
    save_file(stored, path)
    assert any(name.startswith("model.visual.") for name in stored)

    caplog.set_level(logging.INFO)
    config = read_config(tmp_path)
    for name, tensor in stored_tensors(config, load(tmp_path)):
        assert torch.equal(tensor, stored[name]), name
    num_vision = sum(name.startswith("model.visual.") for name in stored)
    assert f"skipped {num_vision} vision tensors" in caplog.text
    assert "skipped 1 multi-token prediction tensors" in caplog.text


def test_a_tied_head_is_the_embedding_and_may_be_stored_twice(tmp_path: Path) -> None:
    folder = tiny_checkpoints.save(tiny_checkpoints.oracle(tie_word_embeddings=True), tmp_path)
    rewrite(folder, {"lm_head.weight": load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()})
    weights = load(folder)
    assert weights.head.data_ptr() == weights.embedding.data_ptr()


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, {"model.layers.3.self_attn.k_norm.weight": None})
    with pytest.raises(
        CheckpointError, match=rf"{folder}: tensor model\.layers\.3\.self_attn\.k_norm\.weight is in no"
    ):
        load(folder)


def test_an_untied_head_must_be_there(folder: Path) -> None:
    rewrite(folder, {"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is in no"):
        load(folder)


def test_a_shape_that_disagrees_with_the_config_is_named(folder: Path) -> None:
    rewrite(folder, {"model.layers.1.mlp.up_proj.weight": torch.zeros(95, 64)})
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight must have shape \[96, 64\]"
        r" by config\.json, got \[95, 64\]",
    ):
        load(folder)


def test_a_tensor_nobody_knows_is_refused(folder: Path) -> None:
    """Leaving out a bias in silence would give a model that is almost right."""
    rewrite(folder, {"model.layers.0.linear_attn.out_proj.bias": torch.zeros(64)})
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.linear_attn\.out_proj\.bias has no place"):
        load(folder)


LOAD_AND_WATCH = """
import sys, threading, torch
from pathlib import Path
from qwen35_engine.checkpoint.config import read_config
from qwen35_engine.model.weights import load_weights

def anonymous_kib():
    # Memory of our own; mapped files are the kernel's to drop.
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1])

folder = Path(sys.argv[1])
config = read_config(folder)
peak, before, done = 0, anonymous_kib(), threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous_kib())

watcher = threading.Thread(target=watch)
watcher.start()
weights = load_weights(folder, config, device=torch.device("cpu"), dtype=torch.float32)
done.set()
watcher.join()
print(peak - before, anonymous_kib() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
def test_there_is_never_a_second_copy_of_the_model(tmp_path: Path) -> None:
    oracle = tiny_checkpoints.oracle(hidden_size=512, intermediate_size=4096, vocab_size=2048)
    folder = tiny_checkpoints.save(oracle, tmp_path, max_shard_size="20MB")
    model_kib = sum(parameter.nbytes for parameter in oracle.parameters()) // 1024
    assert model_kib > 100_000
    result = subprocess.run(
        [sys.executable, "-c", LOAD_AND_WATCH, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    peak, after = map(int, result.stdout.split())
    assert after >= model_kib * 0.95
    assert peak <= model_kib * 1.25, f"{peak} KiB at the peak for a model of {model_kib} KiB"


@pytest.mark.parametrize(("dtype", "adjacent"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_projections_lie_as_a_cpu_multiplies_them_fastest(dtype: torch.dtype, adjacent: int) -> None:
    config = read_config(demo_folder())
    weights = allocate_weights(config, device=torch.device("cpu"), dtype=dtype)
    for layer in weights.layers:
        for matrix in (layer.mlp.gate_up_proj, layer.mlp.down_proj, layer.mixer.out_proj):
            assert matrix.stride(adjacent) == 1
    assert weights.embedding.stride(1) == 1, "rows are looked up"
