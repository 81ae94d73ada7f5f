"""`python -m slab_pool.bench`: what pool, planner, copies and image files cost here, as one JSON object.

Where two ways are compared they are timed in turn, and a ratio is that of the medians; 1.0 is as fast as the plain way.
`"contended": true` says that some measurement varied by more than 30 % around its median, so that its number says more
about the neighbours than about this package. For that case the details hold the best times, and for copies by a CPU the
ratio of processor times, which neighbours disturb less.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slab_pool.batches import CopyBatch, Direction, record_copies
from slab_pool.image_file import ImageFile, save_image
from slab_pool.memory import MIB
from slab_pool.opening import open_copy_stream
from slab_pool.pool import SlabPool
from slab_pool.runs import plan_runs
from slab_pool.streams import CopyStream

SEED = 20261129
RECORD_BYTES = 2 * MIB
LAYERS = 32  # slices of 64 KiB


class Timings:
    """Times of one thing, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextlib.contextmanager
    def time(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - begin)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def contended(self) -> bool:
        ordered = sorted(self.seconds)
        tenth = len(ordered) // 10
        return ordered[-1 - tenth] - ordered[tenth] > 0.3 * self.median


class WallAndCpu:
    """Wall-clock times of one thing, and the processor times this process spent on it, less those of thread `but`."""

    def __init__(self, but: threading.Thread) -> None:
        self.wall = Timings()
        self.cpu = Timings()
        self._but = but

    def _cpu_seconds(self) -> float:
        spent = time.process_time()
        if hasattr(time, "pthread_getcpuclockid") and self._but.ident is not None:
            spent -= time.clock_gettime(time.pthread_getcpuclockid(self._but.ident))
        return spent

    @contextlib.contextmanager
    def time(self) -> Iterator[None]:
        before = self._cpu_seconds()
        with self.wall.time():
            yield
        self.cpu.seconds.append(max(self._cpu_seconds() - before, 1e-9))


