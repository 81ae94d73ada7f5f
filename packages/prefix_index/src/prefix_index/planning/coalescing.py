"""Coalescing: whether a request should wait for another that computes the same prefix, or brings it from the Host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefix_index.planning.admission import Source, resume_seconds
from prefix_index.planning.cost import CostModel
from prefix_index.planning.taps import Tap, TapSource
from prefix_index.prompt import TOKEN_BYTES, Prompt
from prefix_index.types import SnapshotKind, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """A lane that is prefilling: where it stands and what it will capture.

    Attributes:
        prompt: what it prefills.
        cursor: tokens it has prefilled.
        last_capture: frontier of its latest capture, where it resumed at least.
        taps: exact taps still ahead of it.
        pending: frontiers captured but not published yet.
    """

    prompt: Prompt
    cursor: int
    last_capture: int
    taps: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the sibling's snapshot at `target`; where it is a `new_tap`, `tap` must be added to its plan."""

    target: int
    new_tap: bool

    @property
    def tap(self) -> Tap:
        """The tap at the target, as a BOUNDARY: conversations share it."""
        return Tap(self.target, TapSource.DIVERGENCE, True, SnapshotKind.BOUNDARY)


def common_prefix(left: Prompt, right: Prompt) -> int:
    """Tokens that two prompts share, extras and namespace included. O(bytes shared) compares, no loop over tokens."""
    if left.namespace != right.namespace:
        return 0
    shared = min(left.num_tokens, right.num_tokens)
    for pairs, others in ((left.extras, right.extras), (right.extras, left.extras)):
        for pair in pairs:
            if pair not in others:
                shared = min(shared, pair[0])
                break
    low, high = 0, shared
    while low < high:
        middle = (low + high + 1) // 2
        if right.tokens.startswith(left.tokens[low * TOKEN_BYTES : middle * TOKEN_BYTES], low * TOKEN_BYTES):
            low = middle
        else:
            high = middle - 1
    return low


def plan_coalescing(
    prompt: Prompt,
    reuse: int,
    sibling: Sibling,
    cost: CostModel,
    *,
    wait_limit_seconds: float,
    exclude: Sequence[Span] = (),
    split_seconds: float = 0.0,
    block_tokens: int = 64,
) -> Wait | None:
    """The snapshot of `sibling` that `prompt` should wait for, or None.

    Args:
        prompt: what would wait.
        reuse: tokens the cache could serve now.
        sibling: the lane to wait for.
        cost: ranks the wait against computing.
        wait_limit_seconds: the queue's timeout; twice the sibling's way to the target must fit into half of it. 0 is no
            wait.
        exclude: spans the target may not lie strictly inside.
        split_seconds: what an exact tap costs the sibling; with 0 the target is the last block's end they share.
        block_tokens: tokens per block.
    """
    shared = min(common_prefix(prompt, sibling.prompt), prompt.num_tokens - 1)
    if shared <= reuse or wait_limit_seconds <= 0:
        return None
    wait = _planned(shared, reuse, sibling, cost, split_seconds, block_tokens)
    if wait is not None:
        target = wait.target
        saved = cost.prefill_seconds(reuse, target - reuse)
        way = cost.prefill_seconds(sibling.cursor, target - sibling.cursor)
        inside = any(begin < target < end for begin, end in exclude)
        worthwhile = saved > (split_seconds if wait.new_tap else 0.0)
        if target > sibling.last_capture and not inside and worthwhile and 2 * way <= wait_limit_seconds / 2:
            return wait
    pending = [frontier for frontier in sibling.pending if reuse < frontier <= shared]
    return Wait(max(pending), False) if pending else None


def _planned(
    shared: int, reuse: int, sibling: Sibling, cost: CostModel, split_seconds: float, block_tokens: int
) -> Wait | None:
    """The boundary below the divergence, or a tap planned anyway where adding one would cost more than it saves."""
    target = shared // block_tokens * block_tokens
    ahead = [tap for tap in sibling.taps if reuse < tap <= shared and tap > sibling.cursor]
    if target in ahead:
        return Wait(target, False)
    if split_seconds and ahead:
        planned = max(ahead)
        if planned >= target or cost.prefill_seconds(planned, target - planned) <= split_seconds:
            return Wait(planned, False)
    return Wait(target, True) if target > sibling.cursor and target > reuse else None


def worth_landing(
    candidates: Iterable[Source], source: Source | None, num_tokens: int, cost: CostModel, *, bytes_on_their_way: int
) -> bool:
    """Whether copies that are on their way for another request are worth waiting for.

    Args:
        candidates: where the prompt could resume, those included that still have copies on their way.
        source: where it could resume now; None is the first token.
        num_tokens: of the prompt.
        cost: ranks the wait against computing.
        bytes_on_their_way: of all copies from the Host that have not landed.
    """
    if not bytes_on_their_way:
        return False
    now = resume_seconds(source, num_tokens, cost)
    wait = cost.restore_seconds(bytes_on_their_way)
    return any(
        candidate.filling and wait + resume_seconds(candidate, num_tokens, cost) < now for candidate in candidates
    )
