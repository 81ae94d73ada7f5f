"""`python -m benchmarks.prefix_index`: the speed of the index on this machine, as one JSON object.

Driven through public calls only. Every match gets a fresh equal copy of its prompt, since comparing a bytes object with
itself would cost nothing. A path is written in so many turns, each of which ends in a snapshot, half with a tail;
`edges` in a name counts the turns, for a tree with a node a turn has as many. Here a path without a branch is one edge,
so `branches` is the same path with another path leaving it after every turn. Medians; times in microseconds.
`floor_startswith_240k_us` is what one compare of such a prompt costs here, the least any exact look-up can take.
`hash_8k_us` is what preparing the tokens of `insert_8k_us` as a prompt costs, nearly all of it the hashes of blocks:
an insert derives only the one it needs.
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from benchmarks.command import command_line, load, write_result
from benchmarks.timing import Times, percentile
from prefix_index import Freed, Lease, PrefixIndex, Prompt, SnapshotKind

Given = TypeVar("Given")

BLOCK = 64
TOKEN = 4
VOCABULARY = 248_320
PROMPT = 240_000


class Numbers:
    """Page and slot ids, and random tokens."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.page = 0
        self.slot = 0

    def tokens(self, count: int) -> bytes:
        draw = self.random.randrange
        return array("i", [draw(VOCABULARY) for _ in range(count)]).tobytes()

    def pages(self, count: int) -> range:
        self.page += count
        return range(self.page - count, self.page)

    def next_slot(self) -> int:
        self.slot += 1
        return self.slot


def fresh(data: bytes) -> bytes:
    """An equal copy at another address."""
    return bytes(bytearray(data))


def timed(runs: int, prepare: Callable[[], Given], work: Callable[[Given], object]) -> Times:
    """Times of `work` on something newly made by `prepare` each time."""
    times = Times()
    for _ in range(runs):
        given = prepare()
        begin = time.perf_counter()
        work(given)
        times.since(begin)
    return times


def a_path(numbers: Numbers, tokens: bytes, first: int, turn: int) -> PrefixIndex:
    """An index that holds `tokens`: a shared prefix of `first` tokens, then turns of `turn`, with a snapshot at the end
    of each; every other one has a tail."""
    index = PrefixIndex(block_tokens=BLOCK)
    prompt = index.prepare(tokens)
    lease = index.acquire(index.match(prompt))
    end = first
    tailed = False
    while end <= prompt.num_tokens:
        depth = end // BLOCK
        run = tokens[lease.depth * BLOCK * TOKEN : depth * BLOCK * TOKEN]
        index.extend(lease, fresh(run), numbers.pages(depth - lease.depth))
        frontier = end if tailed else depth * BLOCK
        tail = tokens[depth * BLOCK * TOKEN : frontier * TOKEN]
        pages = numbers.pages(1) if tail else ()
        kind = SnapshotKind.BOUNDARY
        index.publish(lease, frontier, slot=numbers.next_slot(), tail=tail, tail_pages=pages, kind=kind)
        tailed = not tailed
        end += turn
    index.release(lease)
    return index


