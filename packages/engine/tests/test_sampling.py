"""The default sampler: greedy without noise, and a row that depends on nothing but itself."""

from __future__ import annotations

import pytest
import torch

from qwen35_engine import SamplingParams, SamplingRow
from qwen35_engine.sampling import KernelSampler

LOGITS = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))


def row(seed: int = 1, step: int = 0, **params: float) -> SamplingRow:
    return SamplingRow(1, SamplingParams(**params), seed, step)  # type: ignore[arg-type]


def test_temperature_zero_takes_the_most_likely() -> None:
    assert KernelSampler()(LOGITS, [row(temperature=0)] * 4) == LOGITS.argmax(-1).tolist()


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    rows = [row(temperature=0), row(), row(temperature=0), row(top_k=1)]
    drawn = KernelSampler()(LOGITS, rows)
    best = LOGITS.argmax(-1).tolist()
    assert [drawn[0], drawn[2], drawn[3]] == [best[0], best[2], best[3]]


@pytest.mark.parametrize(
    "least", [{"top_p": 5e-324}, {"top_p": 1e-50}, {"temperature": 5e-324}, {"temperature": 1e-40}, {"min_p": 1}]
)
def test_the_least_a_request_may_ask_for_takes_the_most_likely(least: dict[str, float]) -> None:
    """Also where single precision cannot tell it from 0."""
    drawn = KernelSampler()(LOGITS, [row(seed=seed, **least) for seed in range(4)])
    assert drawn == LOGITS.argmax(-1).tolist()


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows = [row(seed=s, step=s, top_p=0.9, top_k=20, min_p=0.01) for s in range(4)]
    together = KernelSampler()(LOGITS, rows)
    assert together == [KernelSampler()(LOGITS[i : i + 1], [rows[i]])[0] for i in range(4)]


def test_seed_and_step_both_matter() -> None:
    same = LOGITS[:1].expand(64, -1) * 0.1
    by_step = KernelSampler()(same, [row(step=step) for step in range(64)])
    by_seed = KernelSampler()(same, [row(seed=seed) for seed in range(64)])
    assert len(set(by_step)) > 20
    assert len(set(by_seed)) > 20
    assert by_step == KernelSampler()(same, [row(step=step) for step in range(64)])
