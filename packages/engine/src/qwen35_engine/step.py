"""Running a planned step: the forward passes, what they publish, and the tokens drawn from them."""

from __future__ import annotations

import logging
from array import array
from collections import abc
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from qwen35_kernels import BLOCK_TOKENS, log_probabilities
from slab_pool import CopyFailed

from .cache import PrefixCache
from .errors import ExecutionError
from .metrics import FinishReason
from .request import NewTokens, TokenLogprobs
from .sampling import Sampler, SamplingRow
from .scheduler import PrefillChunk, StepPlan
from .sequence import Sequence

__all__ = ["Ending", "Model", "StepRunner", "concerns_all", "failure"]

logger = logging.getLogger(__name__)

Ending = FinishReason | ExecutionError


class Model(Protocol):
    """What a step needs of a model; see ``model.qwen35.Qwen35Model`` for the contract of each call."""

    def prefill(
        self,
        *,
        tokens: Tensor,
        base: int,
        block_table: Tensor,
        slot: int,
        taps: abc.Sequence[tuple[int, int]] = (),
        before_layer: Callable[[int], None] | None = None,
    ) -> Tensor: ...

    def decode(self, *, tokens: Tensor, positions: Tensor, block_tables: Tensor, slots: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class StepRunner:
    """Runs steps. What a pass has written is published only when it has succeeded and is finite.

    Attributes:
        model: computes.
        sampler: draws tokens.
    """

    def __init__(
        self,
        *,
        model: Model,
        cache: PrefixCache,
        sampler: Sampler,
        device: torch.device,
        clock: Callable[[], float],
    ) -> None:
        self.model = model
        self._cache = cache
        self.sampler = sampler
        self._device = device
        self._clock = clock

    def run(self, plan: StepPlan[Sequence]) -> Iterator[tuple[Sequence, Ending]]:
        """Run a step; yields each sequence that ends by it, with the reason. The caller ends it before it goes on.

        Raises:
            CopyFailed: a copy failed; nothing can go on.
            Exception: a pass failed for which no single sequence can be blamed.
        """
        if plan.prefill is not None:
            yield from self._prefill(plan.prefill)
        if plan.decode:
            yield from self._decode(plan.decode)

    def _prefill(self, chunk: PrefillChunk[Sequence]) -> Iterator[tuple[Sequence, Ending]]:
        sequence, restore = chunk.sequence, chunk.sequence.restore
        self._cache.publisher.claim_taps(sequence, chunk.end)
        try:
            if restore is not None:
                restore.wait_for_prelude()
            hidden = self.model.prefill(
                tokens=self._to_device(sequence.tokens[chunk.begin : chunk.end]),
                base=chunk.begin,
                block_table=self._cache.lanes.block_tables[sequence.row],
                slot=sequence.slot,
                taps=sorted((tap.position, slot) for slot, tap in sequence.claimed.items()),
                before_layer=None if restore is None else restore.wait_for_layer,
            ).unsqueeze(0)
            _require_finite(hidden)
        except Exception as error:
            if concerns_all(error):
                raise
            yield sequence, failure(sequence, "the forward pass", error)
            return
        if restore is not None:
            sequence.restore = None  # every layer has waited for its part
            sequence.times.land(self._clock())
        sequence.computed = chunk.end
        self._cache.publisher.commit(sequence)
        self._cache.publisher.publish_taps(sequence)
        if not sequence.in_prompt:
            yield from self._draw([sequence], hidden)

    def _decode(self, sequences: abc.Sequence[Sequence]) -> Iterator[tuple[Sequence, Ending]]:
        running = []
        for sequence in sequences:
            if self._cache.grow(sequence, sequence.computed + 1):
                running.append(sequence)
            else:
                sequence.out_of_pages = True
                yield sequence, "length"
        if not running:
            return
        try:
            hidden = self._pass_of(running)
        except Exception as error:
            if len(running) > 1 or concerns_all(error):
                raise  # it is unknown whose fault it is, and what else it has touched
            yield running[0], failure(running[0], "the forward pass", error)
            return
        sound = torch.isfinite(hidden).all(dim=-1).tolist()
        if not all(sound):
            for sequence, fine in zip(running, sound, strict=True):
                if not fine:
                    yield sequence, failure(sequence, "the forward pass", _not_finite())
            hidden = hidden[torch.tensor(sound, device=self._device)]
            running = [sequence for sequence, fine in zip(running, sound, strict=True) if fine]
        for sequence in running:
            sequence.computed += 1
            self._cache.publisher.commit(sequence)
        if running:
            yield from self._draw(running, hidden)

    def _pass_of(self, running: abc.Sequence[Sequence]) -> Tensor:
        """One token of each; the hidden states, ``[len(running), hidden]``."""
        width = max(sequence.computed // BLOCK_TOKENS for sequence in running) + 1
        # One transfer for all four.
        tokens, positions, rows, slots = torch.tensor(
            [
                [sequence.tokens[sequence.computed] for sequence in running],
                [sequence.computed for sequence in running],
                [sequence.row for sequence in running],
                [sequence.slot for sequence in running],
            ],
            device=self._device,
        ).unbind()
        return self.model.decode(
            tokens=tokens,
            positions=positions,
            block_tables=self._cache.lanes.block_tables[rows, :width],
            slots=slots,
        )

    def _draw(self, sequences: abc.Sequence[Sequence], hidden: Tensor) -> Iterator[tuple[Sequence, Ending]]:
        """Draw one token for each sequence from its last hidden state and hand it out."""
        rows = [
            SamplingRow(sequence.request_id, sequence.request.sampling, sequence.seed, sequence.completion_tokens)
            for sequence in sequences
        ]
        logits = self.model.logits(hidden)
        ids = self.sampler(logits, rows)
        now = self._clock()
        for i, (sequence, token) in enumerate(zip(sequences, ids, strict=True)):
            wanted = sequence.request.logprobs
            event = NewTokens((token,), () if wanted is None else (_logprobs(logits[i], token, wanted),))
            reason = sequence.draw(token, now, event)
            if reason is not None:
                yield sequence, reason

    def _to_device(self, tokens: array[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64).to(self._device)


def failure(sequence: Sequence, what: str, error: Exception) -> ExecutionError:
    """What the client is told of a failure; the rest goes to the log."""
    logger.error("request %d: %s failed: %s", sequence.request_id, what, error)
    return ExecutionError(f"{what} failed: {type(error).__name__}")


def concerns_all(error: Exception) -> bool:
    """Whether more than one request is in doubt: what was copied, or whether there is memory for anything."""
    return isinstance(error, CopyFailed | MemoryError | torch.OutOfMemoryError)


def _logprobs(logits: Tensor, drawn: int, wanted: int) -> TokenLogprobs:
    """Of one row of logits, ``[vocab]``."""
    row = log_probabilities(logits=logits.unsqueeze(0))[0]
    best = row.topk(min(wanted, len(row)))
    return TokenLogprobs(float(row[drawn]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


def _require_finite(hidden: Tensor) -> None:
    if not bool(torch.isfinite(hidden).all()):
        raise _not_finite()


def _not_finite() -> ArithmeticError:
    return ArithmeticError("the hidden state is not finite")
