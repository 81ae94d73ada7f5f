"""A request on its way to the worker, and in its lane."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from prefix_index import Prompt, Sibling, Tap

from .accounting import Stopwatch
from .cache import LaneMemory
from .request import GenerationRequest, TokenStream

__all__ = ["Job", "Lane"]


@dataclass(frozen=True, eq=False)
class Job:
    """A request on its way to the worker. ``prompt`` is None where the request does not use the cache; ``submitted`` is
    when it came, by the core's clock."""

    stream: TokenStream
    request: GenerationRequest
    tokens: array[int]
    prompt: Prompt | None
    max_tokens: int
    seed: int
    submitted: float


@dataclass(eq=False)
class Lane:
    """A running sequence. ``tokens`` are the prompt and every token drawn; the first ``computed`` have KV and state.
    ``taps`` are those still ahead, ``last_capture`` is the frontier of its latest snapshot, or where it resumed."""

    number: int
    job: Job
    memory: LaneMemory
    tokens: array[int]
    computed: int
    taps: list[Tap]
    times: Stopwatch
    last_capture: int = 0

    def __post_init__(self) -> None:
        self.last_capture = self.computed

    @property
    def prompt_tokens(self) -> int:
        return len(self.job.tokens)

    @property
    def in_prompt(self) -> bool:
        """Whether a part of the prompt is still to be computed."""
        return self.computed < self.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def as_sibling(self) -> Sibling:
        """This lane as a request sees it that may wait for it; both use the cache."""
        assert self.job.prompt is not None
        return Sibling(
            prompt=self.job.prompt,
            cursor=self.computed,
            last_capture=self.last_capture,
            taps=tuple(tap.position for tap in self.taps),
        )
