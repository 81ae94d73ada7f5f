"""The weights of a model in the form the forward pass reads them, and where each stored tensor goes.

Projections are matrices ``[inputs, outputs]``: ``x @ projection``. Those with the same input stand side by side in one,
so that a step makes fewer and larger products. The stored tensors, ``[outputs, inputs]``, are copied straight to their
columns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.config import LINEAR, ModelConfig
from ..checkpoint.shards import Shards
from ..errors import CheckpointError

__all__ = [
    "AttentionWeights",
    "DeltaNetWeights",
    "LayerWeights",
    "MLPWeights",
    "ModelWeights",
    "allocate_weights",
    "load_weights",
    "stored_tensors",
]

logger = logging.getLogger(__name__)

# Parts of multimodal and multi-token-prediction checkpoints that this engine does not compute.
_SKIPPED = {"vision": ("model.visual.", "visual."), "multi-token prediction": ("mtp.", "model.mtp.")}


@dataclass(frozen=True)
class DeltaNetWeights:
    """Gated DeltaNet. ``in_proj`` gives qkv, z, b, a side by side; ``conv`` is ``[channels, width]``."""

    in_proj: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """Gated attention. ``qkv_proj`` gives q (with its gate, interleaved by head), k, v side by side."""

    qkv_proj: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out_proj: Tensor


@dataclass(frozen=True)
class MLPWeights:
    """SwiGLU. ``gate_up_proj`` gives gate and up side by side."""

    gate_up_proj: Tensor
    down_proj: Tensor


@dataclass(frozen=True)
class LayerWeights:
    input_norm: Tensor
    mixer: DeltaNetWeights | AttentionWeights
    post_norm: Tensor
    mlp: MLPWeights


@dataclass(frozen=True)
class ModelWeights:
    """``head``, ``[hidden, vocab]``, is the embedding itself, transposed, where the checkpoint ties them."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


def load_weights(folder: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Allocate the weights on ``device`` and read the folder's tensors straight into them.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the config says, or is one the architecture does
            not have.
    """
    shards = Shards.of_folder(folder)
    weights = allocate_weights(config, device=device, dtype=dtype)
    destinations = dict(stored_tensors(config, weights))
    for name, destination in destinations.items():
        if name not in shards:
            raise CheckpointError(f"{folder}: tensor {name} is in no *.safetensors file")
        stored = shards[name]
        if stored.shape != tuple(destination.shape):
            raise CheckpointError(
                f"{stored.path}: tensor {name} must have shape {list(destination.shape)} by config.json,"
                f" got {list(stored.shape)}"
            )
    _account_for_the_rest(shards, destinations, config)
    shards.read_into(destinations)
    return weights


def _account_for_the_rest(shards: Shards, destinations: dict[str, Tensor], config: ModelConfig) -> None:
    """Log what is skipped; refuse what is unknown, since leaving it out would change the answers silently."""
    rest = [name for name in shards.names() if name not in destinations]
    for part, prefixes in _SKIPPED.items():
        skipped = [name for name in rest if name.startswith(prefixes)]
        rest = [name for name in rest if not name.startswith(prefixes)]
        if skipped:
            logger.info("skipped %d %s tensors", len(skipped), part)
    if config.tied_head:  # some writers store the tied head a second time
        rest = [name for name in rest if name != "lm_head.weight"]
    if rest:
        stored = shards[rest[0]]
        raise CheckpointError(f"{stored.path}: tensor {stored.name} has no place in this architecture")


def allocate_weights(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Uninitialised weights of the config's shape."""

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    # In fp32 a CPU multiplies a few rows faster where the outputs of one input are adjacent: 1.6 times for one row, 1.4
    # for two, no difference from 64 on. In bf16 that would be four times slower.
    outputs_adjacent = device.type == "cpu" and dtype == torch.float32

    def projection(inputs: int, outputs: int) -> Tensor:
        return new(inputs, outputs) if outputs_adjacent else new(outputs, inputs).t()

    hidden, value_size = config.hidden_size, config.num_value_heads * config.value_dim
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def mixer(kind: str) -> DeltaNetWeights | AttentionWeights:
        if kind == LINEAR:
            return DeltaNetWeights(
                in_proj=projection(hidden, config.conv_channels + value_size + 2 * config.num_value_heads),
                conv=new(config.conv_channels, config.conv_width),
                # The decay is exponentiated twice; fp32 whatever the model's dtype.
                a_log=new(config.num_value_heads, dtype=torch.float32),
                dt_bias=new(config.num_value_heads),
                norm=new(config.value_dim),
                out_proj=projection(value_size, hidden),
            )
        return AttentionWeights(
            qkv_proj=projection(hidden, 2 * query_size + 2 * kv_size),
            q_norm=new(config.head_dim),
            k_norm=new(config.head_dim),
            out_proj=projection(query_size, hidden),
        )

    embedding = new(config.vocab_size, hidden)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(
                input_norm=new(hidden),
                mixer=mixer(kind),
                post_norm=new(hidden),
                mlp=MLPWeights(
                    gate_up_proj=projection(hidden, 2 * config.intermediate_size),
                    down_proj=projection(config.intermediate_size, hidden),
                ),
            )
            for kind in config.layer_kinds
        ),
        norm=new(hidden),
        head=embedding.t() if config.tied_head else projection(hidden, config.vocab_size),
    )


