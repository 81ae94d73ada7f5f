"""Driving an engine token by token: samplers that force a continuation and record every row of logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from qwen35_engine import Engine, Failed, Finished, GenerationRequest, NewTokens, SamplingRow, TokenStream, Usage

# Bounds of the design: resumed or interleaved against alone, fp32 on a CPU.
LOG_PROBABILITY_BOUND = 1e-4
DECIDED_GAP = 2e-4


class ForcingSampler:
    """Gives each request its own continuation, whatever the logits say, and keeps the log-probabilities.

    ``continuations`` maps the request's seed, which the test chooses, to the tokens to hand out. ``on_draw`` runs
    on the worker's thread before each draw, so that a test can damage the engine's memory between two steps.
    """

    def __init__(
        self, continuations: Mapping[int, Sequence[int]], *, on_draw: Callable[[int, int], None] | None = None
    ) -> None:
        self._continuations = continuations
        self._on_draw = on_draw
        self.log_probabilities: dict[int, list[torch.Tensor]] = {seed: [] for seed in continuations}

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        drawn = []
        for row, row_logits in zip(rows, logits, strict=True):
            assert row.step == len(self.log_probabilities[row.seed])
            if self._on_draw is not None:
                self._on_draw(row.seed, row.step)
            self.log_probabilities[row.seed].append(row_logits.log_softmax(-1).clone())
            drawn.append(self._continuations[row.seed][row.step])
        return drawn

    def of(self, seed: int) -> torch.Tensor:
        """``[steps, vocab]``."""
        return torch.stack(self.log_probabilities[seed])


def collect(stream: TokenStream) -> tuple[list[int], Usage]:
    """Wait for the end of an answer: its tokens and usage."""
    ids: list[int] = []
    for event in stream:
        if isinstance(event, NewTokens):
            ids += event.ids
        elif isinstance(event, Failed):
            raise event.error
        elif isinstance(event, Finished):
            return ids, event.usage
    raise AssertionError("a stream ends with Finished or Failed")


def run(engine: Engine, request: GenerationRequest) -> tuple[list[int], Usage]:
    return collect(engine.submit(request))


def assert_same_predictions(ours: torch.Tensor, reference: torch.Tensor) -> None:
    """The design's bound: log-probabilities of the whole vocabulary, and the choice wherever it is decided."""
    assert ours.shape == reference.shape
    difference = (ours - reference).abs().max().item()
    assert difference <= LOG_PROBABILITY_BOUND, f"log-probabilities differ by {difference:.3g}"
    best = reference.topk(2, dim=-1).values
    decided = best[:, 0] - best[:, 1] > DECIDED_GAP
    assert torch.equal(ours.argmax(-1)[decided], reference.argmax(-1)[decided])
