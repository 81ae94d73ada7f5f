"""What the engine needs to know of a model, read from a folder's ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ..errors import CheckpointError

__all__ = ["LayerKind", "ModelConfig", "read_config"]

LayerKind = str
LINEAR: LayerKind = "linear_attention"
FULL: LayerKind = "full_attention"

_TEXT_ARCHITECTURES = ("Qwen3_5ForCausalLM",)
_MULTIMODAL_ARCHITECTURES = ("Qwen3_5ForConditionalGeneration",)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one Qwen3.5 text model.

    ``layer_kinds`` holds ``"linear_attention"`` (Gated DeltaNet) or ``"full_attention"`` per layer. ``weight_prefix``
    is what tensor names start with: ``"model."``, or ``"model.language_model."`` for the text part of a
    multimodal checkpoint.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_kinds: tuple[LayerKind, ...]
    norm_eps: float
    tied_head: bool
    max_position: int
    dtype: torch.dtype
    # full attention
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    # Gated DeltaNet
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    # names and tokens
    weight_prefix: str
    eos_token_ids: frozenset[int]

    @property
    def num_full_layers(self) -> int:
        return self.layer_kinds.count(FULL)

    @property
    def num_linear_layers(self) -> int:
        return self.layer_kinds.count(LINEAR)

    @property
    def conv_channels(self) -> int:
        """Channels under the causal convolution: queries, keys and values of the delta rule side by side."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


def read_config(folder: Path) -> ModelConfig:
    """Read and check ``config.json`` (and the end-of-text tokens of ``generation_config.json``).

    Raises:
        CheckpointError: no folder, no or broken ``config.json``, an architecture the engine does not compute, or a
            value that it does not support. The text names the file and the field.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder")
    raw = _read_json(path)
    architectures = raw.get("architectures") or []
    supported = _TEXT_ARCHITECTURES + _MULTIMODAL_ARCHITECTURES
    if not isinstance(architectures, list) or not any(name in supported for name in architectures):
        raise CheckpointError(f"{path}: architectures must name one of {', '.join(supported)}, got {architectures!r}")
    multimodal = any(name in _MULTIMODAL_ARCHITECTURES for name in architectures)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises whatever its validators raise
        raise CheckpointError(f"{path}: {_one_line(error)}") from error
    text = config.get_text_config()
    _require(path, "quantization_config", raw.get("quantization_config"), None)
    _require(path, "hidden_act", text.hidden_act, "silu")
    _require(path, "attention_bias", text.attention_bias, False)
    rope: Mapping[str, Any] = text.rope_parameters or {}
    _require(path, "rope_type", rope.get("rope_type", "default"), "default")
    layer_kinds = tuple(text.layer_types)
    if set(layer_kinds) != {LINEAR, FULL}:
        raise CheckpointError(
            f"{path}: layer_types must hold both {LINEAR!r} and {FULL!r} and nothing else,"
            f" got {sorted(set(layer_kinds))}"
        )
    if len(layer_kinds) != text.num_hidden_layers:
        raise CheckpointError(
            f"{path}: layer_types must have num_hidden_layers={text.num_hidden_layers} entries, got {len(layer_kinds)}"
        )
    _require_multiple(path, "num_attention_heads", text.num_attention_heads, text.num_key_value_heads)
    _require_multiple(path, "linear_num_value_heads", text.linear_num_value_heads, text.linear_num_key_heads)
    head_dim = text.head_dim or text.hidden_size // text.num_attention_heads
    _require_multiple(path, "head_dim", head_dim, 16)  # KV planes of whole 16-byte pieces in every profile
    # The same rounding as transformers: the rotary part is an integer number of dimensions, in pairs.
    rotary_dim = int(head_dim * float(rope.get("partial_rotary_factor", 1.0)))
    if rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(f"{path}: the rotary part of a head must be a positive even number, got {rotary_dim}")
    dtype_name = str(raw.get("dtype") or raw.get("torch_dtype") or _text_dtype(raw) or "float32")
    if dtype_name not in _DTYPES:
        raise CheckpointError(f"{path}: dtype must be one of {', '.join(_DTYPES)}, got {dtype_name!r}")
    return ModelConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        layer_kinds=layer_kinds,
        norm_eps=text.rms_norm_eps,
        tied_head=bool(config.tie_word_embeddings or text.tie_word_embeddings),
        max_position=text.max_position_embeddings,
        dtype=_DTYPES[dtype_name],
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        num_key_heads=text.linear_num_key_heads,
        num_value_heads=text.linear_num_value_heads,
        key_dim=text.linear_key_head_dim,
        value_dim=text.linear_value_head_dim,
        conv_width=text.linear_conv_kernel_dim,
        weight_prefix="model.language_model." if multimodal else "model.",
        eos_token_ids=_eos_tokens(folder, text.eos_token_id),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def _text_dtype(raw: Mapping[str, Any]) -> str | None:
    inner = raw.get("text_config")
    return (inner.get("dtype") or inner.get("torch_dtype")) if isinstance(inner, dict) else None


def _eos_tokens(folder: Path, from_config: int | list[int] | None) -> frozenset[int]:
    """``generation_config.json`` decides where it speaks, as it does for other users of such a folder."""
    path = folder / "generation_config.json"
    value = _read_json(path).get("eos_token_id") if path.is_file() else None
    if value is None:
        value = from_config
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _require(path: Path, field: str, value: object, expected: object) -> None:
    if value != expected:
        raise CheckpointError(f"{path}: {field} must be {expected!r}, got {value!r}")


def _require_multiple(path: Path, field: str, value: int, divisor: int) -> None:
    if divisor < 1 or value % divisor:
        raise CheckpointError(f"{path}: {field} must be a multiple of {divisor}, got {value}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