class Bench:
    """Runs the measurements and collects what they say."""

    def __init__(self, *, device: torch.device, folder: Path, quick: bool) -> None:
        self.device = device
        self.folder = folder
        self.quick = quick
        self.contended = False
        self.random = random.Random(SEED)
        self.best: dict[str, float] = {}

    def median(self, timings: Timings) -> float:
        self.contended = self.contended or timings.contended
        return timings.median

    # -- pool and planner ------------------------------------------------------------------------------------

    def acquire_release_us(self) -> float:
        """One slab taken and given back, half of 100,000 being out in random places."""
        # Short rounds: on a busy machine a long one always has somebody else's time slice in it.
        rounds, repeats = (10, 500) if self.quick else (200, 500)
        with SlabPool(budget_bytes=100_000 * 4096, slab_bytes=4096, pinned=False) as pool:
            pool.wait_until_ready()
            handles = list(pool.acquire(100_000))
            self.random.shuffle(handles)
            pool.release(handles[:50_000])
            timings = Timings()
            for _ in range(rounds):
                with timings.time():
                    for _ in range(repeats):
                        pool.release(pool.acquire())
        self.best["acquire_release_us"] = timings.best / repeats * 1e6
        return self.median(timings) / repeats * 1e6

    def plan_runs_us(self) -> dict[str, float]:
        """4,096 pairs: in order, in stretches of 1 to 64, and at random (as many runs as pairs)."""
        stretches: list[int] = []
        while len(stretches) < 4096:
            begin = self.random.randrange(100_000)
            stretches += range(begin, begin + self.random.randrange(1, 65))
        cases = {
            "in_order": (range(4096), range(4096)),
            "stretches": (range(4096), stretches[:4096]),
            "random": (self.random.sample(range(50_000), 4096), self.random.sample(range(100_000), 4096)),
        }
        results = {}
        for name, (records, slabs) in cases.items():
            pairs = list(records), list(slabs)
            timings = Timings()
            for _ in range(5 if self.quick else 200):
                with timings.time():
                    plan_runs(*pairs, slabs_per_chunk=2048, record_bytes=2 * MIB, slab_bytes=2 * MIB)
            results[name] = self.median(timings) * 1e6
            self.best[f"plan_runs_4096_us/{name}"] = timings.best * 1e6
        return results

    # -- copies ----------------------------------------------------------------------------------------------

    def copy_ratios(self) -> dict[str, Any]:
        """Bandwidth through the copy stream over that of one contiguous copy, beside a busy compute thread.

        Whole 2 MiB records and 64 KiB layer slices; in slabs that follow each other, in every second slab, and at
        random; both directions. Also GiB/s of the contiguous copies, and on a CPU the ratio of processor times.
        """
        num_records = 16 if self.quick else 64
        ratios: dict[str, float] = {}
        cpu_ratios: dict[str, float] = {}
        bandwidths: dict[str, float] = {}
        pool = SlabPool(
            budget_bytes=2 * num_records * RECORD_BYTES,
            slab_bytes=RECORD_BYTES,
            pinned=self.device.type == "cuda",
        )
        with pool, open_copy_stream(self.device) as stream, self._busy_compute() as busy:
            pool.wait_until_ready()
            handles = pool.acquire(2 * num_records)
            arena = torch.ones(num_records, RECORD_BYTES, dtype=torch.uint8, device=self.device)
            places = {
                "adjacent": handles[:num_records],
                "every_second": handles[::2],
                "random": self.random.sample(handles, num_records),
            }
            host = pool.chunk_tensor(0)[: arena.numel()]
            for direction in Direction:
                for place, chosen in places.items():
                    for shape, layers in (("records", 1), ("layers", LAYERS)):
                        batch = self._batch(pool, arena, chosen, direction, layers)
                        name = f"{direction.value}/{shape}/{place}"
                        ours, plain = self._time_batch(stream, batch, arena.view(-1), host, busy)
                        ratios[name] = self.median(plain.wall) / self.median(ours.wall)
                        bandwidths[direction.value] = arena.numel() / plain.wall.median / 2**30
                        if self.device.type == "cpu":
                            cpu_ratios[name] = plain.cpu.median / ours.cpu.median
            transport = getattr(stream, "transport", None)
        return {
            "ratio": ratios,
            "cpu_time_ratio": cpu_ratios,
            "contiguous_gib_per_second": bandwidths,
            "copies_by": "thread" if transport is None else transport.name,
        }

    def _batch(
        self, pool: SlabPool, arena: Tensor, handles: Sequence[int], direction: Direction, layers: int
    ) -> CopyBatch:
        runs = pool.plan_runs(range(len(handles)), handles, record_bytes=RECORD_BYTES)
        width = RECORD_BYTES // layers
        return CopyBatch.of(
            direction,
            [
                (f"layer {layer}", record_copies(pool, arena, runs, layer * width, (layer + 1) * width))
                for layer in range(layers)
            ],
        )

    def _time_batch(
        self, stream: CopyStream, batch: CopyBatch, device: Tensor, host: Tensor, busy: threading.Thread
    ) -> tuple[WallAndCpu, WallAndCpu]:
        destination, source = (device, host) if batch.direction is Direction.HOST_TO_DEVICE else (host, device)
        ours, plain = WallAndCpu(busy), WallAndCpu(busy)

        def through_the_stream() -> None:
            stream.submit(batch, after=stream.compute_stream()).result()

        def contiguous() -> None:
            destination.copy_(source, non_blocking=True)
            self._synchronize()

        ways = [(ours, through_the_stream), (plain, contiguous)]
        for _ in range(4 if self.quick else 16):
            ways.reverse()
            for timings, copy in ways:
                self._synchronize()
                with timings.time():
                    copy()
        return ours, plain

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @contextlib.contextmanager
    def _busy_compute(self) -> Iterator[threading.Thread]:
        """A thread that multiplies matrices on the device for as long as the block runs."""
        stop = threading.Event()
        matrix = torch.rand(256, 256, device=self.device)

        def compute() -> None:
            if self.device.type == "cpu":
                while not stop.is_set():
                    torch.mm(matrix, matrix)
                return
            with torch.cuda.stream(torch.cuda.Stream(self.device)):  # type: ignore[no-untyped-call]
                while not stop.is_set():
                    for _ in range(16):
                        torch.mm(matrix, matrix)
                    torch.cuda.current_stream(self.device).synchronize()

        thread = threading.Thread(target=compute, daemon=True)
        thread.start()
        try:
            yield thread
        finally:
            stop.set()
            thread.join()

    # -- image files -----------------------------------------------------------------------------------------

    def image_ratios(self) -> dict[str, float]:
        """Saving and loading over plain sequential writes (with fsync) and reads of the same bytes.

        `load_ratio` reads from the disk, the page cache having been told to forget the file; `load_cached_ratio` reads
        what the system still holds in memory.
        """
        num_slabs = (32 if self.quick else 512) * MIB // RECORD_BYTES
        names = ("save", "plain_save", "load", "plain_load", "load_cached", "plain_load_cached")
        timings = {name: Timings() for name in names}
        image, plain = self.folder / "bench.image", self.folder / "bench.plain"
        with SlabPool(budget_bytes=num_slabs * RECORD_BYTES, slab_bytes=RECORD_BYTES, pinned=False) as pool:
            handles = pool.acquire(num_slabs)
            for handle in handles:
                pool.tensor(handle).random_(0, 256)
            rounds = 2 if self.quick else 6
            savers: list[tuple[str, Callable[[], object]]] = [
                ("save", lambda: save_image(image, pool, handles)),
                ("plain_save", lambda: _plain_save(plain, [pool.memory(handle) for handle in handles])),
            ]
            for _ in range(rounds):
                savers.reverse()
                for name, save in savers:
                    with timings[name].time():
                        save()
            plain.unlink()
            # Both ways read one file. They take turns in being first, as above: what lies under a virtual disk may
            # remember a file that was read or written lately, and no call here makes it forget.
            ways = [("load", self._load), ("plain_load", _plain_load)]
            for suffix in ("", "_cached"):
                for _ in range(rounds):
                    ways.reverse()
                    for name, load in ways:
                        _touch_or_forget(image, keep=bool(suffix))
                        with timings[name + suffix].time():
                            handles = load(image, pool, handles)
        image.unlink()
        medians = {name: self.median(timing) for name, timing in timings.items()}
        total = num_slabs * RECORD_BYTES / MIB
        return {
            "save_ratio": medians["plain_save"] / medians["save"],
            "load_ratio": medians["plain_load"] / medians["load"],
            "load_cached_ratio": medians["plain_load_cached"] / medians["load_cached"],
            "save_mib_per_second": total / medians["save"],
            "load_mib_per_second": total / medians["load"],
        }

    @staticmethod
    def _load(path: Path, pool: SlabPool, handles: tuple[int, ...]) -> tuple[int, ...]:
        pool.release(handles)
        with ImageFile(path) as file:
            return file.load(pool)


