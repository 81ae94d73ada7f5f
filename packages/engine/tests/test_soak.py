"""Ten thousand short requests, a third of them cancelled, leave no object, no memory and no place behind."""

from __future__ import annotations

import gc
import os
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_model import VOCAB, FakeModel
from loop_rig import Rig, tokens_of
from qwen35_engine import Finished

WARM_UP = 400
REQUESTS = 10_000
TRACED = 500
WINDOWS = 3
BYTES_A_REQUEST = 64
RSS_BYTES = 16 << 20

OURS = ("prefix_index.", "slab_pool.", "qwen35_kernels.", "qwen35_engine.")
TRUNK = tokens_of(0, 200)


def living() -> Counter[str]:
    """Objects of our types, by type."""
    gc.collect()
    names = (f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects())
    return Counter(name for name in names if name.startswith(OURS))


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM, where the system says so."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else None


class BlindModel(FakeModel):
    """Waits for what it should read and looks at none of it: this test is about what is left, not about bytes."""

    def prefill(self, *, before_layer: Callable[[int], None] | None = None, **_: Any) -> Tensor:
        for layer in range(2 if before_layer is not None else 0):
            before_layer(layer)
        return torch.zeros(2)

    def decode(self, *, tokens: Tensor, **_: Any) -> Tensor:
        return torch.zeros(len(tokens), 2)


class SoakRig(Rig):
    """Keeps nothing of a request that has ended but two sums."""

    def __init__(self) -> None:
        super().__init__(pages=24, lanes=6, snapshots=6, slabs=40, prefill_chunk=256)
        self.model = self.loop.runner.model = BlindModel(self.bench.memory)
        self.cancelled = 0
        self.skipped_tokens = 0

    def read(self) -> None:
        for request_id, (stream, _, _) in list(self.open.items()):
            events = stream.take()
            if events and isinstance(events[-1], Finished):
                del self.open[request_id], self.answers[request_id]
                self.cancelled += events[-1].reason == "cancelled"
                self.skipped_tokens += events[-1].usage.cached_tokens
        self.reports.clear()


class Soak:
    """Submits, steps, lands and cancels at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rig = SoakRig()

    def run(self, requests: int) -> None:
        """So many requests, until the last one is answered and everything cached has been taken back."""
        rig, draw = self.rig, self.random
        for number in range(requests):
            shared, own = draw.randrange(0, 200), [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 12))]
            namespace = b"tenant %d" % draw.randrange(2**32) if draw.random() < 0.1 else b""
            rig.submit([*TRUNK[:shared], *own], draw.choice((1, 1, 1, 3)), namespace=namespace, reuse=number % 10 > 0)
            while len(rig.open) > 8:
                rig.turn()
            if draw.random() < 0.35:
                rig.loop.end({draw.choice(sorted(rig.open)): "cancelled"})
                rig.read()
            if number % 3 == 0:
                rig.bench.reads.land(draw.randrange(4))
                rig.bench.writes.land(draw.randrange(3))
        rig.run_dry()
        rig.check_nothing_is_lost()


@pytest.mark.soak
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    """Objects and resident memory over all of them; traced memory, for tracing is slow, over the last few."""
    seed = 20261130
    print("seed", seed)
    soak = Soak(seed)
    soak.run(WARM_UP)
    objects, resident = living(), resident_bytes()
    soak.run(REQUESTS - (WINDOWS + 1) * TRACED)
    tracemalloc.start()
    try:
        traced = []
        for _ in range(WINDOWS + 1):
            soak.run(TRACED)
            traced.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # What leaks does so in every window. In the first ones more is kept: what is replaced again and again was made
    # before the tracing began, and a tensor's 64 bytes stay on the tracer's books until another one takes their place.
    grown = min(later - earlier for earlier, later in pairwise(traced))
    after = living()
    assert soak.rig.loop.accounts.totals.requests == WARM_UP + REQUESTS
    assert soak.rig.cancelled > REQUESTS / 5
    assert soak.rig.skipped_tokens > REQUESTS * 20
    assert after - objects == Counter()
    assert objects - after == Counter()
    assert grown < BYTES_A_REQUEST * TRACED, f"{grown / TRACED:.0f} bytes a request"
    if resident is not None:
        assert (resident_bytes() or 0) - resident < RSS_BYTES
