"""Prefetch: while the next request waits for a place, blocks that only the Host has come back to the device for it.

Its admission then finds them resident and restores only the rest. They are ordinary cached blocks: on their way until
the batch has landed, then free to be evicted again, last of all. A prefetch displaces only what the Host still holds.
"""

from __future__ import annotations

from contextlib import ExitStack

from prefix_index import Candidate, CostModel, Match, PrefixIndex, Prompt, rank_candidates
from prefix_index import Ticket as Fill

from ..host import Restore
from .restore import Restorer
from .space import Space
from .transfers import Transfers

__all__ = ["MAX_PREFETCH_BLOCKS", "Prefetch"]

MAX_PREFETCH_BLOCKS = 256  # a batch; a longer path takes several, so that an admission never waits long for one


class Prefetch:
    """One batch at a time, and never beside a lane's own restore, which it would only delay."""

    def __init__(
        self, index: PrefixIndex, space: Space, restorer: Restorer, transfers: Transfers, *, cost: CostModel
    ) -> None:
        self._index = index
        self._space = space
        self._restorer = restorer
        self._transfers = transfers
        self._cost = cost
        self._batch: tuple[Restore, Fill] | None = None
        # Matching walks the whole path: where it brought nothing, it is tried again only once there is more room.
        self._last_prompt: Prompt | None = None
        self._last_room = 0
        self.blocks = 0

    def start(self, prompt: Prompt) -> int:
        """Start bringing back blocks of what ``prompt`` would resume from; how many. Never waits."""
        room = self._space.page_room()
        if self._restorer.busy or (prompt is self._last_prompt and room <= self._last_room):
            return 0
        match = self._index.match(prompt)
        source = rank_candidates(match.candidates, prompt.num_tokens, self._cost)[0]
        missing = 0 if source is None else source.depth - match.device_blocks
        count = 0
        if source is not None and missing > 0:
            with ExitStack() as undo:
                count = self._bring(match, source, min(missing, MAX_PREFETCH_BLOCKS), undo)
                if count:
                    undo.pop_all()
        self._last_prompt, self._last_room = (None, 0) if count else (prompt, room)
        self.blocks += count
        return count

    def _bring(self, match: Match, source: Candidate, count: int, undo: ExitStack) -> int:
        """Start a batch of up to ``count`` blocks; how many. What ``undo`` holds is to be run where that is none."""
        path = self._index.acquire(match, source)  # not activated: it changes no recency and is no hit
        undo.callback(self._index.cancel, path)
        pages = self._space.take_backed_pages(count)
        undo.callback(self._space.pages.give_back, pages)
        if pages:
            self._batch = self._restorer.ahead(path, pages, undo)
        return len(pages)

    def crosses(self, match: Match) -> bool:
        """Whether a batch that is still on its way brings blocks that ``match`` could use."""
        if self._batch is None or not self._batch[1].open:
            return False
        begin, end = self._batch[1].blocks
        return any(first < end and begin < last for first, last in match.filling)

    def land(self) -> None:
        """Wait for the batch and settle it.

        Raises:
            CopyFailed: it will not come.
        """
        if self._batch is not None:
            self._batch[0].wait()
            self._transfers.poll()
            self._batch = None
