"""The worker thread: an inbox in front of the loop, and an orderly end behind it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass

import torch

from slab_pool import CopyFailed

from .errors import EngineClosed, EngineError, QueueFull
from .loop import Loop
from .metrics import FinishReason, Totals
from .sequence import Sequence

__all__ = ["Worker", "WorkerStats"]

logger = logging.getLogger(__name__)

# How often an idle worker looks whether copies have landed: what they hold is to be free again, and shown as such.
_LANDING_SECONDS = 0.01


@dataclass(frozen=True)
class WorkerStats:
    running: int
    prefilling: int
    waiting: int
    totals: Totals
    unheard: int


class Worker:
    """Runs a ``Loop`` on a thread of its own. ``submit``, ``require_room``, ``end``, ``close`` and ``stats`` may
    be called from any."""

    def __init__(
        self,
        loop: Loop,
        *,
        max_running: int,
        max_waiting: int,
        threads: int | None,
    ) -> None:
        """``threads`` CPU threads run a forward pass."""
        self._loop = loop
        self._max_waiting = max_waiting
        self._max_open = max_running + max_waiting
        self._threads = threads
        self._changed = threading.Condition()
        self._inbox: deque[Sequence] = deque()
        self._ending: dict[int, FinishReason] = {}
        self._submitted = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="qwen35-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises:
            QueueFull: as many requests are open as may be.
            EngineClosed: the worker is stopping or has stopped.
        """
        with self._changed:
            self.require_room()
            self._submitted += 1
            self._inbox.append(sequence)
            self._changed.notify()

    def require_room(self) -> None:
        """Refuse what ``submit`` would refuse now.

        Raises:
            QueueFull: as many requests are open as may be.
            EngineClosed: the worker is stopping or has stopped.
        """
        with self._changed:
            if self._closing:
                raise EngineClosed("the engine is closed")
            if self._num_open >= self._max_open:
                raise QueueFull(f"at most {self._max_waiting} requests may wait, got one more")

    def end(self, request_id: int, reason: FinishReason) -> None:
        """End a request soon; the first reason given holds. No effect after its end."""
        with self._changed:
            if not self._closing:
                self._ending.setdefault(request_id, reason)
                self._changed.notify()

    def close(self) -> None:
        """Stop after the current step; every request still open fails with ``EngineClosed``."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def is_open(self) -> bool:
        with self._changed:
            return not self._closing

    def stats(self) -> WorkerStats:
        with self._changed:
            running = len(self._loop.running)
            prefilling = self._loop.num_prefilling
            accounts = self._loop.accounts
            return WorkerStats(
                running=running,
                prefilling=min(prefilling, running),
                waiting=max(0, self._num_open - running),
                totals=accounts.totals,
                unheard=accounts.unheard,
            )

    @property
    def _num_open(self) -> int:
        return self._submitted - self._loop.accounts.totals.requests

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        reason: EngineError = EngineClosed("the engine was closed before the answer was complete")
        try:
            while self._wait():
                self._turn()
            self._loop.cache.transfers.drain()
        except Exception as error:
            # Nothing a request does may end the loop; what gets here is a fault of the engine's own.
            logger.exception("the engine's worker failed and stops")
            reason = EngineClosed(f"the engine failed: {type(error).__name__}")
        with self._changed:
            self._closing = True
            self._loop.add(self._inbox)
            self._inbox.clear()
        self._loop.fail_all(reason)

    def _turn(self) -> None:
        try:
            self._drain()
            self._loop.turn()
        except CopyFailed:
            raise  # bytes are in doubt that cannot be checked: an orderly end is all that is left
        except Exception as error:
            logger.exception("a step failed; every request is answered and the cache emptied")
            self._loop.recover(error)

    def _wait(self) -> bool:
        """Wait while there is nothing to do, but no longer than copies are left to themselves. False: stop."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._inbox or self._ending or self._loop.has_work,
                timeout=_LANDING_SECONDS if self._loop.cache.transfers else None,
            )
            return not self._closing

    def _drain(self) -> None:
        """Hand over what came in."""
        with self._changed:
            sequences, self._inbox = self._inbox, deque()
            ending, self._ending = self._ending, {}
        self._loop.add(sequences)
        if ending:
            self._loop.end(ending)