def stored_tensors(config: ModelConfig, weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a checkpoint by its stored name, with the part of ``weights`` that holds it (a view)."""
    prefix = config.weight_prefix
    yield f"{prefix}embed_tokens.weight", weights.embedding
    yield f"{prefix}norm.weight", weights.norm
    if not config.tied_head:
        yield "lm_head.weight", weights.head.t()
    for index, layer in enumerate(weights.layers):
        at = f"{prefix}layers.{index}."
        yield f"{at}input_layernorm.weight", layer.input_norm
        yield f"{at}post_attention_layernorm.weight", layer.post_norm
        yield f"{at}mlp.down_proj.weight", layer.mlp.down_proj.t()
        size = config.intermediate_size
        yield from _columns(
            layer.mlp.gate_up_proj,
            (f"{at}mlp.gate_proj.weight", size),
            (f"{at}mlp.up_proj.weight", size),
        )
        if isinstance(layer.mixer, DeltaNetWeights):
            yield from _delta_net_places(config, layer.mixer, f"{at}linear_attn.")
        else:
            yield from _attention_places(config, layer.mixer, f"{at}self_attn.")


def _delta_net_places(config: ModelConfig, mixer: DeltaNetWeights, at: str) -> Iterator[tuple[str, Tensor]]:
    yield from _columns(
        mixer.in_proj,
        (f"{at}in_proj_qkv.weight", config.conv_channels),
        (f"{at}in_proj_z.weight", config.num_value_heads * config.value_dim),
        (f"{at}in_proj_b.weight", config.num_value_heads),
        (f"{at}in_proj_a.weight", config.num_value_heads),
    )
    yield f"{at}conv1d.weight", mixer.conv.unsqueeze(1)
    yield f"{at}A_log", mixer.a_log
    yield f"{at}dt_bias", mixer.dt_bias
    yield f"{at}norm.weight", mixer.norm
    yield f"{at}out_proj.weight", mixer.out_proj.t()


def _attention_places(config: ModelConfig, mixer: AttentionWeights, at: str) -> Iterator[tuple[str, Tensor]]:
    yield from _columns(
        mixer.qkv_proj,
        (f"{at}q_proj.weight", 2 * config.num_heads * config.head_dim),
        (f"{at}k_proj.weight", config.num_kv_heads * config.head_dim),
        (f"{at}v_proj.weight", config.num_kv_heads * config.head_dim),
    )
    yield f"{at}q_norm.weight", mixer.q_norm
    yield f"{at}k_norm.weight", mixer.k_norm
    yield f"{at}o_proj.weight", mixer.out_proj.t()


def _columns(stack: Tensor, *parts: tuple[str, int]) -> Iterator[tuple[str, Tensor]]:
    begin = 0
    for name, size in parts:
        yield name, stack[:, begin : begin + size].t()
        begin += size
    if begin != stack.shape[1]:
        raise AssertionError(f"the parts of a stack must fill its {stack.shape[1]} columns, got {begin}")
