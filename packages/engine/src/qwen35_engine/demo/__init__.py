"""The demo checkpoint: Qwen3.5's architecture with a few million weights, made on this machine at first use.

The tokenizer and the chat template are real and ship with the package. The weights are random numbers from a fixed
seed, so that the demo shows how the server behaves, not what a model knows. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoint.config import read_config
from ..model.weights import allocate_weights, stored_tensors
from ..user_files import cache_folder

__all__ = ["demo_folder"]

_SEED = 0
_ASSETS = ("tokenizer.json", "chat_template.jinja")


def demo_folder(parent: Path | None = None) -> Path:
    """The folder of the demo checkpoint in the Hugging Face layout; made now if it does not exist yet.

    Args:
        parent: where to keep it. None: ``qwen35`` in the user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``), or
            a temporary folder where that cannot be written.
    """
    files = _text_files()
    # The name says what is inside, so that another version of the package never meets an old folder.
    digest = hashlib.sha256(json.dumps([_SEED, files], sort_keys=True).encode()).hexdigest()[:12]
    parent = parent or cache_folder()
    folder = parent / f"demo-{digest}"
    if not folder.is_dir():
        _make(folder, files)
    return folder


def _make(folder: Path, files: dict[str, str]) -> None:
    """Write into a temporary folder beside and rename: nobody ever sees a half-made checkpoint."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, text in files.items():
            (work / name).write_text(text, encoding="utf-8")
        save_file(_random_weights(work), work / "model.safetensors", metadata={"format": "pt"})
        work.chmod(0o755)
        try:
            work.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, and its folder is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _text_files() -> dict[str, str]:
    assets = resources.files(__name__) / "assets"
    files = {name: (assets / name).read_text(encoding="utf-8") for name in _ASSETS}
    ids = {token["content"]: token["id"] for token in json.loads(files["tokenizer.json"])["added_tokens"]}
    vocab_size = max(ids.values()) + 1
    end_of_turn, end_of_text = ids["<|im_end|>"], ids["<|endoftext|>"]
    for name, value in {
        "config.json": _config(vocab_size=vocab_size, eos_token_id=end_of_turn),
        "generation_config.json": {"eos_token_id": [end_of_turn, end_of_text]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 32_768,
        },
    }.items():
        files[name] = json.dumps(value, indent=2) + "\n"
    return files


def _config(*, vocab_size: int, eos_token_id: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 8,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": True,
        "eos_token_id": eos_token_id,
    }


def _random_weights(folder: Path) -> dict[str, Tensor]:
    """Weights for the config in ``folder``, in the scale a freshly initialised model has."""
    config = read_config(folder)
    generator = torch.Generator().manual_seed(_SEED)
    weights = allocate_weights(config, device=torch.device("cpu"), dtype=torch.float32)
    tensors = {}
    for name, tensor in stored_tensors(config, weights):
        if name.endswith("A_log"):
            tensor.uniform_(1, 16, generator=generator).log_()
        elif name.endswith(("dt_bias", "linear_attn.norm.weight")):
            tensor.fill_(1)
        elif name.endswith("norm.weight"):
            tensor.zero_()
        else:
            tensor.normal_(0, 1 / math.sqrt(tensor[0].numel()), generator=generator)
        tensors[name] = tensor.to(config.dtype).clone(memory_format=torch.contiguous_format)
    return tensors
