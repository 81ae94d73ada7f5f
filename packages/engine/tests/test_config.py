"""Reading ``config.json``: what is derived, and one clear line for what cannot be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen35_engine import CheckpointError
from qwen35_engine.checkpoint.config import read_config
from tiny_checkpoints import BASE

TEXT = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16"} | BASE


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_text_model(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, TEXT))
    assert config.layer_kinds == ("linear_attention",) * 3 + ("full_attention",)
    assert (config.num_linear_layers, config.num_full_layers) == (3, 1)
    assert config.rotary_dim == 8
    assert config.conv_channels == 2 * 2 * 16 + 4 * 16
    assert config.dtype == torch.bfloat16
    assert config.weight_prefix == "model."
    assert config.eos_token_ids == {1}
    assert not config.tied_head


def test_the_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": BASE | {"model_type": "qwen3_5_text", "dtype": "bfloat16", "tie_word_embeddings": True},
        "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32},
    }
    config = read_config(write(tmp_path, outer))
    assert config.weight_prefix == "model.language_model."
    assert config.tied_head
    assert config.dtype == torch.bfloat16
    assert config.hidden_size == 64


def test_generation_config_decides_the_end_tokens(tmp_path: Path) -> None:
    write(tmp_path, TEXT)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert read_config(tmp_path).eos_token_ids == {5, 7}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures must name one of .*, got \['LlamaForCausalLM'\]"),
        ({"architectures": None}, r"architectures must name one of .*, got \[\]"),
        ({"architectures": "Qwen3_5ForCausalLM"}, "architectures must name one of"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be None, got"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rope_type must be 'default', got 'yarn'",
        ),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types must hold both"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types must hold both"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"num_hidden_layers": 5}, "layer_types|num_hidden_layers"),
        ({"num_attention_heads": 3}, "num_attention_heads must be a multiple of 2, got 3"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads must be a multiple of 2, got 3"),
        ({"head_dim": 20}, "head_dim must be a multiple of 16, got 20"),
        ({"linear_num_key_heads": 0}, "linear_num_value_heads must be a multiple of 0, got 4"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.07}},
            "rotary part of a head must be a positive even number, got 1",
        ),
        ({"dtype": "float8"}, "float8"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_one_line_for_what_cannot_be_served(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint) as caught:
        read_config(write(tmp_path, TEXT | changes))
    text = str(caught.value)
    assert str(tmp_path / "config.json") in text
    assert "\n" not in text


def test_no_folder_no_file_no_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing: not a folder"):
        read_config(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: must hold a JSON object, got list"):
        read_config(tmp_path)
