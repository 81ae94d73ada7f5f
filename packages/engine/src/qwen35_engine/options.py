"""The engine's options: what a caller may set, each checked where it is written down, and what was made of them.

An option is one field of ``EngineOptions``: its type, range, default and description stand there and nowhere else. The
server builds its command line, its help and its README's table from the same fields.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from prefix_index import TapLimits
from qwen35_kernels import BLOCK_TOKENS

from .checkpoint.config import ModelConfig
from .errors import OptionError

__all__ = ["OUTPUT_WINDOW_TOKENS", "EffectiveOptions", "EngineOptions"]

# Output room a request holds from its admission on; beyond it, pages are taken one by one as they fill.
OUTPUT_WINDOW_TOKENS = 4096

# Beside a slot for each lane and one for staging: one for each tap a prompt may plan, but no more than this.
_MOST_SLOTS_FOR_TAPS = 4
_MOST_EXTRA_SLOTS = 64

_DEFAULT_MAX_CONTEXT = 32_768
_CPU_KV_BYTES = 2**30
_CPU_HOST_CACHE_MIB = 1024
_CUDA_HOST_CACHE_MIB = 8192
_CUDA_KV_SHARE = 0.85

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# What contradicts `prefix_reuse=False`.
_OF_THE_CACHE = (
    "device_snapshot_slots",
    "host_cache_mib",
    "max_new_taps",
    "tap_ladder_tokens",
    "tap_min_gap_tokens",
)


class EngineOptions(BaseModel):
    """What may be chosen. ``None`` means: derive it, as the field's description says. ``model_fields`` has them all.

    Raises:
        OptionError: an unknown option, a value of another type or out of its range, or something of the cache chosen
            where ``prefix_reuse`` is False.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to compute; `auto` takes CUDA where there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Of weights and activations. `auto` is float32 on a CPU, where it is the faster one, and for"
        " checkpoints that have it; bfloat16 otherwise.",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Of keys and values in their pages; `auto` is that of the activations."
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of a forward pass; by default torch's own choice."
    )
    max_context: int | None = Field(
        default=None,
        ge=2,
        le=100_000_000,
        description="Tokens of the longest sequence, prompt and output together; by default the model's, at most 32768"
        " and at most a given `kv_capacity`.",
    )
    max_concurrency: int = Field(default=4, ge=1, le=256, description="Sequences that run at once.")
    max_pending: int = Field(default=64, ge=0, le=1_000_000, description="Requests that may wait; one more is refused.")
    prefill_chunk: int = Field(
        default=1024, ge=1, le=1_000_000, description="Tokens of a prompt that one step computes."
    )
    kv_capacity: int | None = Field(
        default=None,
        ge=BLOCK_TOKENS,
        le=2**40,
        description="Tokens of KV in all, running and cached; at least one `max_context`, and a block of 64 for each"
        " sequence. By default 1 GiB of pages on a CPU; on CUDA 85 % of the memory that is free after loading, less the"
        " states; more where that is less than one `max_context`.",
    )
    device_snapshot_slots: int | None = Field(
        default=None,
        description="States the cache may keep on the device, 1 to `max_concurrency` + 64; by default"
        " `max_concurrency` + 1, and one for each of `max_new_taps` up to 4.",
    )
    host_cache_mib: int | None = Field(
        default=None,
        ge=0,
        le=2**30,
        description="MiB of Host memory for what the device has no room for, 0 for none; by default 1024 on a CPU, 8192"
        " on CUDA.",
    )
    max_new_taps: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Snapshots that a prompt may plan while it is computed; by default 8, without Host memory 2.",
    )
    tap_ladder_tokens: int | None = Field(
        default=None,
        ge=1,
        le=100_000_000,
        description="Tokens from the prompt's end to the first of its ever sparser snapshots; by default 4096 or two"
        " chunks, whichever is more.",
    )
    tap_min_gap_tokens: int | None = Field(
        default=None,
        ge=BLOCK_TOKENS,
        le=100_000_000,
        description="Tokens between those snapshots at least; by default 1024 or a chunk, whichever is more.",
    )
    pending_timeout_seconds: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        description="Time that a request may wait to start. It waits for a prefix that another request computes only if"
        " that is predicted to take a quarter of it at most.",
    )
    prefix_reuse: bool = Field(
        default=True, description="Reuse prefixes; without it every prompt is computed from its first token."
    )
    calibrate: bool = Field(
        default=True,
        description="Rank cached prefixes by what computing takes on this machine: the first engine of a kind times a"
        " few chunks and remembers the result in the user's cache folder. Without it they are ranked by the ratios of a"
        " fast accelerator.",
    )

    if not TYPE_CHECKING:  # type checkers know the fields from the class

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise self._refusal(error) from None

    @model_validator(mode="after")
    def _agrees(self) -> EngineOptions:
        slots, most = self.device_snapshot_slots, self.max_concurrency + _MOST_EXTRA_SLOTS
        if slots is not None and not 1 <= slots <= most:
            raise OptionError(f"must be between 1 and {most}, got {slots}", option="device_snapshot_slots")
        if not self.prefix_reuse:
            for name in _OF_THE_CACHE:
                if value := getattr(self, name):
                    raise OptionError(f"must be left out where prefix_reuse is False, got {value}", option=name)
        return self

    @classmethod
    def allowed(cls, name: str) -> str:
        """The values that the option ``name`` takes, in words that follow "must be"."""
        info = cls.model_fields[name]
        kinds = [kind for kind in get_args(info.annotation) or (info.annotation,) if kind is not type(None)]
        if isinstance(kinds[0], str):
            return f"one of {', '.join(kinds)}"
        if kinds[0] is bool:
            return "true or false"
        bounds = {type(bound): bound for bound in info.metadata}
        if Ge in bounds:
            return f"between {bounds[Ge].ge} and {bounds[Le].le}"
        if Gt in bounds:
            return f"above {bounds[Gt].gt} and at most {bounds[Le].le}"
        return "a whole number" if kinds[0] is int else "text"

    @classmethod
    def _refusal(cls, error: ValidationError) -> OptionError:
        """The first of what is wrong. A field with ``repr=False`` holds a secret: its value is not repeated."""
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, OptionError):
            return cause
        name = str(first["loc"][0])
        if first["type"] == "missing":
            return OptionError("must be given", option=name)
        if first["type"] == "extra_forbidden":
            return OptionError("is not an option", option=name)
        got = f", got {first['input']!r}" if cls.model_fields[name].repr else ""
        return OptionError(f"must be {cls.allowed(name)}{got}", option=name)

    def resolve_device(self) -> torch.device:
        """The device to run on.

        Raises:
            OptionError: ``cuda`` was asked for and there is none.
        """
        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise OptionError("must be auto or cpu where torch sees no CUDA device, got 'cuda'", option="device")
        return torch.device("cuda" if available and self.device != "cpu" else "cpu")

    def resolve_dtype(self, config: ModelConfig, device: torch.device) -> torch.dtype:
        """The dtype of weights and activations on ``device``."""
        if self.dtype != "auto":
            return _DTYPES[self.dtype]
        if device.type == "cpu" or config.dtype == torch.float32:
            return torch.float32
        return torch.bfloat16

    def resolve_kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of keys and values beside activations of ``dtype``."""
        return dtype if self.kv_dtype == "auto" else _DTYPES[self.kv_dtype]

    def resolve_sizes(
        self,
        config: ModelConfig,
        *,
        page_bytes: int,
        image_bytes: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> EffectiveOptions:
        """Fill in every size, once the weights are loaded and the rest of the memory is known.

        Args:
            config: the model's shape.
            page_bytes: bytes of one block of KV.
            image_bytes: bytes of one sequence's state.
            device: where pages and states will lie.
            dtype: of the weights.

        Raises:
            OptionError: sizes that contradict each other or the model.
        """
        cache = self._resolve_cache(device) if self.prefix_reuse else {}
        num_states = 1 + self.max_concurrency + cache.get("device_snapshot_slots", 0)
        kv_bytes = _automatic_kv_bytes(device, num_states * image_bytes) if self.kv_capacity is None else 0
        capacity = kv_bytes // page_bytes * BLOCK_TOKENS if self.kv_capacity is None else self.kv_capacity
        max_context = self._resolve_context(config)
        num_blocks = max(capacity // BLOCK_TOKENS, self.max_concurrency)
        context_blocks = -(-max_context // BLOCK_TOKENS)
        if self.kv_capacity is not None:
            if self.kv_capacity < self.max_concurrency * BLOCK_TOKENS:
                raise OptionError(
                    f"must hold a block of {BLOCK_TOKENS} tokens for each of {self.max_concurrency} sequences,"
                    f" got {self.kv_capacity}",
                    option="kv_capacity",
                )
            if num_blocks < context_blocks:
                raise OptionError(
                    f"must hold one max_context of {max_context} tokens, got {self.kv_capacity}", option="kv_capacity"
                )
        chosen = self.model_dump(include=set(EngineOptions.model_fields)) | cache
        return EffectiveOptions(
            **chosen
            | {
                "device": device.type,
                "dtype": _name(dtype),
                "kv_dtype": _name(self.resolve_kv_dtype(dtype)),
                "threads": self.threads or torch.get_num_threads(),
                "max_context": max_context,
                "kv_capacity": max(num_blocks, context_blocks) * BLOCK_TOKENS,
                "calibrate": self.calibrate and self.prefix_reuse,
            }
        )

    def _resolve_context(self, config: ModelConfig) -> int:
        if self.max_context is None:
            longest = min(config.max_position, _DEFAULT_MAX_CONTEXT)
            return (
                longest if self.kv_capacity is None else min(longest, self.kv_capacity // BLOCK_TOKENS * BLOCK_TOKENS)
            )
        if self.max_context > config.max_position:
            raise OptionError(
                f"must be at most the model's {config.max_position} positions, got {self.max_context}",
                option="max_context",
            )
        return self.max_context

    def _resolve_cache(self, device: torch.device) -> dict[str, int]:
        host_mib = self.host_cache_mib
        if host_mib is None:
            host_mib = _CUDA_HOST_CACHE_MIB if device.type == "cuda" else _CPU_HOST_CACHE_MIB
        derived = TapLimits.for_engine(self.prefill_chunk, host_tier=host_mib > 0)
        taps = derived.max_taps if self.max_new_taps is None else self.max_new_taps
        return {
            "device_snapshot_slots": self.device_snapshot_slots
            or self.max_concurrency + 1 + min(taps, _MOST_SLOTS_FOR_TAPS),
            "host_cache_mib": host_mib,
            "max_new_taps": taps,
            "tap_ladder_tokens": self.tap_ladder_tokens or derived.ladder_tokens,
            "tap_min_gap_tokens": self.tap_min_gap_tokens or derived.min_gap_tokens,
        }


class EffectiveOptions(EngineOptions):
    """Options with nothing left to derive: an engine started with them is the one that they were taken from.

    What concerns the cache is None where ``prefix_reuse`` is False. The properties say the same in the units in which
    the engine counts.
    """

    threads: int
    max_context: int
    kv_capacity: int

    @property
    def num_blocks(self) -> int:
        """The KV capacity in blocks of 64 tokens."""
        return self.kv_capacity // BLOCK_TOKENS

    @property
    def snapshot_slots(self) -> int:
        """State slots that snapshots may have."""
        return self.device_snapshot_slots or 0

    @property
    def host_cache_bytes(self) -> int:
        """Bytes of the Host tier; 0: there is none."""
        return (self.host_cache_mib or 0) * 2**20

    @cached_property
    def taps(self) -> TapLimits:
        """How many snapshots a prompt may plan, and how far apart."""
        most, ladder, gap = self.max_new_taps, self.tap_ladder_tokens, self.tap_min_gap_tokens
        if most is None or ladder is None or gap is None:
            return TapLimits(max_taps=0)
        return TapLimits(max_taps=most, ladder_tokens=ladder, min_gap_tokens=gap, block_tokens=BLOCK_TOKENS)


def _name(dtype: torch.dtype) -> str:
    return next(name for name, other in _DTYPES.items() if other is dtype)


def _automatic_kv_bytes(device: torch.device, state_bytes: int) -> int:
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return max(0, int(free * _CUDA_KV_SHARE) - state_bytes)
    return _CPU_KV_BYTES
