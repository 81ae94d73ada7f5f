"""Drawing the next token of each lane. The engine asks a ``Sampler``; the default one calls the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

import qwen35_kernels as kernels

from .request import SamplingParams

__all__ = ["KernelSampler", "Sampler", "SamplingRow"]


@dataclass(frozen=True)
class SamplingRow:
    """The request of a row of logits, how it samples, its seed, and which of its tokens is drawn (from 0)."""

    request_id: int
    params: SamplingParams
    seed: int
    step: int


class Sampler(Protocol):
    """Draws one token for each row. A row's token must depend on nothing but that row and its logits."""

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        """``logits`` fp32 ``[len(rows), vocab]``; returns one token id a row."""
        ...


class KernelSampler:
    """Temperature, top-k, top-p, min-p with a seed of the request's own."""

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        if all(row.params.temperature == 0 for row in rows):
            greedy: list[int] = logits.argmax(dim=-1).tolist()
            return greedy
        device = logits.device

        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        # Doubles, as the request has them: a top_p above 0 must not be rounded to 0.
        drawn = kernels.sample(
            logits=logits,
            temperature=column([row.params.temperature for row in rows], torch.float64),
            top_k=column([row.params.top_k for row in rows], torch.int64),
            top_p=column([row.params.top_p for row in rows], torch.float64),
            min_p=column([row.params.min_p for row in rows], torch.float64),
            seeds=column([row.seed for row in rows], torch.int64),
            steps=column([row.step for row in rows], torch.int64),
        )
        ids: list[int] = drawn.tolist()
        return ids
