"""The index: the verbs, their checks, and the one place that knows all the parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from prefix_index import check as _check
from prefix_index import digest as _digest
from prefix_index.capacity import ROOT, Demand
from prefix_index.clear import clear
from prefix_index.core import Core, Geometry, Given
from prefix_index.cost import CostModel
from prefix_index.device import DeviceOrder
from prefix_index.errors import (
    InvalidArgument,
    WrongState,
)
from prefix_index.events import Event, Feed, Listener, Subscription, state_events
from prefix_index.extend import extend as _extend
from prefix_index.fills import Ticket, abort, begin_blocks, begin_snapshot, held, land
from prefix_index.guard import Guard
from prefix_index.host import HostOrder
from prefix_index.lease import Lease
from prefix_index.lineage import activate, supersede_below
from prefix_index.lookup import find, note_filling, spans
from prefix_index.match import Candidate, Match, SnapshotHandle, Span
from prefix_index.nodes import Hasher
from prefix_index.prompt import BlockScheme, Extras, Prompt, TokenInput, namespace_bytes, token_bytes, xxh3_block_hash
from prefix_index.publish import Publication, publish
from prefix_index.restore import restore
from prefix_index.slots import SlotOrder
from prefix_index.stats import Counters, Stats, gather
from prefix_index.tables import HostTables, export
from prefix_index.tenure import acquire, cancel, demand, handles, release, tell_stored
from prefix_index.tree import Tree
from prefix_index.values import (
    Extension,
    Freed,
    Pages,
    Pool,
    SnapshotCopies,
    SnapshotKind,
    Tier,
    integer,
    page_list,
)
from prefix_index.worth import Worth


class PrefixIndex:
    """Exact token paths, snapshots of recurrent state, and where copies of both live.

    Allocates nothing and copies nothing: pages, slots and slabs are integers whose free lists the caller owns. One
    thread changes it; `prepare` may run anywhere. Deterministic: no clock, no randomness, no order taken from hashes.

    Every verb may raise InvalidArgument (a value out of its range), WrongState (right, but not now), StaleHandle (what
    it named is gone), ForeignHandle (another index's) and, where it changes the index, WrongThread.

    block_tokens  tokens per block, the unit of identity
    pools         device pools every block has a page in
    snapshots     False for models without recurrent state: the end of every block can be resumed
    block_bytes, image_bytes, image_slabs   sizes of a block's record and of a state image, for values and restore costs
    cost          the cost model that values snapshots
    block_hash    (parent hash, token bytes, extra) -> 64-bit hash; for tests that force collisions
    check_thread  refuse mutation from a second thread
    """

    def __init__(
        self,
        *,
        block_tokens: int = 64,
        pools: Sequence[Pool] = (Pool(),),
        snapshots: bool = True,
        block_bytes: int = 1 << 20,
        image_bytes: int = 32 << 20,
        image_slabs: int = 32,
        cost: CostModel | None = None,
        block_hash: Hasher = xxh3_block_hash,
        check_thread: bool = True,
    ) -> None:
        self._geometry = Geometry.checked(block_tokens, pools, snapshots, block_bytes, image_bytes, image_slabs)
        self._pools = tuple(pools)
        self._snapshots = snapshots
        self._scheme = BlockScheme(block_tokens, block_hash)
        core = self._core = Core(self._geometry, cost or CostModel())
        self._guard = Guard(core, check_thread)
        core.tree = Tree(self._scheme, len(pools))
        core.device = DeviceOrder(core)
        core.feed = Feed(core)
        core.host = HostOrder(core)
        core.slots = SlotOrder(core)
        core.worth = Worth(core)
        self._counts = Counters()

    # ------------------------------------------------------------------ looking up

    @property
    def pools(self) -> tuple[Pool, ...]:
        return self._pools

    @property
    def block_tokens(self) -> int:
        return self._geometry.block_tokens

    @property
    def epoch(self) -> int:
        """Moves when something a match can name is lost or renumbered; never on insert, landing or pin."""
        return self._core.epoch

    @property
    def evictable_device_pages(self) -> int:
        """Pages of each pool that `evict_device` could give up now. O(1)."""
        return self._core.evictable_device_pages

    def holds(self, namespace: bytes) -> bool:
        """Whether anything at all is cached in a namespace. O(1)."""
        root = self._core.tree.roots.get(namespace_bytes("holds", namespace))
        return root is not None and bool(root.first or root.snaps)

    def prepare(self, tokens: TokenInput, namespace: bytes = b"", extras: Iterable[tuple[int, int]] = ()) -> Prompt:
        """Tokens as the index wants them: bytes, block hashes, extras. Pure; belongs off the worker.

        tokens     ints, int32 little-endian bytes (taken without a copy), or an integer buffer
        namespace  the isolation domain; enters every hash
        extras     sorted (first token, cumulative nonzero key) pairs of media or adapters
        """
        return Prompt(
            self._scheme,
            token_bytes("prepare", tokens),
            namespace_bytes("prepare", namespace),
            Extras("prepare", extras),
        )

    def match(self, prompt: Prompt, exclude: Sequence[Span] = ()) -> Match:
        """What is cached of `prompt`. Changes nothing: no pin, no recency, no split. O(edges).

        exclude  (begin, end) token spans; a frontier strictly inside one is not offered
        """
        if prompt._scheme is not self._scheme and prompt._scheme != self._scheme:
            raise InvalidArgument(f"match: the prompt must be prepared with this block size and hash, got {prompt!r}")
        match = Match.__new__(Match)
        core = self._core
        match._owner = self._guard.owner
        match._epoch = core.epoch
        match._geometry = self._geometry
        match._prompt = prompt
        match._exclude = spans("match", exclude) if exclude else ()
        match._snapshots = self._snapshots
        find(core.tree.roots.get(prompt._namespace), match)
        if core.tickets:
            note_filling(match, core.tickets)
        return match

    def demand(self, match: Match, candidate: Candidate | None) -> Demand:
        """What resuming from `candidate` takes, for `plan_admission`. Changes nothing. O(edges)."""
        if candidate is None:
            self._guard.match("demand", match)
            return ROOT
        return demand(match, candidate._depth, self._guard.source("demand", match, candidate))

    # ------------------------------------------------------------------ leases

    def acquire(self, match: Match, candidate: Candidate | None = None) -> Lease:
        """Pin the path of `candidate` and its snapshot; None resumes from nothing and binds the namespace only.

        Neither recency nor hits change before `activate` or `release`; `cancel` undoes it without a trace.
        Raises StaleMatch when the index has moved on since the match."""
        guard = self._guard
        guard.enter("acquire")
        if candidate is None:
            guard.match("acquire", match)
            return acquire(self._core, guard.owner, match, 0, None)
        snapshot = guard.source("acquire", match, candidate)
        return acquire(self._core, guard.owner, match, candidate._depth, snapshot)

    def activate(self, lease: Lease) -> None:
        """The lane exists: count the hit and let go of the snapshot, whose image and tail the lane has copied.

        The path stays pinned. Once per lease; its first `extend`, `supersede`, `publish` or its `release` does it where
        nobody did by name."""
        self._guard.change("activate", lease)
        if lease._activated:
            raise WrongState(f"activate: a lease is activated once, got {lease!r} again")
        activate(self._core, lease)

    def extend(self, lease: Lease, tokens: TokenInput, pages: Sequence[Pages]) -> Extension:
        """Commit whole blocks that follow the lease's depth, with their device pages, and pin them.

        tokens  a multiple of the block size, going on at block `lease.depth`
        pages   one id per block, or one tuple of ids per block with several pools
        The pages of inserted and reattached blocks belong to the index now; those of duplicates stay with the caller.
        """
        edge = self._guard.change("extend", lease)
        data = tokens if isinstance(tokens, bytes) else token_bytes("extend", tokens)
        num_blocks, rest = divmod(len(data), self._scheme.block_bytes)
        if rest:
            raise InvalidArgument(
                f"extend: tokens must fill blocks of {self.block_tokens}, got {len(data) // 4} tokens"
            )
        flat = page_list("extend", pages, self._geometry.num_pools, num_blocks)
        depth = lease._hold.depth
        if edge.start + edge.dev < depth:
            raise WrongState(
                f"extend: all {depth} blocks of the path must be held on the device, got {edge.start + edge.dev}"
            )
        if not num_blocks:
            return Extension((), (), ())
        extras = None
        if lease._prompt._extras.pairs:
            extras = lease._prompt._extras.of_blocks(depth, depth + num_blocks, self.block_tokens)
        if not lease._activated:
            activate(self._core, lease)
        core = self._core
        done = _extend(core, lease, data, num_blocks, extras, flat)
        if not core.feed.silent:
            for first, end in sorted((*done.inserted, *done.reattached)):
                tell_stored(core, lease, first, end)
        return done

    def release(self, lease: Lease) -> None:
        """Unpin the lease's path, which becomes the most recently used, its deepest block the first of it to go."""
        self._guard.change("release", lease)
        release(self._core, lease)

    def cancel(self, lease: Lease) -> None:
        """Give back a lease that was not activated, neither by name nor by work: as if it had never been."""
        self._guard.change("cancel", lease)
        if lease._activated:
            raise WrongState(f"cancel: the lease must not have been activated, got {lease!r}; release it")
        cancel(self._core, lease)

    # ------------------------------------------------------------------ snapshots

    def supersede(self, lease: Lease, frontier: int, kind: SnapshotKind = SnapshotKind.ENDPOINT) -> None:
        """Supersede now what a publication at `frontier` would, so that its slot can come from its own lineage.

        `publish` does the same; calling this first only decides who `claim_slot` meets."""
        self._guard.change("supersede", lease)
        if frontier > lease._resume_frontier:
            if not lease._activated:
                activate(self._core, lease)
            supersede_below(self._core, lease, frontier, kind)

    def worth(self, lease: Lease, frontier: int) -> float:
        """What a snapshot at `frontier` would be worth if published now: the claim for its slot or slabs."""
        self._guard.lease("worth", lease)
        return self._core.worth.estimate(lease._published, frontier)

    def publish(
        self,
        lease: Lease,
        frontier: int,
        *,
        slot: int,
        tail: bytes = b"",
        tail_pages: Sequence[int] = (),
        kind: SnapshotKind = SnapshotKind.ENDPOINT,
    ) -> Publication:
        """Make the state after `frontier` tokens resumable.

        frontier    above the one the lease resumed from; its whole blocks are committed and on the device
        slot        the device slot that holds the image
        tail        int32 bytes of the tokens between the last whole block below the frontier and the frontier
        tail_pages  the tail's own page, one id per pool; exactly when there is a tail
        Supersedes what the lineage leaves behind. An equal snapshot is refreshed instead: the caller keeps its handles.
        """
        self._guard.change("publish", lease)
        if not self._snapshots:
            raise WrongState("publish: the index must be made with snapshots=True, got one without")
        tokens = tail if isinstance(tail, bytes) else token_bytes("publish", tail)
        pages = tuple(tail_pages)
        for number in (frontier, slot, *pages):
            if number.__class__ is not int:  # asked first: most are
                frontier, slot, *others = (
                    integer("publish", "frontier, slot and pages", given) for given in (frontier, slot, *pages)
                )
                pages = tuple(others)
                break
        if kind.__class__ is not SnapshotKind:
            raise InvalidArgument(f"publish: kind must be a SnapshotKind, got {kind!r}")
        snapshot, created = publish(self._core, lease, frontier, slot, tokens, pages, kind)
        if created:
            self._counts.published += 1
        else:
            self._counts.duplicates += 1
        return Publication(SnapshotHandle(self._guard.owner, snapshot), created)

    # ------------------------------------------------------------------ copies on their way

    def begin_fill(
        self,
        what: Lease | SnapshotHandle,
        tier: Tier,
        handles: Sequence[Pages] = (),
        *,
        slot: int | None = None,
    ) -> Ticket:
        """Start copies into `handles`; what they fill counts as held and is pinned until `land` or `abort`.

        a lease, Tier.DEVICE     pages for the next blocks of its path without a device copy
        a lease, Tier.HOST       slabs for the next blocks of its path without a Host copy; fewer than missing is fine
        a snapshot, Tier.HOST    image_slabs slabs for the image and one more for a tail
        a snapshot, Tier.DEVICE  one page per pool for a tail that is only on the Host, and/or `slot` for the image
        """
        self._guard.enter("begin_fill")
        if not isinstance(tier, Tier):
            raise InvalidArgument(f"begin_fill: tier must be a Tier, got {tier!r}")
        if isinstance(what, SnapshotHandle):
            record = self._guard.snapshot("begin_fill", what)
            slot = None if slot is None else integer("begin_fill", "slot", slot)
            return begin_snapshot(self._core, self._guard.owner, record, tier, tuple(handles), slot)
        self._guard.lease("begin_fill", what)
        if slot is not None:
            raise InvalidArgument(f"begin_fill: a slot goes with a snapshot, got a lease and slot {slot!r}")
        return begin_blocks(self._core, self._guard.owner, what._hold, tier, handles)

    def land(self, ticket: Ticket) -> None:
        """The copies of `ticket` have arrived: they are resident, and its pins end."""
        self._guard.enter("land")
        self._guard.ticket("land", ticket)
        land(self._core, ticket)

    def abort(self, ticket: Ticket) -> Freed:
        """Undo a fill and return its handles, deepest first. The latest fill of a path is undone first.

        Raises AbortTooLate once something was committed or filled below it: then only the engine's end is left."""
        self._guard.enter("abort")
        self._guard.ticket("abort", ticket)
        return abort(self._core, ticket).freeze()

    def held(self, lease: Lease, tier: Tier) -> int:
        """How many blocks of the lease's path the tier holds, filling ones included. O(edges)."""
        return min(held(self._guard.lease("held", lease), tier), lease._hold.depth)

    def handles(self, lease: Lease, tier: Tier, first: int, end: int) -> tuple[Pages, ...]:
        """The handles of blocks [first, end) of the lease's path in `tier`, filling ones included. O(edges + blocks).

        Raises InvalidArgument unless the tier holds all of them."""
        edge = self._guard.lease("handles", lease)
        return handles(edge, tier, self._geometry.num_pools, first, end, self.held(lease, tier))

    def copies(self, snapshot: SnapshotHandle) -> SnapshotCopies:
        """Where a snapshot's image and tail lie now, filling copies included."""
        record = self._guard.snapshot("copies", snapshot)
        return SnapshotCopies(record.slot, record.tail_pages or (), record.slabs or ())

    def value(self, snapshot: SnapshotHandle) -> float:
        """H of a retained snapshot: the claim for a Host copy of it. -inf for a superseded one."""
        record = self._guard.snapshot("value", snapshot)
        if record.superseded:
            return -math.inf
        self._core.worth.flush()
        return record.value

    # ------------------------------------------------------------------ giving up

    def evict_device(
        self, num_blocks: int, protect: Iterable[SnapshotHandle] = (), *, backed_only: bool = False
    ) -> Freed:
        """Give up the device copies of `num_blocks` blocks or tails, a page per pool each; fewer if the rest is pinned.

        Leaves only; backed before unbacked, then the least recently released. Whatever loses its last copy is gone, and
        with it the snapshots that stood on it: their slots and slabs are returned too.
        protect      snapshots whose path and tail stay where they are
        backed_only  stop before anything would lose its last copy, and give up fewer
        """
        self._guard.enter("evict_device")
        num_blocks = integer("evict_device", "num_blocks", num_blocks)
        if num_blocks < 0:
            raise InvalidArgument(f"evict_device: num_blocks must not be negative, got {num_blocks!r}")
        core = self._core
        given = Given()
        shields = core.shield([self._guard.snapshot("evict_device", handle) for handle in protect]) if protect else ()
        self._counts.device_evictions += core.device.evict(num_blocks, given, backed_only)
        if shields:
            core.unshield(shields)
        return given.freeze()

    def evict_host(self, num_slabs: int, protect: Iterable[SnapshotHandle] = (), claim: float = math.inf) -> Freed:
        """Give up at least `num_slabs` slabs; fewer when what is left is pinned or worth more than `claim`.

        Dead blocks first, then the longest superseded snapshot, then the retained one worth least. What it gave up
        before it had to stop stays given up: compare `len(freed.slabs)`.
        """
        self._guard.enter("evict_host")
        num_slabs = integer("evict_host", "num_slabs", num_slabs)
        _check_claim("evict_host", claim)
        if num_slabs < 0:
            raise InvalidArgument(f"evict_host: num_slabs must not be negative, got {num_slabs!r}")
        given = Given()
        shields = self._core.shield([self._guard.snapshot("evict_host", handle) for handle in protect])
        self._core.host.evict(num_slabs, claim, given)
        self._core.unshield(shields)
        self._counts.host_evictions += len(given.slabs)
        return given.freeze()

    def claim_slot(self, claim: float = math.inf) -> Freed | None:
        """Free one snapshot slot for an image worth `claim`, or None when every owner is pinned or worth more.

        A snapshot without a Host copy is lost with its slot; the pages of its tail are returned too."""
        self._guard.enter("claim_slot")
        _check_claim("claim_slot", claim)
        given = Given()
        if not self._core.slots.claim(claim, given):
            return None
        self._counts.slot_claims += 1
        return given.freeze()

    def clear(self, namespace: bytes | None = None) -> Freed:
        """Forget a namespace, or everything. Raises WrongState while a lease or a fill pins any of it."""
        self._guard.enter("clear")
        named = None if namespace is None else namespace_bytes("clear", namespace)
        return clear(self._core, named).freeze()

    def export(self) -> HostTables:
        """The Host-resident part as plain tables: retained snapshots whose path is on the Host, and those paths.

        Raises WrongState while a copy to the Host is on its way."""
        return export(self._core)

    def restore(self, tables: HostTables) -> None:
        """Take exported rows back, Host-only and without evicting anything. Into an empty index only, else
        WrongState.

        The rows' slabs are the caller's, filled with their bytes (see `with_slabs`). Bad tables change nothing."""
        self._guard.enter("restore")
        restore(self._core, tables)

    # ------------------------------------------------------------------ observing

    def stats(self) -> Stats:
        """Gauges and counters. O(1)."""
        return gather(self._core, self._counts)

    def dump(self) -> dict[str, object]:
        """The whole state as plain values, edge boundaries, epoch and statistics left out. O(tree)."""
        return _digest.dump(self._core)

    def digest(self) -> str:
        """A hash of `dump`: equal exactly when two indexes hold the same and will evict in the same order."""
        return _digest.digest(self._core)

    def check_invariants(self) -> None:
        """Re-derive every counter, order and value from scratch; raises InvariantViolation. O(tree)."""
        _check.check(self._core)

    def subscribe(self, listener: Listener) -> Subscription:
        """Hear of every block stored or removed per tier, snapshot published or dropped, namespace cleared.

        Told inside the causing call, in order, with rising sequence numbers; late joiners begin with `state_events`."""
        return self._core.feed.add(listener)

    def state_events(self) -> tuple[Event, ...]:
        """What is there now as the events that lead to it, parents first. O(tree)."""
        return state_events(self._core)

    def hand_over(self) -> None:
        """Let another thread be the mutator from its next call on."""
        self._guard.leave()


def _check_claim(op: str, claim: float) -> None:
    if not claim >= -math.inf:  # NaN, which compares as the greatest claim of all
        raise InvalidArgument(f"{op}: claim must be a number, got {claim!r}")
