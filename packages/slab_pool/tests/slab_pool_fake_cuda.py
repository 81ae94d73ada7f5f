"""A device that runs only when told to: what `CudaCopyStream` uses of `torch.cuda`, over CPU memory.

Streams are queues; an operation at the front runs when the device is stepped, unless it waits for an event that
has not been recorded yet. So everything that could go wrong with order shows in the bytes.
"""

from __future__ import annotations

import contextlib
from collections import deque

from slab_pool.cpu import copy_now


class DeviceLost(RuntimeError):
    """What every query answers once the device is gone."""


class _Stream:
    world: FakeCuda

    def __init__(self, device=None):
        self.queue = deque()
        self.cuda_stream = 4711 + len(self.world.streams)
        self.world.streams.append(self)

    def wait_event(self, event):
        self.world.calls.append(("wait_event", self))
        if event.recorded_on is not None:
            self.queue.append(("wait", event))

    def wait_stream(self, stream):
        event = self.world.Event()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self):
        self.world.run(lambda: not self.queue)

    def step(self):
        """Run the operation at the front, if it may run. True if it did."""
        if not self.queue:
            return False
        kind, payload = self.queue[0]
        if kind == "wait":
            if not payload.passed:
                return False
        elif kind == "record":
            payload.passed = True
            payload.time = self.world.clock
        else:
            payload()
        self.world.clock += 1
        self.queue.popleft()
        return True


class _Event:
    world: FakeCuda

    def __init__(self, enable_timing=False):
        self.enable_timing = enable_timing
        self.recorded_on = None
        self.passed = False
        self.time = None

    def record(self, stream):
        self.world.check_alive()
        self.recorded_on = stream
        self.passed = False
        stream.queue.append(("record", self))

    def query(self):
        self.world.check_alive()
        return self.recorded_on is None or self.passed

    def synchronize(self):
        self.world.check_alive()
        self.world.run(self.query)

    def elapsed_time(self, end):
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("both events must be created with enable_timing")
        return float(end.time - self.time)


class FakeCuda:
    """Stands for the module `torch.cuda`."""

    def __init__(self):
        self.streams = []
        self.calls = []
        self.clock = 0
        self.lost = False
        self.Stream = type("Stream", (_Stream,), {"world": self})
        self.Event = type("Event", (_Event,), {"world": self})
        self.compute = self.Stream()
        self._current = self.compute

    def check_alive(self):
        if self.lost:
            raise DeviceLost("the device is lost")

    def current_stream(self, device=None):
        return self._current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def device(self, device):
        return contextlib.nullcontext()

    def synchronize(self):
        self.run(lambda: not any(stream.queue for stream in self.streams))

    def _sleep(self, cycles):
        self._current.queue.append(("run", lambda: None))

    def enqueue(self, copy, direction):
        """An `EnqueueCopy`: the bytes move when the current stream gets there."""
        self.check_alive()
        self._current.queue.append(("run", lambda: copy_now((copy,), direction)))

    def compute_soon(self, work):
        """Queue `work` on the compute stream, like a kernel."""
        self.compute.queue.append(("run", work))

    def step(self):
        """One operation of every stream that can go on. True if any did."""
        moved = [stream.step() for stream in self.streams]  # all of them, not up to the first that moves
        return any(moved)

    def run(self, reached):
        while not reached():
            if not self.step():
                raise AssertionError("the fake device is stuck: streams wait for each other")
