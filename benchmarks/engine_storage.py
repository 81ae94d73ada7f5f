"""What moving and finding cached state costs the engine: a restore, and the admission of a very long prompt."""

from __future__ import annotations

import contextlib
import random
import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.timing import Spent, Times, spent, take_turns
from prefix_index import Readiness
from qwen35_engine import Engine, EngineOptions, GenerationRequest, TokenStream
from qwen35_engine.cache import PrefixCache
from qwen35_engine.host import Image
from qwen35_engine.memory import DeviceMemory
from qwen35_engine.metrics import Stopwatch
from qwen35_engine.options import OUTPUT_WINDOW_TOKENS
from qwen35_engine.sequence import Sequence
from qwen35_kernels import BLOCK_TOKENS, KVProfile, PageLayout, StateLayout

__all__ = ["StorageSizes", "admission_times", "restore_times"]

_BUSY_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class StorageSizes:
    """Lengths in tokens, and how often each is measured.

    Attributes:
        restored: of the sequence that comes back from the Host. 65,536 of the bench's model have the bytes of 2,000 to
            4,000 of a served one's; the quarter of it that is measured as well shows what a restore costs as such.
        prompt: of the cached prompt that is admitted, in ``edges`` turns of a conversation.
    """

    restored: int = 65_536
    prompt: int = 240_000
    edges: int = 41
    restores: int
    admissions: int


def restore_times(folder: Path, sizes: StorageSizes, *, threads: int) -> dict[str, Times]:
    """A restore, layer by layer, and one contiguous copy of as many bytes, beside the same forward pass.

    Pages and slabs are those that empty free lists hand out, a quarter of these (``short``), and (``scattered``) half
    of twice as many, shuffled.
    """
    blocks = sizes.restored // BLOCK_TOKENS
    short = blocks // 4
    busy_blocks = _BUSY_TOKENS // BLOCK_TOKENS
    options = EngineOptions(
        device="cpu",
        dtype="float32",
        calibrate=False,
        threads=threads,
        max_context=BLOCK_TOKENS,
        max_concurrency=1,
        kv_capacity=(2 * blocks + busy_blocks) * BLOCK_TOKENS,
        host_cache_mib=64 + blocks // 2,
    )
    shuffled = random.Random(0)
    with Engine.from_folder(folder, options) as engine:
        # The engine has nothing to do; its parts are driven from here, the worker's thread being idle.
        host, memory = engine.parts.host, engine.parts.memory
        assert host is not None
        slabs = host.acquire(2 * blocks)
        image = Image(1, host.acquire(host.image_slabs))
        places = {
            "restore": (range(1, 1 + blocks), slabs[:blocks]),
            "restore short": (range(1, 1 + short), slabs[:short]),
            "restore scattered": (
                shuffled.sample(range(1, 1 + 2 * blocks), blocks),
                shuffled.sample(slabs, blocks),
            ),
        }
        for pages, held in places.values():
            host.write(list(pages), held, [image], [])
            host.drain()
        num_bytes = {
            f"{name} reference": len(places[name][0]) * memory.page_layout.page_bytes + memory.state_layout.image_bytes
            for name in ("restore", "restore short")
        }
        source = torch.ones(num_bytes["restore reference"], dtype=torch.uint8)

        def copy(name: str) -> None:
            if name in places:
                pages, held = places[name]
                host.restore(list(pages), held, image, []).ticket.result()
            else:
                memory.pages.view(-1)[: num_bytes[name]].copy_(source[: num_bytes[name]])

        order = [*places, *num_bytes]
        times = {name: Times() for name in order}
        table = torch.arange(1 + 2 * blocks, 1 + 2 * blocks + busy_blocks)
        with _passes(engine, table):
            for name in order:
                copy(name)  # does not count
            host.poll()
            for name in take_turns(order[::-1], sizes.restores):
                times[name].add(spent(partial(copy, name)))
                host.poll()
    return times


@contextlib.contextmanager
def _passes(engine: Engine, table: torch.Tensor) -> Iterator[None]:
    """Forward passes of one short prompt on the pages of ``table``, one after the other, on a thread of their own."""
    stop = threading.Event()
    tokens = torch.arange(len(table) * BLOCK_TOKENS) % engine.config.vocab_size

    def compute() -> None:
        while not stop.is_set():
            engine.parts.model.prefill(tokens=tokens, base=0, block_table=table, slot=2)

    thread = threading.Thread(target=compute, name="bench-passes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def admission_times(sizes: StorageSizes) -> Times:
    """Quote and start of a prompt whose every token but a block's is cached on the device: match, ranking, arithmetic,
    pins, pages, block table, and the copy of one state."""
    blocks = -(-sizes.prompt // BLOCK_TOKENS)
    total_tokens = sizes.prompt + BLOCK_TOKENS + OUTPUT_WINDOW_TOKENS
    memory = DeviceMemory(
        page_layout=PageLayout(profile=KVProfile.FP32, num_layers=1, num_kv_heads=1, head_dim=16),
        state_layout=StateLayout(
            num_layers=6,
            num_value_heads=4,
            key_dim=64,
            value_dim=64,
            conv_channels=768,
            conv_width=4,
            conv_dtype=torch.float32,
            hidden_size=256,
            hidden_dtype=torch.float32,
        ),
        layers=[True] * 6 + [False],
        num_pages=blocks + sizes.edges + 2 * (OUTPUT_WINDOW_TOKENS // BLOCK_TOKENS),
        num_slots=4 + sizes.edges,
        device=torch.device("cpu"),
    )
    context_blocks = -(-total_tokens // BLOCK_TOKENS)
    cache = PrefixCache(
        memory, max_concurrency=1, context_blocks=context_blocks, snapshot_slots=2 + sizes.edges, host=None
    )
    numbers = random.Random(0)
    tokens = array("i", [numbers.randrange(248_320) for _ in range(sizes.prompt + BLOCK_TOKENS)])
    for turn in range(1, 1 + sizes.edges):
        end = sizes.prompt * turn // sizes.edges
        sequence = _waiting(cache, tokens[:end])
        cache.lanes.start(sequence, cache.quote(sequence.prompt, total_tokens=end))
        sequence.computed = end
        cache.finish(sequence)

    def admit(sequence: Sequence) -> None:
        quote = cache.quote(sequence.prompt, total_tokens=total_tokens)
        if quote.readiness is not Readiness.READY or quote.source is None or quote.source.frontier != sizes.prompt:
            raise RuntimeError(f"the bench's prompt must resume at {sizes.prompt}, got {quote!r}")
        cache.lanes.start(sequence, quote)

    times = Times()
    for turn in range(1 + sizes.admissions):
        sequence = _waiting(cache, tokens[:])  # compared byte by byte, as those of a new request are
        begin = Spent.now()
        admit(sequence)
        took = Spent.now() - begin
        cache.abandon(sequence)
        if turn:
            times.add(took)
    return times


def _waiting(cache: PrefixCache, tokens: array[int]) -> Sequence:
    return Sequence(
        stream=TokenStream(0, lambda *_: None, None),
        request=GenerationRequest(tokens=tokens),
        prompt=cache.index.prepare(tokens),
        tokens=tokens,
        max_tokens=1,
        seed=0,
        times=Stopwatch(0.0),
    )
