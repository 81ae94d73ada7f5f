"""Coalescing: of several requests that come at once with a common prefix, one computes it, the others wait for it."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_index import CostModel, Prompt, Sibling, SnapshotKind, Tap, TapSource, plan_coalescing
from qwen35_kernels import BLOCK_TOKENS

__all__ = ["deepest_wait"]


def deepest_wait(
    prompt: Prompt, reuse: int, siblings: Sequence[Sibling], *, cost: CostModel, limit_seconds: float
) -> tuple[int, Tap] | None:
    """Which sibling's snapshot is worth waiting for: its number, and the tap it has to take. None where none is.

    Args:
        prompt: of the request that may wait.
        reuse: tokens it could skip now.
        siblings: lanes still in their prompts.
        cost: ranks the wait against computing.
        limit_seconds: how long a request may wait at all.
    """
    best: tuple[int, int] | None = None
    for number, sibling in enumerate(siblings):
        wait = plan_coalescing(
            prompt, reuse, sibling, cost, wait_limit_seconds=limit_seconds, block_tokens=BLOCK_TOKENS
        )
        if wait is not None and (best is None or wait.target > best[1]):
            best = number, wait.target
    if best is None:
        return None
    number, target = best
    return number, Tap(target, TapSource.DIVERGENCE, True, SnapshotKind.BOUNDARY)