def leave(index: PrefixIndex, numbers: Numbers, tokens: bytes, first: int, turn: int) -> None:
    """Insert another path that leaves that of `a_path` after every turn."""
    width = BLOCK * TOKEN
    for end in range(first, len(tokens) // TOKEN, turn):
        depth = end // BLOCK
        other = tokens[: depth * width] + numbers.tokens(BLOCK)
        match = index.match(index.prepare(other + bytes(TOKEN)))
        lease = index.acquire(match, match.best)
        index.extend(lease, other[lease.depth * width :], numbers.pages(depth + 1 - lease.depth))
        index.release(lease)


def bench_match(runs: int, report: dict[str, object]) -> bool:
    """The 240,000-token look-ups, written in 41 and in 400 turns, and pin + unpin of the first.

    Returns:
        Whether either look-up was contended.
    """
    contended = False
    numbers = Numbers(1)
    tokens = numbers.tokens(PROMPT)
    copy = fresh(tokens)
    bare = PrefixIndex(block_tokens=BLOCK)
    floor = Times()
    for _ in range(runs):
        prompt = bare.prepare(fresh(tokens))  # as before every match, so that the caches are in the same state
        begin = time.perf_counter()
        prompt.tokens.startswith(copy)
        floor.since(begin)
    report["floor_startswith_240k_us"] = floor.median_us
    for edges, first, turn in ((41, 20_000, 5_500), (400, 20_000, 551)):
        index = a_path(numbers, tokens, first, turn)

        def prepare(index: PrefixIndex = index) -> Prompt:
            return index.prepare(fresh(tokens))

        match = index.match(prepare())
        times = timed(runs, prepare, index.match)
        report[f"match_240k_{edges}_edges_us"] = times.median_us
        contended = contended or times.contended
        report[f"edges_{edges}"] = index.stats().edges
        report[f"matched_blocks_{edges}"] = match.matched_blocks
        report[f"candidates_{edges}"] = len(match.candidates)
        times = timed(runs, prepare, partial(match_and_read, index))
        report[f"match_and_read_all_240k_{edges}_edges_us"] = times.median_us
        if edges == 41:
            report["matched_blocks"] = match.matched_blocks
            report["candidates"] = len(match.candidates)
            report["pin_unpin_41_edges_us"] = pin_unpin(index, prepare(), runs).median_us
        leave(index, numbers, tokens, first, turn)
        report[f"match_240k_{edges}_branches_us"] = timed(runs, prepare, index.match).median_us
        report[f"edges_with_{edges}_branches"] = index.stats().edges
        if edges == 41:
            report["pin_unpin_41_branches_us"] = pin_unpin(index, prepare(), runs).median_us
    preparing = timed(runs, lambda: fresh(tokens), PrefixIndex(block_tokens=BLOCK).prepare)
    report["prepare_240k_us"] = preparing.median_us
    return contended


def match_and_read(index: PrefixIndex, prompt: Prompt) -> object:
    return list(index.match(prompt).candidates)


def pin_unpin(index: PrefixIndex, prompt: Prompt, runs: int) -> Times:
    """Acquire and release of the deepest candidate; the match before it is not timed."""

    times = Times()
    for _ in range(max(runs, 200)):
        match = index.match(prompt)
        candidate = match.best
        begin = time.perf_counter()
        index.release(index.acquire(match, candidate))
        times.since(begin)
    return times


def bench_insert(runs: int, report: dict[str, object]) -> None:
    """8,192 new tokens below 232,000 cached ones."""
    numbers = Numbers(2)
    tokens = numbers.tokens(232_000)
    index = a_path(numbers, tokens, 20_000, 5_300)

    def prepare() -> tuple[Lease, bytes, list[int]]:
        match = index.match(index.prepare(tokens + b"\0\0\0\0"))
        lease = index.acquire(match, match.best)
        return lease, numbers.tokens(8_192), list(numbers.pages(128))

    times = Times()
    for _ in range(max(runs, 40)):
        lease, run, pages = prepare()
        begin = time.perf_counter()
        index.extend(lease, run, pages)
        times.since(begin)
        index.release(lease)
    report["insert_8k_us"] = times.median_us
    report["hash_8k_us"] = timed(max(runs, 40), lambda: numbers.tokens(8_192), index.prepare).median_us


class Trace:
    """The agent trace: 64 conversations of 40 turns behind one 20,000-token system prompt, in a shuffled order."""

    CONVERSATIONS = 64
    TURNS = 40
    SYSTEM = 20_000
    HALF = 300

    def __init__(self, turns: int) -> None:
        self.turns = turns
        numbers = Numbers(3)
        self.system = numbers.tokens(self.SYSTEM)
        self.runs = [[numbers.tokens(self.HALF) for _ in range(2 * turns)] for _ in range(self.CONVERSATIONS)]
        self.order = [c for c in range(self.CONVERSATIONS) for _ in range(turns)]
        random.Random(20261129).shuffle(self.order)

    def run(self, blocks: int, slots: int, report: dict[str, object], name: str) -> str:
        """Play it through an index with so many device blocks and slots; returns a checksum of every answer."""
        index = PrefixIndex(block_tokens=BLOCK)
        free = Free(blocks, slots)
        history = [self.system] * self.CONVERSATIONS
        turn_of = [0] * self.CONVERSATIONS
        times = Times()
        prompted = resumed = 0
        answers = hashlib.blake2b(digest_size=8)
        for conversation in self.order:
            turn = turn_of[conversation]
            turn_of[conversation] += 1
            tokens = history[conversation] + self.runs[conversation][2 * turn]
            whole = history[conversation] = tokens + self.runs[conversation][2 * turn + 1]
            prompt = index.prepare(fresh(tokens))
            begin = time.perf_counter()
            frontier = self.turn(index, prompt, whole, free)
            times.since(begin)
            prompted += prompt.num_tokens
            resumed += frontier
            answers.update(frontier.to_bytes(4, "little"))
        report[f"{name}_turn_us"] = times.median_us
        report[f"{name}_turn_p90_us"] = percentile(times.wall, 0.9) * 1e6
        report[f"{name}_token_hit_rate"] = resumed / prompted
        return answers.hexdigest()

    def turn(self, index: PrefixIndex, prompt: Prompt, whole: bytes, free: Free) -> int:
        """One request from look-up to release; the frontier it resumed from."""
        match = index.match(prompt)
        lease = index.acquire(match, match.best)
        pages = lease.pages[0]
        index.activate(lease)
        total = len(whole) // TOKEN
        end = prompt.num_tokens // BLOCK
        needed = total // BLOCK - len(pages) + 2  # two snapshots may have tails
        if needed > len(free.pages):
            free.take(index.evict_device(needed - len(free.pages)))
        commit(index, lease, prompt.tokens, end, free)
        boundary = self.SYSTEM // BLOCK * BLOCK
        if lease.frontier < boundary:
            publish(index, lease, prompt.tokens, boundary, SnapshotKind.BOUNDARY, free)
        publish(index, lease, prompt.tokens, end * BLOCK, SnapshotKind.TAP, free)
        commit(index, lease, whole, total // BLOCK, free)
        publish(index, lease, whole, total, SnapshotKind.ENDPOINT, free)
        index.release(lease)
        return lease.frontier


class Free:
    """The caller's free lists."""

    def __init__(self, pages: int, slots: int) -> None:
        self.pages: list[int] = list(range(pages - 1, -1, -1))
        self.slots = list(range(slots - 1, -1, -1))

    def take(self, freed: Freed) -> None:
        self.pages.extend(freed.pages)  # type: ignore[arg-type]
        self.slots.extend(freed.slots)


def commit(index: PrefixIndex, lease: Lease, tokens: bytes, end: int, free: Free) -> None:
    """Commit the blocks up to `end`; duplicates' pages come back."""
    first = lease.depth
    count = end - first
    if count:
        pages = free.pages[-count:]
        del free.pages[-count:]
        done = index.extend(lease, tokens[first * BLOCK * TOKEN : end * BLOCK * TOKEN], pages)
        for begin, stop in done.duplicate:
            free.pages.extend(pages[begin - first : stop - first])


def publish(index: PrefixIndex, lease: Lease, tokens: bytes, frontier: int, kind: SnapshotKind, free: Free) -> None:
    """Publish at `frontier` if a slot can be had for it."""
    if not free.slots:
        index.supersede(lease, frontier, kind)
        freed = index.claim_slot(index.worth(lease, frontier))
        if freed is None:
            return
        free.take(freed)
    tail = tokens[frontier // BLOCK * BLOCK * TOKEN : frontier * TOKEN]
    pages = (free.pages.pop(),) if tail else ()
    slot = free.slots.pop()
    done = index.publish(lease, frontier, slot=slot, tail=tail, tail_pages=pages, kind=kind)
    if not done.created:
        free.slots.append(slot)
        free.pages.extend(pages)


def bench_memory(tokens: int, report: dict[str, object]) -> None:
    """Bytes per cached token: one 600-token edge and one snapshot a turn."""
    turn = 600
    conversations = 50
    gc.collect()
    tracemalloc.start()
    numbers = Numbers(4)
    index = PrefixIndex(block_tokens=BLOCK)
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(conversations):
        lease = index.acquire(index.match(index.prepare(b"")))
        rest = b""
        for _ in range(tokens // turn // conversations):
            rest += numbers.random.randbytes(turn * TOKEN)
            cut = len(rest) // (BLOCK * TOKEN) * BLOCK * TOKEN
            count = cut // (BLOCK * TOKEN)
            index.extend(lease, rest[:cut], numbers.pages(count))
            rest = rest[cut:]
            frontier = lease.depth * BLOCK + len(rest) // TOKEN
            pages = numbers.pages(1) if rest else ()
            index.publish(lease, frontier, slot=numbers.next_slot(), tail=rest, tail_pages=pages)
        index.release(lease)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    report["index_bytes_per_token"] = used / (index.stats().device_blocks * BLOCK)
    report["index_bytes_per_token_edges"] = index.stats().edges


def bench_revalue(runs: int, report: dict[str, object]) -> None:
    """Publish a boundary above 1,000 snapshots and derive every value that changes."""
    times = Times()
    for _ in range(runs):
        numbers = Numbers(5)
        index = PrefixIndex(block_tokens=BLOCK)
        shared = numbers.random.randbytes(4 * BLOCK * TOKEN)
        for _ in range(1_000):
            lease = index.acquire(index.match(index.prepare(b"")))
            index.extend(lease, shared + numbers.random.randbytes(4 * BLOCK * TOKEN), numbers.pages(8))
            done = index.publish(lease, 8 * BLOCK, slot=numbers.next_slot())
            index.release(lease)
        index.value(done.snapshot)
        lease = index.acquire(index.match(index.prepare(b"")))
        index.extend(lease, shared, numbers.pages(4))
        begin = time.perf_counter()
        done = index.publish(lease, 4 * BLOCK, slot=numbers.next_slot(), kind=SnapshotKind.BOUNDARY)
        index.value(done.snapshot)
        times.since(begin)
        index.release(lease)
    report["revalue_1000_dependents_us"] = times.median_us


def bench_eviction(report: dict[str, object], sizes: tuple[int, ...]) -> None:
    """Microseconds to evict one block out of so many cached ones: the curve must be flat."""
    curve = {}
    for size in sizes:
        numbers = Numbers(6)
        index = PrefixIndex(block_tokens=BLOCK)
        per_path = 16
        for _ in range(size // per_path):
            lease = index.acquire(index.match(index.prepare(b"")))
            index.extend(lease, numbers.random.randbytes(per_path * BLOCK * TOKEN), numbers.pages(per_path))
            index.release(lease)
        times = timed(min(500, size // 2), lambda: 1, index.evict_device)
        curve[str(size)] = times.median_us
    report["evict_one_of_n_us"] = curve


def measure(*, quick: bool) -> dict[str, object]:
    """Everything, as the object that is printed."""
    runs = 25 if quick else 101
    report: dict[str, object] = {"python": sys.version.split()[0], "load": load(), "quick": quick}
    contended = bench_match(runs, report)
    bench_insert(runs, report)
    trace = Trace(Trace.TURNS)
    report["trace_checksum"] = trace.run(12_000, 4_096, report, "agent_trace")
    trace.run(200_000, 8_192, report, "agent_trace_no_pressure")
    bench_memory(1_000_000 if quick else 5_000_000, report)
    bench_revalue(20 if quick else 50, report)
    bench_eviction(report, (1_000, 100_000) if quick else (1_000, 30_000, 1_000_000))
    return report | {"contended": contended}


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> None:
    options = command_line("prefix_index", __doc__, threads=False).parse_args(arguments)
    write_result(measure(quick=options.quick), write)


if __name__ == "__main__":
    main()
