"""One request in the engine, as text that comes in pieces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from qwen35_engine import (
    Engine,
    EngineError,
    Failed,
    Finished,
    GenerationRequest,
    NewTokens,
    SamplingParams,
    Started,
    TokenLogprobs,
    TokenStream,
    Usage,
)

from .errors import Unavailable, from_engine
from .schema import SamplingFields
from .text import StopStrings, TokenDecoder

__all__ = ["End", "Generation", "Piece", "sampling_of"]


@dataclass(frozen=True)
class Piece:
    """Text to show, perhaps none yet, and the tokens that came with it."""

    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class End:
    """The last item: how the answer ended, ``stop`` or ``length``, and what it cost."""

    reason: str
    usage: Usage


class Generation:
    """One request in the engine. Start it, then iterate once; it ends with an ``End``.

    Raises:
        ServeError: while iterating, where there is no answer or no more of it.
    """

    def __init__(
        self,
        engine: Engine,
        decoder: TokenDecoder,
        request: GenerationRequest,
        *,
        prompt: str,
        stops: Sequence[str],
    ) -> None:
        """Nothing is queued yet.

        Args:
            engine: answers.
            decoder: a fresh one.
            request: what to continue.
            prompt: the field of the client's request that the tokens came from.
            stops: the answer ends before the first of these strings.
        """
        self._engine = engine
        self._prompt = prompt
        self._decoder = decoder
        self._request = request
        self._stops = StopStrings(stops)
        self._wake = asyncio.Event()
        self._stream: TokenStream | None = None

    async def start(self) -> None:
        """Queue the request.

        Raises:
            ServeError: the engine refuses it.
        """
        loop = asyncio.get_running_loop()

        def notify() -> None:
            # The loop may be gone while the worker still ends its streams.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake.set)

        try:
            self._stream = await asyncio.to_thread(self._engine.submit, self._request, notify=notify)
        except EngineError as error:
            raise from_engine(error, prompt=self._prompt) from error

    @property
    def request_id(self) -> int:
        """The engine's number for it, once started."""
        assert self._stream is not None
        return self._stream.request_id

    def cancel(self) -> None:
        """End the request: its answer is not wanted any more. No effect after its end."""
        if self._stream is not None:
            self._stream.cancel()

    def stop(self) -> None:
        """The answer is complete. The engine's last event still tells what it cost."""
        if self._stream is not None:
            self._stream.stop()

    async def __aiter__(self) -> AsyncIterator[Piece | End]:
        assert self._stream is not None
        while True:
            await self._wake.wait()
            self._wake.clear()
            for event in self._stream.take():
                match event:
                    case Started():
                        pass
                    case NewTokens(ids, logprobs):
                        # What is drawn after a stop string, before the engine hears of it, is not shown.
                        if not self._stops.stopped:
                            yield Piece(self._stops.feed(self._decoder.feed(ids)), ids, logprobs)
                            self._end_if_stopped()
                    case Failed(error):
                        raise from_engine(error, prompt=self._prompt)
                    case Finished(reason, usage):
                        rest = self._stops.feed(self._decoder.finish()) + self._stops.finish()
                        if rest:
                            yield Piece(rest)
                        yield End(self._finish_reason(reason), usage)
                        return

    def _end_if_stopped(self) -> None:
        if self._stops.stopped:
            self.stop()

    def _finish_reason(self, reason: str) -> str:
        if self._stops.stopped:
            return "stop"
        if reason == "cancelled":
            raise Unavailable("the request was cancelled", code="cancelled")
        return reason


def sampling_of(request: SamplingFields) -> SamplingParams:
    """The request's sampling, with OpenAI's defaults for what it leaves out."""

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    return SamplingParams(
        temperature=given(request.temperature, 1.0),
        top_k=given(request.top_k, 0),
        top_p=given(request.top_p, 1.0),
        min_p=given(request.min_p, 0.0),
        seed=request.seed,
    )