def _plain_save(path: Path, memories: Sequence[memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for memory in memories:
            while memory:
                memory = memory[os.write(descriptor, memory) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _plain_load(path: Path, pool: SlabPool, handles: tuple[int, ...]) -> tuple[int, ...]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for handle in handles:
            memory = pool.memory(handle)
            while memory:
                memory = memory[os.readv(descriptor, [memory]) :]
    finally:
        os.close(descriptor)
    return handles


def _touch_or_forget(path: Path, *, keep: bool) -> None:
    """Bring the file into the page cache, or drop it from there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if keep:
            while os.read(descriptor, 4 * MIB):
                pass
        elif hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def measure(*, device: torch.device, folder: Path, quick: bool) -> dict[str, Any]:
    """Everything, as the object that is printed."""
    bench = Bench(device=device, folder=folder, quick=quick)
    load_before = os.getloadavg()[0]
    gc.collect()
    gc.disable()  # as `timeit` does: a collection walks everything torch has imported
    try:
        acquire_release_us = bench.acquire_release_us()
        plan_us = bench.plan_runs_us()
        copies = bench.copy_ratios()
        images = bench.image_ratios()
    finally:
        gc.enable()
    return {
        "acquire_release_us": acquire_release_us,
        "plan_runs_4096_us": max(plan_us.values()),
        "copy_bandwidth_ratio": min(copies["ratio"].values()),
        "save_ratio": images.pop("save_ratio"),
        "load_ratio": images.pop("load_ratio"),
        "contended": bench.contended,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "load_average": load_before,
        "quick": quick,
        "details": {
            "plan_runs_4096_us": plan_us,
            "best": bench.best,
            "copies": copies,
            "image_files": images,
        },
    }


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser(prog="python -m slab_pool.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats: does it run at all?")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default 1)")
    parser.add_argument("--device", default=None, help="default: cuda where there is one, else cpu")
    parser.add_argument("--folder", type=Path, default=None, help="where image files go (default: a temporary folder)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write(json.dumps(measure(device=device, folder=Path(folder), quick=options.quick), indent=2))


if __name__ == "__main__":
    main()
