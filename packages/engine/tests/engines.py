"""Engines over tiny checkpoints, and requests for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny_checkpoints
from qwen35_engine import Engine, EngineOptions, GenerationRequest, SamplingParams

GREEDY = SamplingParams(temperature=0)
VOCAB = tiny_checkpoints.BASE["vocab_size"]


def engine_of(folder: Path, sampler: Any = None, **options: Any) -> Engine:
    """Small, and without timing chunks at the start."""
    small = {"threads": 1, "kv_capacity": 8192, "host_cache_mib": 0, "calibrate": False}
    return Engine.from_folder(folder, EngineOptions(**(small | options)), sampler=sampler)


def tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def request(prompt: Sequence[int], max_tokens: int = 4, **changes: Any) -> GenerationRequest:
    return GenerationRequest(**({"tokens": prompt, "max_tokens": max_tokens, "sampling": GREEDY} | changes))
