"""A loop over the fake model, with small memory and copies that land when told to: any schedule, step by step."""

from __future__ import annotations

from array import array
from typing import Any

import torch

from cache_bench import Bench
from fake_model import VOCAB, FakeModel, continuation
from qwen35_engine import (
    Failed,
    Finished,
    GenerationRequest,
    NewTokens,
    RequestListener,
    RequestReport,
    SamplingParams,
    Started,
    TokenStream,
    Usage,
)
from qwen35_engine.calibration import Calibration
from qwen35_engine.loop import Loop
from qwen35_engine.metrics import Stopwatch
from qwen35_engine.options import EffectiveOptions
from qwen35_engine.sampling import KernelSampler
from qwen35_engine.sequence import Sequence
from slab_pool import CopyFailed

GREEDY = SamplingParams(temperature=0)


class Rig:
    """A loop over the fake model, small memory and copies that land when told to."""

    def __init__(
        self,
        *,
        pages: int = 20,
        lanes: int = 3,
        snapshots: int = 4,
        slabs: int = 60,
        prefill_chunk: int = 96,
        max_taps: int = 2,
        ladder_tokens: int = 128,
        pending_timeout_seconds: float = 1000.0,
        landing: bool = False,
        calibration: Calibration | None = None,
    ) -> None:
        """With ``landing`` every copy lands before the next turn."""
        self._landing = landing
        self.bench = Bench(pages=pages, lanes=lanes, snapshots=snapshots, slabs=slabs, calibration=calibration)
        self.model = FakeModel(self.bench.memory)
        self.max_context = pages * 64
        self.options = EffectiveOptions(
            device="cpu",
            dtype="float32",
            kv_dtype="float32",
            threads=1,
            max_context=self.max_context,
            max_concurrency=lanes,
            max_pending=100,
            prefill_chunk=prefill_chunk,
            kv_capacity=pages * 64,
            device_snapshot_slots=snapshots,
            host_cache_mib=0,
            max_new_taps=max_taps,
            tap_ladder_tokens=ladder_tokens,
            tap_min_gap_tokens=64,
            pending_timeout_seconds=pending_timeout_seconds,
            calibrate=False,
        )
        self.loop = Loop(
            model=self.model,
            cache=self.bench.cache,
            sampler=KernelSampler(),
            options=self.options,
            device=torch.device("cpu"),
            on_request=self._hear,
            clock=lambda: self.now,
        )
        self.now = 0.0
        self.reports: list[RequestReport] = []
        self.listener: RequestListener | None = None
        self.started: dict[int, int] = {}
        self._next = 0
        self.open: dict[int, tuple[TokenStream, list[int], int]] = {}
        self.ended: list[tuple[Finished | Failed, list[int]]] = []
        self.spoiled: set[int] = set()
        self.recoveries = 0
        self.answers: dict[int, list[int]] = {}

    def _hear(self, report: RequestReport) -> None:
        self.reports.append(report)
        if self.listener is not None:
            self.listener(report)

    def submit(self, prompt: list[int], max_tokens: int, **changes: Any) -> int:
        self._next += 1
        stream = TokenStream(self._next, lambda *_: None, None)
        request = GenerationRequest(tokens=prompt, sampling=GREEDY, max_tokens=max_tokens, **changes)
        tokens = array("i", prompt)
        index = self.bench.cache.index
        self.loop.add(
            [
                Sequence(
                    stream=stream,
                    request=request,
                    tokens=tokens,
                    prompt=index.prepare(tokens, namespace=request.namespace) if request.reuse else None,
                    max_tokens=min(max_tokens, self.max_context - len(prompt)),
                    seed=0,
                    times=Stopwatch(self.now),
                )
            ]
        )
        self.open[self._next] = (stream, prompt, max_tokens)
        self.answers[self._next] = []
        return self._next

    def spoil(self, slots: set[int], lane: Any) -> None:
        """Make the lane's next pass fail, by adding its slot to one of the model's sets."""
        slots.add(lane.slot)
        self.spoiled.add(lane.request_id)

    def turn(self) -> None:
        """What the worker does between two looks into its inbox."""
        # A spoiled lane may have ended meanwhile, and its slot may be another's in a moment.
        slots = {lane.slot for lane in self.loop.running}
        self.model.nan_slots &= slots
        self.model.broken_slots &= slots
        if self.model.next_error is not None:
            self.spoiled.update(self.open)
        if self._landing:
            self.bench.land_all()
        try:
            self.loop.turn()
        except CopyFailed:
            raise
        except Exception as error:  # as the worker does
            self.spoiled.update(self.open)
            self.loop.recover(error)
            self.recoveries += 1
        self.read()

    def read(self) -> None:
        """Take every stream's events; each answer must be what the tokens alone say, however far it got."""
        for request_id, (stream, prompt, max_tokens) in list(self.open.items()):
            got = self.answers[request_id]
            for event in stream.take():
                match event:
                    case Started(cached):
                        assert not got
                        assert cached < len(prompt)
                        self.started[request_id] = cached
                    case NewTokens(ids):
                        got += ids
                    case Finished() | Failed():
                        del self.open[request_id]
                        self.ended.append((event, got))
                        assert got == continuation(prompt, len(got)), f"request {request_id}: wrong tokens"
                        if isinstance(event, Finished):
                            assert event.usage.completion_tokens == len(got)
                            assert event.usage.prompt_tokens == len(prompt)
                            if event.reason == "length":
                                assert len(got) <= max_tokens
                        else:
                            assert request_id in self.spoiled

    def run_dry(self) -> None:
        """Turns until nothing is left to do."""
        for _ in range(10_000):
            if not self.loop.has_work:
                break
            self.turn()
        self.read()
        assert not self.open, "requests were never answered"

    def ask(self, prompt: list[int], max_tokens: int = 1, **changes: Any) -> Usage:
        """Submit, wait for the end, and tell what it cost; for when nothing else runs."""
        self.submit(prompt, max_tokens, **changes)
        self.run_dry()
        event, _ = self.ended[-1]
        assert isinstance(event, Finished)
        return event.usage

    def check(self) -> None:
        self.bench.lanes = list(self.loop.running)
        self.bench.check()

    def check_nothing_is_lost(self) -> None:
        """With nothing left to do, everything can be taken back."""
        self.check()
        self.bench.check_nothing_is_lost()


def tokens_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()
