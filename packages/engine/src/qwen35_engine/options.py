"""The engine's options: what a caller may set, checked where it is written down, and what was made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from prefix_index import TapLimits
from qwen35_kernels import BLOCK_TOKENS

from .checkpoint.config import ModelConfig
from .errors import OptionError

__all__ = ["OUTPUT_WINDOW_TOKENS", "EffectiveOptions", "EngineOptions"]

# Output room a request holds from its admission on; beyond it, pages are taken one by one as they fill.
OUTPUT_WINDOW_TOKENS = 4096

# Beside a slot for each lane and one for staging: one for each tap a prompt may plan, but no more than this.
_MOST_SLOTS_FOR_TAPS = 4

_DEFAULT_MAX_CONTEXT = 32_768
_CPU_KV_BYTES = 2**30
_CPU_HOST_CACHE_MIB = 1024
_CUDA_HOST_CACHE_MIB = 8192
_CUDA_KV_SHARE = 0.85

_DEVICES = ("auto", "cpu", "cuda")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# What contradicts `prefix_reuse=False`.
_OF_THE_CACHE = (
    "device_snapshot_slots",
    "host_cache_mib",
    "max_new_taps",
    "tap_ladder_tokens",
    "tap_min_gap_tokens",
)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What may be chosen. ``None`` means: derive it from the rest.

    Attributes:
        device: ``auto`` (CUDA where there is one), ``cpu`` or ``cuda``.
        dtype: ``auto``, ``float32`` or ``bfloat16``, of weights and activations. ``auto`` is float32 on a CPU, where it
            is the faster one, and for checkpoints that have it; bfloat16 otherwise.
        kv_dtype: ``auto``, ``float32`` or ``bfloat16``, of keys and values in their pages. ``auto`` is that of the
            activations.
        threads: CPU threads of a forward pass; None leaves torch's own choice.
        max_context: tokens of the longest sequence, prompt and output together. None: the model's, at most 32,768 and
            at most a given ``kv_capacity``.
        max_concurrency: sequences that run at once, 1 to 256.
        max_pending: requests that may wait; one more is refused.
        prefill_chunk: tokens of a prompt that one step computes.
        kv_capacity: tokens of KV in all, running and cached; at least one ``max_context``, and a block of 64 for each
            sequence. None: 1 GiB of pages on a CPU, 85 % of the memory that is free after loading, less the states, on
            CUDA; more where that is less than one ``max_context``.
        device_snapshot_slots: states the cache may keep, 1 to ``max_concurrency + 64``. None: ``max_concurrency + 1``,
            and one for each of ``max_new_taps`` up to 4.
        host_cache_mib: Host memory for what the device has no room for, in MiB; 0: none. None: 1 GiB on a CPU, 8 GiB on
            CUDA.
        max_new_taps: snapshots that a prompt may plan while it is computed, 0 to 64. None: 8 with Host memory, else 2.
        tap_ladder_tokens: distance of the first of the ever sparser snapshots from the prompt's end. None: 4,096 or two
            chunks, whichever is more.
        tap_min_gap_tokens: how far apart those are at least, 64 or more. None: 1,024 or a chunk, whichever is more.
        pending_timeout_seconds: how long a request may wait to start; a wait for another prompt's prefix must be
            predicted to take a quarter of it at most.
        prefix_reuse: False computes every prompt from its first token and keeps nothing.
        calibrate: time a few chunks at start, unless that was done before, and rank by what they took; False ranks by
            the ratios of a fast accelerator.

    Raises:
        OptionError: a value out of its range, or something of the cache chosen where ``prefix_reuse`` is False.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    threads: int | None = None
    max_context: int | None = None
    max_concurrency: int = 4
    max_pending: int = 64
    prefill_chunk: int = 1024
    kv_capacity: int | None = None
    device_snapshot_slots: int | None = None
    host_cache_mib: int | None = None
    max_new_taps: int | None = None
    tap_ladder_tokens: int | None = None
    tap_min_gap_tokens: int | None = None
    pending_timeout_seconds: float = 600.0
    prefix_reuse: bool = True
    calibrate: bool = False

    def __post_init__(self) -> None:
        if self.device not in _DEVICES:
            raise OptionError(f"device must be one of {', '.join(_DEVICES)}, got {self.device!r}")
        for name in ("dtype", "kv_dtype"):
            if getattr(self, name) not in ("auto", *_DTYPES):
                raise OptionError(f"{name} must be one of auto, {', '.join(_DTYPES)}, got {getattr(self, name)!r}")
        _require_range("max_concurrency", self.max_concurrency, 1, 256)
        _require_range("max_pending", self.max_pending, 0, 1_000_000)
        _require_range("prefill_chunk", self.prefill_chunk, 1, 1_000_000)
        if self.threads is not None:
            _require_range("threads", self.threads, 1, 1024)
        if self.max_context is not None:
            _require_range("max_context", self.max_context, 2, 100_000_000)
        if self.kv_capacity is not None:
            _require_range("kv_capacity", self.kv_capacity, BLOCK_TOKENS, 2**40)
        if self.host_cache_mib is not None:
            _require_range("host_cache_mib", self.host_cache_mib, 0, 2**30)
        if self.max_new_taps is not None:
            _require_range("max_new_taps", self.max_new_taps, 0, 64)
        if self.tap_ladder_tokens is not None:
            _require_range("tap_ladder_tokens", self.tap_ladder_tokens, 1, 100_000_000)
        if self.tap_min_gap_tokens is not None:
            _require_range("tap_min_gap_tokens", self.tap_min_gap_tokens, BLOCK_TOKENS, 100_000_000)
        if not 0 < self.pending_timeout_seconds <= 86_400:
            raise OptionError(
                f"pending_timeout_seconds must be above 0 and at most 86400, got {self.pending_timeout_seconds!r}"
            )
        if self.device_snapshot_slots is not None:
            _require_range("device_snapshot_slots", self.device_snapshot_slots, 1, self.max_concurrency + 64)
        if not self.prefix_reuse:
            for name in _OF_THE_CACHE:
                if getattr(self, name):
                    raise OptionError(f"{name} must be left out where prefix_reuse is False, got {getattr(self, name)}")

    def resolve_device(self) -> torch.device:
        """The device to run on.

        Raises:
            OptionError: ``cuda`` was asked for and there is none.
        """
        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise OptionError("device must be auto or cpu where torch sees no CUDA device, got 'cuda'")
        return torch.device("cuda" if available and self.device != "cpu" else "cpu")

    def resolve_dtype(self, config: ModelConfig, device: torch.device) -> torch.dtype:
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
        taps = self._tap_limits(host_tier=self._host_cache_mib(device) > 0)
        snapshot_slots = 0
        if self.prefix_reuse:
            extra = min(taps.max_taps, _MOST_SLOTS_FOR_TAPS)
            snapshot_slots = self.device_snapshot_slots or self.max_concurrency + 1 + extra
        capacity = self.kv_capacity
        if capacity is None:
            state_bytes = (1 + self.max_concurrency + snapshot_slots) * image_bytes
            capacity = _automatic_kv_bytes(device, state_bytes) // page_bytes * BLOCK_TOKENS
        if self.max_context is None:
            max_context = min(config.max_position, _DEFAULT_MAX_CONTEXT)
            if self.kv_capacity is not None:
                max_context = min(max_context, capacity // BLOCK_TOKENS * BLOCK_TOKENS)
        else:
            max_context = self.max_context
            if max_context > config.max_position:
                raise OptionError(
                    f"max_context must be at most the model's {config.max_position} positions, got {max_context}"
                )
        if self.kv_capacity is not None and self.kv_capacity < self.max_concurrency * BLOCK_TOKENS:
            raise OptionError(
                f"kv_capacity must hold a block of {BLOCK_TOKENS} tokens for each of {self.max_concurrency} sequences,"
                f" got {self.kv_capacity}"
            )
        context_blocks = -(-max_context // BLOCK_TOKENS)
        num_blocks = max(capacity // BLOCK_TOKENS, self.max_concurrency)
        if num_blocks < context_blocks:
            if self.kv_capacity is not None:
                raise OptionError(
                    f"kv_capacity must hold one max_context of {max_context} tokens, got {self.kv_capacity}"
                )
            num_blocks = context_blocks
        return EffectiveOptions(
            device=device.type,
            dtype=_name(dtype),
            kv_dtype=_name(self.resolve_kv_dtype(dtype)),
            threads=self.threads or torch.get_num_threads(),
            max_context=max_context,
            max_concurrency=self.max_concurrency,
            max_pending=self.max_pending,
            prefill_chunk=self.prefill_chunk,
            num_blocks=num_blocks,
            snapshot_slots=snapshot_slots,
            host_cache_bytes=self._host_cache_mib(device) * 2**20,
            taps=taps,
            pending_timeout_seconds=self.pending_timeout_seconds,
            prefix_reuse=self.prefix_reuse,
            calibrate=self.calibrate and self.prefix_reuse,
        )

    def _tap_limits(self, *, host_tier: bool) -> TapLimits:
        derived = TapLimits.for_engine(self.prefill_chunk, host_tier=host_tier)
        return TapLimits(
            max_taps=derived.max_taps if self.max_new_taps is None else self.max_new_taps,
            ladder_tokens=self.tap_ladder_tokens or derived.ladder_tokens,
            min_gap_tokens=self.tap_min_gap_tokens or derived.min_gap_tokens,
            block_tokens=BLOCK_TOKENS,
        )

    def _host_cache_mib(self, device: torch.device) -> int:
        if not self.prefix_reuse:
            return 0
        if self.host_cache_mib is not None:
            return self.host_cache_mib
        return _CUDA_HOST_CACHE_MIB if device.type == "cuda" else _CPU_HOST_CACHE_MIB


@dataclass(frozen=True, kw_only=True)
class EffectiveOptions:
    """Every choice in force, as in ``EngineOptions``. ``num_blocks`` is the KV capacity in blocks of 64 tokens."""

    device: str
    dtype: str
    kv_dtype: str
    threads: int
    max_context: int
    max_concurrency: int
    max_pending: int
    prefill_chunk: int
    num_blocks: int
    snapshot_slots: int
    host_cache_bytes: int
    taps: TapLimits
    pending_timeout_seconds: float
    prefix_reuse: bool
    calibrate: bool = False

    def as_options(self) -> EngineOptions:
        """The same under the names one chooses by, nothing left to derive: an engine started with it is this one."""
        options = EngineOptions(
            device=self.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            threads=self.threads,
            max_context=self.max_context,
            max_concurrency=self.max_concurrency,
            max_pending=self.max_pending,
            prefill_chunk=self.prefill_chunk,
            kv_capacity=self.num_blocks * BLOCK_TOKENS,
            pending_timeout_seconds=self.pending_timeout_seconds,
            prefix_reuse=self.prefix_reuse,
            calibrate=self.calibrate,
        )
        if not self.prefix_reuse:
            return options
        return replace(
            options,
            device_snapshot_slots=self.snapshot_slots,
            host_cache_mib=self.host_cache_bytes // 2**20,
            max_new_taps=self.taps.max_taps,
            tap_ladder_tokens=self.taps.ladder_tokens,
            tap_min_gap_tokens=self.taps.min_gap_tokens,
        )


def _name(dtype: torch.dtype) -> str:
    return next(name for name, other in _DTYPES.items() if other is dtype)


def _automatic_kv_bytes(device: torch.device, state_bytes: int) -> int:
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return max(0, int(free * _CUDA_KV_SHARE) - state_bytes)
    return _CPU_KV_BYTES


def _require_range(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise OptionError(f"{name} must be between {low} and {high}, got {value!r}")
