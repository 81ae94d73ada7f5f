"""One request from its submission to its end: what was asked, how far it is, what it holds, what it cost."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from prefix_index import Lease, Prompt, Sibling, SnapshotHandle, Tap

from .errors import EngineError
from .host import Restore
from .metrics import FinishReason, MissReason, RequestReport, Reuse, Stopwatch, Usage
from .request import Failed, Finished, GenerationRequest, NewTokens, TokenStream

__all__ = ["Sequence"]


@dataclass(eq=False, kw_only=True)
class Sequence:
    """The one owner of everything that belongs to a request.

    It waits in the line, runs in a lane (a row of the block tables and a state slot), and ends once, by ``close``. The
    cache fills in what it holds when it starts and takes that back when it ends. The owners of a running
    sequence's pages, block by block::

        0 ............ frontier//64 ............ committed ............ len(pages)
        | the index's, pinned by  | the index's, or the      | its own: being written     |
        | the lease               | lane's if a duplicate    | or reserved for output     |

    Attributes:
        stream: takes its events.
        request: what was asked.
        prompt: the prepared prompt; None for a request that does without the cache.
        tokens: the prompt and every token drawn; the first ``computed`` have KV and state.
        max_tokens: output tokens at most.
        seed: of the random draws.
        times: when things happened to it.
        computed: tokens that have KV and state.
        frontier: the token it resumed at; 0 before it starts.
        last_capture: the frontier of its latest snapshot, or where it resumed.
        taps: the planned taps still ahead.
        row: its row of the block tables; None while it has no lane.
        slot: its state slot; 0 while it has none, and once a snapshot has taken it over.
        lease: its pin in the index.
        pages: the page of each block.
        committed: blocks that were handed to the index.
        private: the pages that are its own.
        restore: the copies that its first pass waits for.
        activated: whether a pass of it has succeeded. Until then it has only borrowed, and ends without a trace.
        claimed: the taps of a pass that is still to be published, by the slot that each was given.
        published: the snapshots it has made.
        reuse: what it skips and why no more.
        taps_taken: planned snapshots it has made.
        taps_skipped: planned snapshots that found no room.
        out_of_pages: whether it ended for lack of pages.
    """

    stream: TokenStream
    request: GenerationRequest
    prompt: Prompt | None
    tokens: array[int]
    max_tokens: int
    seed: int
    times: Stopwatch

    computed: int = 0
    frontier: int = 0
    last_capture: int = 0
    taps: list[Tap] = field(default_factory=list)

    row: int | None = None
    slot: int = 0
    lease: Lease | None = None
    pages: list[int] = field(default_factory=list)
    committed: int = 0
    private: set[int] = field(default_factory=set)
    restore: Restore | None = None
    activated: bool = False
    claimed: dict[int, Tap] = field(default_factory=dict)
    published: list[SnapshotHandle] = field(default_factory=list)

    reuse: Reuse = field(init=False)
    taps_taken: int = 0
    taps_skipped: int = 0
    out_of_pages: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.reuse = Reuse(reason=MissReason.DISABLED if self.prompt is None else MissReason.NOT_ADMITTED)

    @property
    def request_id(self) -> int:
        return self.stream.request_id

    @property
    def in_prompt(self) -> bool:
        """Whether a part of the prompt is still to be computed."""
        return self.computed < self.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def restoring(self) -> bool:
        """Whether a part of what it resumes from is still on its way."""
        return self.restore is not None and not self.restore.done()

    def as_sibling(self) -> Sibling:
        """This sequence as a request sees it that may wait for it. Both use the cache."""
        assert self.prompt is not None
        return Sibling(
            prompt=self.prompt,
            cursor=self.computed,
            last_capture=self.last_capture,
            taps=tuple(tap.position for tap in self.taps),
        )

    def plan_tap(self, tap: Tap) -> None:
        """Add a tap before all others, in the place of one that is planned at the same position."""
        self.taps = [tap, *(other for other in self.taps if other.position != tap.position)]

    def draw(self, token: int, now: float, event: NewTokens) -> FinishReason | None:
        """Append a token and hand it out; the reason to end with it, if there is one."""
        self.tokens.append(token)
        self.times.token(now)
        self.stream.put(event)
        if token in self.request.stop_token_ids:
            return "stop"
        return "length" if self.completion_tokens >= self.max_tokens else None

    def close(self, ending: FinishReason | EngineError, now: float, *, settle: Callable[[RequestReport], None]) -> None:
        """End the request: ``settle`` counts it, then its stream is told. What it held was given back before."""
        usage = Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            reuse=self.reuse,
            timing=self.times.read(now, completion_tokens=self.completion_tokens),
            taps_taken=self.taps_taken,
            taps_skipped=self.taps_skipped,
        )
        error = ending if isinstance(ending, EngineError) else None
        settle(
            RequestReport(
                request_id=self.request_id,
                outcome=ending if not isinstance(ending, EngineError) else "failed",
                error=type(error).__name__ if error is not None else None,
                executed=self.computed > self.frontier,
                usage=usage,
                out_of_pages=self.out_of_pages,
            )
        )
        self.stream.put(Finished(ending, usage) if not isinstance(ending, EngineError) else Failed(ending, usage))
