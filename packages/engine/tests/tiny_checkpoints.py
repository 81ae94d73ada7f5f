"""Small random checkpoints in the Hugging Face layout, made with transformers, which is the oracle too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

BASE: dict[str, Any] = {
    "vocab_size": 251,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


def oracle(*, seed: int = 0, **changes: Any) -> Qwen3_5ForCausalLM:
    """A random model of transformers in fp32 whose every weight matters: norms, gates and decays differ from layer to
    layer, and the logits are far from uniform."""
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(BASE | changes))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3, 1, generator=generator)
            elif name.endswith("dt_bias"):
                parameter.normal_(0, 1, generator=generator)
            elif "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            elif "conv1d" in name:
                parameter.normal_(0, 0.5, generator=generator)
            else:
                # What attention adds must weigh enough that two exchanged pages are seen.
                heavy = name.endswith(("v_proj.weight", "o_proj.weight"))
                parameter.normal_(0, 0.2 if heavy else 0.08, generator=generator)
    return model


def save(model: Qwen3_5ForCausalLM, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write the model as a checkpoint of that dtype; its own weights are rounded to it, so that both agree."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    # A copy: to() would round the rotary frequencies of the oracle too, which no checkpoint stores.
    copy.deepcopy(model).to(dtype).save_pretrained(folder, **options)
    return folder


@torch.inference_mode()
def oracle_log_probabilities(model: Qwen3_5ForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities ``[len(tokens), vocab]`` after every token, by one forward pass without a cache."""
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float().log_softmax(dim=-1)
