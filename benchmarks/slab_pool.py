"""`python -m benchmarks.slab_pool`: what pool, planner, copies and image files cost here, as one JSON object.

Where two ways are compared they are timed in turn, and a ratio is that of the medians; 1.0 is as fast as the plain way.
`"contended": true` says that the middle four fifths of some measurement differ by more than 30 % of its median, so that
its number says more about the machine's other work than about this package. For that case the details hold the best
times, and for copies by a CPU the ratio of processor times, which other processes disturb less.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import command_line, load, write_result
from benchmarks.timing import Times, frozen_heap, spent, take_turns
from slab_pool import (
    CopyBatch,
    CopyStream,
    Direction,
    ImageFile,
    SlabPool,
    open_copy_stream,
    plan_runs,
    record_copies,
    save_image,
)

SEED = 20261129
MIB = 1 << 20
RECORD_BYTES = 2 * MIB
LAYERS = 32  # slices of 64 KiB


def cpu_clock_without(thread: threading.Thread) -> Callable[[], float]:
    """The processor time of this process, less that of one of its threads."""
    if not hasattr(time, "pthread_getcpuclockid") or thread.ident is None:
        return time.process_time
    clock = time.pthread_getcpuclockid(thread.ident)
    return lambda: time.process_time() - time.clock_gettime(clock)


class Bench:
    """Runs the measurements and collects what they say."""

    def __init__(self, *, device: torch.device, folder: Path, quick: bool) -> None:
        self.device = device
        self.folder = folder
        self.quick = quick
        self.contended = False
        self.random = random.Random(SEED)
        self.best: dict[str, float] = {}

    def median(self, times: Times) -> float:
        self.contended = self.contended or times.contended
        return times.median

    # -- pool and planner ------------------------------------------------------------------------------------

    def acquire_release_us(self) -> float:
        """One slab taken and given back, half of 100,000 being out in random places."""
        # Short rounds: on a busy machine a long one always holds a time slice of another process.
        rounds, repeats = (10, 500) if self.quick else (200, 500)
        with SlabPool(budget_bytes=100_000 * 4096, slab_bytes=4096, pinned=False) as pool:
            pool.wait_until_ready()
            handles = list(pool.acquire(100_000))
            self.random.shuffle(handles)
            pool.release(handles[:50_000])
            times = Times()
            for _ in range(rounds):
                begin = time.perf_counter()
                for _ in range(repeats):
                    pool.release(pool.acquire())
                times.since(begin)
        self.best["acquire_release_us"] = times.best / repeats * 1e6
        return self.median(times) / repeats * 1e6

    def plan_runs_us(self) -> dict[str, float]:
        """4,096 pairs: in order, in stretches of 1 to 64, and at random (as many runs as pairs)."""
        stretches: list[int] = []
        while len(stretches) < 4096:
            first = self.random.randrange(100_000)
            stretches += range(first, first + self.random.randrange(1, 65))
        cases = {
            "in_order": (range(4096), range(4096)),
            "stretches": (range(4096), stretches[:4096]),
            "random": (self.random.sample(range(50_000), 4096), self.random.sample(range(100_000), 4096)),
        }
        results = {}
        for name, (records, slabs) in cases.items():
            pairs = list(records), list(slabs)
            times = Times()
            for _ in range(5 if self.quick else 200):
                begin = time.perf_counter()
                plan_runs(*pairs, slabs_per_chunk=2048, record_bytes=2 * MIB, slab_bytes=2 * MIB)
                times.since(begin)
            results[name] = self.median(times) * 1e6
            self.best[f"plan_runs_4096_us/{name}"] = times.best * 1e6
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
                        ratios[name] = self.median(plain) / self.median(ours)
                        bandwidths[direction.value] = arena.numel() / plain.median / 2**30
                        if self.device.type == "cpu":
                            cpu_ratios[name] = max(plain.cpu_median, 1e-9) / max(ours.cpu_median, 1e-9)
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
    ) -> tuple[Times, Times]:
        destination, source = (device, host) if batch.direction is Direction.HOST_TO_DEVICE else (host, device)
        ours, plain, cpu_clock = Times(), Times(), cpu_clock_without(busy)

        def through_the_stream() -> None:
            stream.submit(batch, after=stream.compute_stream()).result()

        def contiguous() -> None:
            destination.copy_(source, non_blocking=True)
            self._synchronize()

        ways = [(plain, contiguous), (ours, through_the_stream)]
        for times, copy in take_turns(ways, 4 if self.quick else 16):
            self._synchronize()
            times.add(spent(copy, cpu_clock))
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
        times = {name: Times() for name in names}
        image, plain = self.folder / "bench.image", self.folder / "bench.plain"
        with SlabPool(budget_bytes=num_slabs * RECORD_BYTES, slab_bytes=RECORD_BYTES, pinned=False) as pool:
            handles = pool.acquire(num_slabs)
            for handle in handles:
                pool.tensor(handle).random_(0, 256)
            rounds = 2 if self.quick else 6
            savers: list[tuple[str, Callable[[], object]]] = [
                ("plain_save", lambda: _plain_save(plain, [pool.memory(handle) for handle in handles])),
                ("save", lambda: save_image(image, pool, handles)),
            ]
            for name, save in take_turns(savers, rounds):
                times[name].add(spent(save))
            plain.unlink()
            # Both ways read one file. They take turns in being first, as above: what lies under a virtual disk may
            # remember a file that was read or written lately, and no call here makes it forget.
            ways = [("plain_load", _plain_load), ("load", self._load)]
            for suffix in ("", "_cached"):
                for name, read in take_turns(ways, rounds):
                    _touch_or_forget(image, keep=bool(suffix))
                    begin = time.perf_counter()
                    handles = read(image, pool, handles)
                    times[name + suffix].since(begin)
        image.unlink()
        medians = {name: self.median(each) for name, each in times.items()}
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
    load_before = load()
    with frozen_heap():
        acquire_release_us = bench.acquire_release_us()
        plan_us = bench.plan_runs_us()
        copies = bench.copy_ratios()
        images = bench.image_ratios()
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
    parser = command_line("slab_pool", __doc__)
    parser.add_argument("--device", default=None, help="default: cuda where there is one, else cpu")
    parser.add_argument("--folder", type=Path, default=None, help="where image files go (default: a temporary folder)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_result(measure(device=device, folder=Path(folder), quick=options.quick), write)


if __name__ == "__main__":
    main()
