"""Coalescing: of several requests that come at once with a common prefix, one computes it or brings it back from the
Host, the others wait for it."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_index import (
    Candidate,
    CostModel,
    Match,
    Prompt,
    Sibling,
    SnapshotKind,
    Tap,
    TapSource,
    plan_coalescing,
    resume_seconds,
)
from qwen35_kernels import BLOCK_TOKENS

__all__ = ["deepest_wait", "lands_soon"]


def lands_soon(match: Match, source: Candidate | None, *, cost: CostModel, bytes_on_their_way: int) -> bool:
    """Whether what is on its way to the device for another lane is worth waiting for.

    Args:
        match: what is cached of the prompt.
        source: what it could resume from now; None is the first token.
        cost: ranks the wait against computing.
        bytes_on_their_way: of all copies from the Host that have not landed.
    """
    if not bytes_on_their_way:
        return False
    num_tokens = match.prompt.num_tokens
    now = resume_seconds(source, num_tokens, cost)
    wait = cost.restore_seconds(bytes_on_their_way)
    return any(
        candidate.filling and wait + resume_seconds(candidate, num_tokens, cost) < now for candidate in match.candidates
    )


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
