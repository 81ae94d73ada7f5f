"""The parts of an engine, made in the order in which they need each other. Tests and tools reach them here by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from qwen35_kernels import BLOCK_TOKENS, KVProfile, PageLayout, StateLayout

from .cache import PrefixCache
from .calibration import Calibration, calibrate_model
from .checkpoint.config import LINEAR, ModelConfig
from .host import HostTier
from .loop import Loop
from .memory import DeviceMemory
from .metrics import RequestListener
from .model.qwen35 import Qwen35Model
from .model.weights import ModelWeights
from .options import EffectiveOptions, EngineOptions
from .sampling import KernelSampler, Sampler
from .worker import Worker

__all__ = ["EngineParts"]

_PROFILES = {torch.float32: KVProfile.FP32, torch.bfloat16: KVProfile.BF16}


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineParts:
    """Everything an engine is made of. Once its worker runs, the other parts are the worker's.

    Attributes:
        config: the model's shape.
        options: every choice in force.
        weights: on their device.
        memory: pages and states.
        model: the forward passes.
        calibration: what computing takes, and the file that remembers it; None where that was not asked for.
        host: the Host tier, if there is one.
        cache: the binding between tokens and pages.
        loop: the line, the running sequences, the step.
        worker: the thread in front of the loop; not started.
    """

    config: ModelConfig
    options: EffectiveOptions
    weights: ModelWeights
    memory: DeviceMemory
    model: Qwen35Model
    calibration: tuple[Path, Calibration] | None
    host: HostTier | None
    cache: PrefixCache
    loop: Loop
    worker: Worker

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        weights: ModelWeights,
        options: EngineOptions,
        *,
        sampler: Sampler | None = None,
        on_request: RequestListener | None = None,
    ) -> EngineParts:
        """Make the parts; see ``Engine`` for the arguments.

        Raises:
            OptionError: sizes that contradict each other, the model or the memory.
        """
        device = weights.device
        page_layout = PageLayout(
            profile=_PROFILES[options.resolve_kv_dtype(weights.dtype)],
            num_layers=config.num_full_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        state_layout = StateLayout(
            num_layers=config.num_linear_layers,
            num_value_heads=config.num_value_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            conv_channels=config.conv_channels,
            conv_width=config.conv_width,
            conv_dtype=weights.dtype,
            hidden_size=config.hidden_size,
            hidden_dtype=weights.dtype,
        )
        effective = options.resolve_sizes(
            config,
            page_bytes=page_layout.page_bytes,
            image_bytes=state_layout.image_bytes,
            device=device,
            dtype=weights.dtype,
        )
        memory = DeviceMemory(
            page_layout=page_layout,
            state_layout=state_layout,
            layers=[kind == LINEAR for kind in config.layer_kinds],
            num_pages=1 + effective.num_blocks,
            num_slots=1 + effective.max_concurrency + effective.snapshot_slots,
            device=device,
        )
        model = Qwen35Model(config, weights, memory)
        calibration = calibrate_model(model, memory, config, effective) if effective.calibrate else None
        budget = effective.host_cache_bytes
        host = HostTier(memory, budget_bytes=budget) if budget else None
        cache = PrefixCache(
            memory,
            max_concurrency=effective.max_concurrency,
            context_blocks=-(-effective.max_context // BLOCK_TOKENS),
            snapshot_slots=effective.snapshot_slots,
            host=host,
            calibration=None if calibration is None else calibration[1],
        )
        loop = Loop(
            model=model,
            cache=cache,
            sampler=sampler or KernelSampler(),
            options=effective,
            device=device,
            on_request=on_request,
        )
        worker = Worker(
            loop,
            max_running=effective.max_concurrency,
            max_waiting=effective.max_pending,
            threads=options.threads,
        )
        return cls(
            config=config,
            options=effective,
            weights=weights,
            memory=memory,
            model=model,
            calibration=calibration,
            host=host,
            cache=cache,
            loop=loop,
            worker=worker,
        )
