"""The model against transformers: prefill in random chunks, then decode, over checkpoints that differ in what can go
wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_checkpoints
from qwen35_engine.checkpoint.config import ModelConfig, read_config
from qwen35_engine.memory import DeviceMemory
from qwen35_engine.model.qwen35 import Qwen35Model
from qwen35_engine.model.weights import load_weights
from qwen35_kernels import BLOCK_TOKENS, KVProfile, PageLayout, StateLayout

CPU = torch.device("cpu")
LINEAR, FULL = "linear_attention", "full_attention"

# name -> (changes of the config, dtype of the files, options of save_pretrained)
VARIANTS: dict[str, tuple[dict[str, Any], torch.dtype, dict[str, Any]]] = {
    "tied-1-query-head-per-kv-head": (
        {"tie_word_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 2, "linear_num_value_heads": 2},
        torch.float32,
        {},
    ),
    "untied-2-heads-quarter-rotary-bf16": (
        {
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
        torch.bfloat16,
        {},
    ),
    "4-query-and-4-value-heads-full-rotary-sharded": (
        {
            "num_key_value_heads": 1,
            "linear_num_key_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            "layer_types": [FULL, LINEAR, FULL, LINEAR],
        },
        torch.float32,
        {"max_shard_size": "60KB"},
    ),
    "wide-values-tied-sharded-bf16": (
        {
            "tie_word_embeddings": True,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 24,
            "num_hidden_layers": 6,
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR, LINEAR, FULL],
        },
        torch.bfloat16,
        {"max_shard_size": "60KB"},
    ),
    "short-conv-odd-sizes": (
        {
            "vocab_size": 97,
            "hidden_size": 40,
            "intermediate_size": 56,
            "linear_conv_kernel_dim": 2,
            "head_dim": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.46},
            "layer_types": [LINEAR, FULL, FULL, LINEAR],
        },
        torch.float32,
        {},
    ),
}


def model_over_poisoned_memory(folder: Path, *, num_pages: int, num_slots: int) -> tuple[Qwen35Model, DeviceMemory]:
    """The loaded model; every page and slot but the scratch ones holds NaN until something is written."""
    config = read_config(folder)
    weights = load_weights(folder, config, device=CPU, dtype=torch.float32)
    memory = memory_for(config, num_pages=num_pages, num_slots=num_slots)
    memory.pages[1:].fill_(0xFF)
    memory.states[1:].fill_(0xFF)
    return Qwen35Model(config, weights, memory), memory


def memory_for(config: ModelConfig, *, num_pages: int, num_slots: int) -> DeviceMemory:
    return DeviceMemory(
        page_layout=PageLayout(
            profile=KVProfile.FP32,
            num_layers=config.num_full_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        ),
        state_layout=StateLayout(
            num_layers=config.num_linear_layers,
            num_value_heads=config.num_value_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            conv_channels=config.conv_channels,
            conv_width=config.conv_width,
            conv_dtype=torch.float32,
            hidden_size=config.hidden_size,
            hidden_dtype=torch.float32,
        ),
        layers=[kind == LINEAR for kind in config.layer_kinds],
        num_pages=num_pages,
        num_slots=num_slots,
        device=CPU,
    )


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_log_probabilities_equal_those_of_transformers(name: str, seed: int, tmp_path: Path) -> None:
    changes, dtype, options = VARIANTS[name]
    oracle = tiny_checkpoints.oracle(seed=seed, **changes)
    folder = tiny_checkpoints.save(oracle, tmp_path, dtype=dtype, **options)
    if "max_shard_size" in options:
        assert len(list(folder.glob("*.safetensors"))) > 2
    rng = random.Random(seed)
    length, prompt_length = 240, rng.randint(130, 225)
    tokens = [rng.randrange(oracle.config.vocab_size) for _ in range(length)]
    expected = tiny_checkpoints.oracle_log_probabilities(oracle, tokens)

    num_blocks = -(-length // BLOCK_TOKENS)
    model, memory = model_over_poisoned_memory(folder, num_pages=num_blocks + 3, num_slots=4)
    block_table = torch.tensor(rng.sample(range(1, num_blocks + 3), num_blocks))
    slot = 2
    memory.clear_state(slot)
    computed, chunks = 0, []
    while computed < prompt_length:
        size = min(rng.choice([1, 2, 3, 17, 63, 64, 65, 100]), prompt_length - computed)
        chunks.append(size)
        hidden = model.prefill(
            tokens=torch.tensor(tokens[computed : computed + size]),
            base=computed,
            block_table=block_table,
            slot=slot,
        )
        computed += size
        check(model, hidden.unsqueeze(0), expected[computed - 1], f"after chunks {chunks}, seed {seed}")
    while computed < length:
        hidden = model.decode(
            tokens=torch.tensor([tokens[computed]]),
            positions=torch.tensor([computed]),
            block_tables=block_table.unsqueeze(0),
            slots=torch.tensor([slot]),
        )
        computed += 1
        check(model, hidden, expected[computed - 1], f"decoded up to {computed}, chunks {chunks}, seed {seed}")


def check(model: Qwen35Model, hidden: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    ours = model.logits(hidden)[0].log_softmax(-1)
    difference = (ours - expected).abs().max().item()
    assert difference <= 1e-4, f"{where}: log-probabilities differ by {difference:.3g}"


def test_a_tap_holds_the_whole_state_after_its_position(tmp_path: Path) -> None:
    """What a pass that ends there leaves behind, up to the rounding of matrix products of another height; and a pass
    with taps leaves, bit for bit, what it leaves without."""
    oracle = tiny_checkpoints.oracle(seed=3)
    model, memory = model_over_poisoned_memory(tiny_checkpoints.save(oracle, tmp_path), num_pages=6, num_slots=8)
    tokens = torch.randint(0, 251, (150,), generator=torch.Generator().manual_seed(3))
    block_table = torch.tensor([3, 1, 5])
    memory.clear_state(1)
    model.prefill(tokens=tokens, base=0, block_table=block_table, slot=1, taps=[(1, 2), (64, 3), (101, 4), (150, 5)])
    memory.clear_state(6)
    model.prefill(tokens=tokens, base=0, block_table=block_table, slot=6)
    assert torch.equal(memory.states[1], memory.states[6])
    assert torch.equal(memory.states[5], memory.states[1])
    recurrent = [memory.state_layout.recurrent(memory.states, layer) for layer in range(3)]
    conv = [memory.state_layout.conv(memory.states, layer) for layer in range(3)]
    for slot, position in ((2, 1), (3, 64), (4, 101)):
        memory.clear_state(7)
        model.prefill(tokens=tokens[:position], base=0, block_table=block_table, slot=7)
        for layer in range(3):
            torch.testing.assert_close(recurrent[layer][slot], recurrent[layer][7], rtol=0, atol=1e-4)
            torch.testing.assert_close(conv[layer][slot], conv[layer][7], rtol=0, atol=1e-4)


def test_decode_rows_do_not_touch_each_other(tmp_path: Path) -> None:
    """A round of three sequences of different lengths equals three rounds of one."""
    oracle = tiny_checkpoints.oracle(seed=4)
    folder = tiny_checkpoints.save(oracle, tmp_path)
    lengths = (3, 64, 131)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 251, (length + 1,), generator=generator) for length in lengths]
    tables = torch.tensor([[9, 0, 0], [4, 7, 0], [2, 8, 1]])
    together = []
    for alone in (False, True):
        model, memory = model_over_poisoned_memory(folder, num_pages=10, num_slots=4)
        for slot, (prompt, table) in enumerate(zip(prompts, tables, strict=True), start=1):
            memory.clear_state(slot)
            model.prefill(tokens=prompt[:-1], base=0, block_table=table, slot=slot)
        rows = [[0], [1], [2]] if alone else [[0, 1, 2]]
        hidden = [
            model.decode(
                tokens=torch.stack([prompts[i][-1] for i in group]),
                positions=torch.tensor([lengths[i] for i in group]),
                block_tables=tables[group],
                slots=torch.tensor([i + 1 for i in group]),
            )
            for group in rows
        ]
        together.append((torch.cat(hidden), memory.states[1:].clone()))
    torch.testing.assert_close(together[0][0], together[1][0], rtol=0, atol=1e-5)
