"""The index: its verbs, and the one place that knows all the parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from prefix_index.errors import InvalidArgument, WrongState
from prefix_index.events import Event, Feed, Listener, Subscription
from prefix_index.guard import Guard
from prefix_index.leases.commit import Commits, Publication
from prefix_index.leases.fills import Fill, Fills
from prefix_index.leases.lease import Lease, Leases
from prefix_index.lookup import Lookup
from prefix_index.match import Candidate, Match, Owner, SnapshotHandle
from prefix_index.planning.admission import ROOT, Demand
from prefix_index.planning.cost import CostModel
from prefix_index.prompt import (
    BlockScheme,
    Extras,
    Hasher,
    Prompt,
    TokenInput,
    namespace_bytes,
    token_bytes,
    xxh3_block_hash,
)
from prefix_index.retention.eviction import Eviction
from prefix_index.retention.pins import Pins
from prefix_index.retention.queues import Queues
from prefix_index.retention.valuation import Valuation
from prefix_index.tree.records import held
from prefix_index.tree.tree import Tree
from prefix_index.types import (
    Extension,
    Freed,
    Geometry,
    Pages,
    Pool,
    SnapshotCopies,
    SnapshotKind,
    Span,
    Tier,
    count,
    page_list,
)
from prefix_index.views.check import check
from prefix_index.views.digest import digest_of, dump
from prefix_index.views.stats import Stats, gather
from prefix_index.views.tables import HostTables, export_tables, import_tables


class PrefixIndex:
    """Exact token paths, snapshots of recurrent state, and where copies of both live.

    Allocates nothing and copies nothing: pages, slots and slabs are integers whose free lists the caller owns. One
    thread changes it; `prepare` may run anywhere. Deterministic: no clock, no randomness, no order taken from hashes.
    A verb that raises has changed nothing.

    Args:
        block_tokens: tokens per block, the unit of identity.
        pools: device pools every block has a page in.
        snapshots: False for models without recurrent state: the end of every block can be resumed.
        block_bytes, image_bytes, image_slabs: sizes of a block's record and of a state image, for values and restores.
        cost: the cost model that values snapshots.
        block_hash: (parent hash, token bytes, extra) -> 64-bit hash; for tests that force collisions.
        check_thread: refuse mutation from a second thread.

    Raises:
        InvalidArgument: a size makes no sense.
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
        geometry = Geometry.checked(block_tokens, pools, snapshots, block_bytes, image_bytes, image_slabs)
        self._owner = owner = Owner(geometry, snapshots)
        self._scheme = BlockScheme(block_tokens, block_hash)
        # Every part is handed what it uses, so this is also the order in which they depend on each other.
        self._tree = tree = Tree(self._scheme, geometry)
        self._feed = feed = Feed(self._scheme)
        self._queues = queues = Queues(tree)
        self._valuation = valuation = Valuation(tree, queues, cost or CostModel())
        pins = Pins(tree, queues, valuation)
        self._eviction = Eviction(tree, feed, queues, valuation, pins)
        self._lookup = Lookup(tree, owner)
        self._leases = Leases(tree, pins, valuation, owner)
        self._commits = Commits(tree, feed, queues, valuation, pins, self._leases)
        self._fills = Fills(tree, feed, pins, self._eviction, owner)
        self._guard = Guard(tree, owner, check_thread)

    # ------------------------------------------------------------------ looking up

    @property
    def epoch(self) -> int:
        """Moves when something a match can name is lost or renumbered; never on insert, landing or pin."""
        return self._tree.epoch

    @property
    def evictable_device_pages(self) -> int:
        """Pages of each pool that `evict_device` could give up now. O(1)."""
        return self._tree.evictable_device_pages

    def holds(self, namespace: bytes) -> bool:
        """Whether anything at all is cached in a namespace. O(1).

        Raises:
            InvalidArgument: the namespace is no bytes.
        """
        root = self._tree.roots.get(namespace_bytes("holds", namespace))
        return root is not None and bool(root.first_child or root.snapshots)

    def prepare(self, tokens: TokenInput, namespace: bytes = b"", extras: Iterable[tuple[int, int]] = ()) -> Prompt:
        """Tokens as the index wants them: bytes, block hashes, extras. Pure; belongs off the worker thread.

        Args:
            tokens: ints, int32 little-endian bytes (taken without a copy), or an integer buffer.
            namespace: the isolation domain; enters every hash.
            extras: sorted (first token, cumulative nonzero key) pairs of media or adapters.

        Raises:
            InvalidArgument: one of them is not what it has to be.
        """
        return Prompt(
            self._scheme,
            token_bytes("prepare", tokens),
            namespace_bytes("prepare", namespace),
            Extras("prepare", extras),
        )

    def match(self, prompt: Prompt, exclude: Sequence[Span] = ()) -> Match:
        """What is cached of `prompt`. Changes nothing: no pin, no recency, no split. O(edges).

        Args:
            prompt: what `prepare` made.
            exclude: (begin, end) token spans; a frontier strictly inside one is not offered.

        Raises:
            InvalidArgument: the prompt was prepared for another block size or hash, or a span is none.
        """
        filling = self._fills.blocks_to_device() if self._fills.in_flight else ()
        return self._lookup.match(prompt, exclude, filling)

    def demand(self, match: Match, candidate: Candidate | None) -> Demand:
        """What resuming from `candidate` takes, for `plan_admission`. Changes nothing. O(edges).

        Raises:
            StaleMatch: the index has moved on since the match.
            StaleHandle, ForeignHandle: the candidate's snapshot is gone, or it or the match another index's.
            InvalidArgument: the candidate is not one of the match's prompt.
        """
        if candidate is None:
            self._guard.match("demand", match)
            return ROOT
        return self._leases.demand(match, candidate._depth, self._guard.source("demand", match, candidate))

    # ------------------------------------------------------------------ leases

    def acquire(self, match: Match, candidate: Candidate | None = None) -> Lease:
        """Pin the path of `candidate` and its snapshot; None resumes from nothing and binds the namespace only.

        Neither recency nor hits change before `activate` or `release`; `cancel` undoes it without a trace.

        Raises:
            StaleMatch: the index has moved on since the match.
            StaleHandle, ForeignHandle: the candidate's snapshot is gone, or it or the match another index's.
            InvalidArgument: the candidate is not one of the match's prompt.
            WrongThread: another thread is the mutator.
        """
        guard = self._guard
        guard.enter("acquire")
        if candidate is None:
            guard.match("acquire", match)
            return self._leases.acquire(match, 0, None)
        snapshot = guard.source("acquire", match, candidate)
        return self._leases.acquire(match, candidate._depth, snapshot)

    def activate(self, lease: Lease) -> None:
        """The lane exists: count the hit and let go of the snapshot, whose image and tail the lane has copied.

        The path stays pinned. Once per lease; where the caller does not call it, the first `extend`, `supersede` or
        `publish` of the lease does, or its `release`.

        Raises:
            WrongState: the lease is activated already.
            StaleHandle, ForeignHandle: the lease is released, or another index's.
            WrongThread: another thread is the mutator.
        """
        self._guard.change("activate", lease)
        if lease._activated:
            raise WrongState(f"activate: a lease is activated once, got {lease!r} again")
        self._leases.activate(lease)

    def extend(self, lease: Lease, tokens: TokenInput, pages: Sequence[Pages]) -> Extension:
        """Commit whole blocks that follow the lease's depth, with their device pages, and pin them.

        The pages of inserted and reattached blocks belong to the index now; those of duplicates stay with the caller.

        Args:
            lease: what pins the path.
            tokens: a multiple of the block size, going on at block `lease.depth`.
            pages: one id per block, or one tuple of ids per block with several pools.

        Raises:
            InvalidArgument: the tokens fill no whole blocks, or the pages are not one entry per block.
            WrongState: the device does not hold the whole path.
            StaleHandle, ForeignHandle: the lease is released, or another index's.
            WrongThread: another thread is the mutator.
        """
        self._guard.change("extend", lease)
        data = tokens if isinstance(tokens, bytes) else token_bytes("extend", tokens)
        num_blocks, rest = divmod(len(data), self._scheme.block_bytes)
        if rest:
            size = self._scheme.block_tokens
            raise InvalidArgument(f"extend: tokens must fill blocks of {size}, got {len(data) // 4} tokens")
        flat = page_list("extend", pages, self._owner.geometry.num_pools, num_blocks)
        return self._commits.extend(lease, data, num_blocks, flat)

    def release(self, lease: Lease) -> None:
        """Unpin the lease's path, which becomes the most recently used, its deepest block the first of it to go.

        Raises:
            StaleHandle, ForeignHandle: the lease is released already, or another index's.
            WrongThread: another thread is the mutator.
        """
        self._guard.change("release", lease)
        self._leases.release(lease)

    def cancel(self, lease: Lease) -> None:
        """Give back a lease that was not activated, neither by `activate` nor by work, as if it had never been.

        Raises:
            WrongState: the lease was activated.
            StaleHandle, ForeignHandle: the lease is released, or another index's.
            WrongThread: another thread is the mutator.
        """
        self._guard.change("cancel", lease)
        self._leases.cancel(lease)

    # ------------------------------------------------------------------ snapshots

    def supersede(self, lease: Lease, frontier: int, kind: SnapshotKind = SnapshotKind.ENDPOINT) -> None:
        """Supersede now what a publication at `frontier` would, so that its slot can come from its own lineage.

        `publish` does the same; calling this first only decides which snapshots `claim_slot` finds superseded.

        Raises:
            StaleHandle, ForeignHandle: the lease is released, or another index's.
            WrongThread: another thread is the mutator.
        """
        self._guard.change("supersede", lease)
        self._commits.supersede(lease, frontier, kind)

    def worth(self, lease: Lease, frontier: int) -> float:
        """What a snapshot at `frontier` would be worth if published now: the claim for its slot or slabs.

        Raises:
            StaleHandle, ForeignHandle: the lease is released, or another index's.
        """
        self._guard.lease("worth", lease)
        return self._valuation.estimate(lease._published_frontier, frontier)

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
        """Make the state after `frontier` tokens resumable, and supersede what the lineage leaves behind.

        Where an equal snapshot is there, that is refreshed instead: the caller keeps its handles.

        Args:
            lease: what pins the path.
            frontier: above the one the lease resumed from; its whole blocks are committed and on the device.
            slot: the device slot that holds the image.
            tail: int32 bytes of the tokens between the last whole block below the frontier and the frontier.
            tail_pages: the tail's own page, one id per pool; exactly when there is a tail.
            kind: why the snapshot is taken.

        Raises:
            InvalidArgument: frontier, tail, handles or kind do not fit the path or each other.
            WrongState: the index is without snapshots, or the device does not hold the path.
            StaleHandle, ForeignHandle: the lease is released, or another index's.
            WrongThread: another thread is the mutator.
        """
        self._guard.change("publish", lease)
        if not self._owner.snapshots:
            raise WrongState("publish: the index must be made with snapshots=True, got one without")
        tokens = tail if isinstance(tail, bytes) else token_bytes("publish", tail)
        return self._commits.publish(lease, frontier, slot, tokens, tuple(tail_pages), kind)

    # ------------------------------------------------------------------ copies on their way

    def begin_fill(
        self,
        what: Lease | SnapshotHandle,
        tier: Tier,
        handles: Sequence[Pages] = (),
        *,
        slot: int | None = None,
    ) -> Fill:
        """Start copies into `handles`; what they fill counts as held and is pinned until `land` or `abort`.

        Args:
            what: a lease, to fill the next blocks of its path without a copy in the tier; or a snapshot.
            tier: where the copies go.
            handles: for a lease pages or slabs, fewer than blocks are missing is fine; for a snapshot on the Host
                image_slabs slabs for the image and one more for a tail; for one on the device one page per pool for a
                tail that is only on the Host.
            slot: for a snapshot on the device the slot of an image that is only on the Host.

        Raises:
            InvalidArgument: the handles are not those needed, or the slot is none.
            WrongState: the copies are there already, on their way, or have no source.
            StaleHandle, ForeignHandle: lease or snapshot is gone, or another index's.
            WrongThread: another thread is the mutator.
        """
        self._guard.enter("begin_fill")
        if not isinstance(tier, Tier):
            raise InvalidArgument(f"begin_fill: tier must be a Tier, got {tier!r}")
        if isinstance(what, SnapshotHandle):
            return self._fills.begin_snapshot(self._guard.snapshot("begin_fill", what), tier, tuple(handles), slot)
        self._guard.lease("begin_fill", what)
        if slot is not None:
            raise InvalidArgument(f"begin_fill: a slot goes with a snapshot, got a lease and slot {slot!r}")
        return self._fills.begin_blocks(what, tier, handles)

    def land(self, fill: Fill) -> None:
        """The copies of `fill` have arrived: they are resident, and its pins end.

        Raises:
            StaleHandle, ForeignHandle: the fill is over, or another index's.
            WrongThread: another thread is the mutator.
        """
        self._guard.enter("land")
        self._guard.fill("land", fill)
        self._fills.land(fill)

    def abort(self, fill: Fill) -> Freed:
        """Undo a fill and return its handles, deepest first. The latest fill of a path is undone first.

        Raises:
            AbortTooLate: something was committed or filled below it; then only the engine's end is left.
            StaleHandle, ForeignHandle: the fill is over, or another index's.
            WrongThread: another thread is the mutator.
        """
        self._guard.enter("abort")
        self._guard.fill("abort", fill)
        return self._fills.abort(fill)

    def held(self, lease: Lease, tier: Tier) -> int:
        """How many blocks of the lease's path the tier holds, filling ones included. O(edges).

        Raises:
            StaleHandle, ForeignHandle: the lease is released, or another index's.
        """
        return min(held(self._guard.lease("held", lease), tier), lease._hold.depth)

    def handles(self, lease: Lease, tier: Tier, first: int, end: int) -> tuple[Pages, ...]:
        """The handles of blocks [first, end) of the lease's path in `tier`, filling ones included. O(edges + blocks).

        Raises:
            InvalidArgument: the tier does not hold all of them.
            StaleHandle, ForeignHandle: the lease is released, or another index's.
        """
        self._guard.lease("handles", lease)
        return self._leases.handles(lease, tier, first, end)

    def copies(self, snapshot: SnapshotHandle) -> SnapshotCopies:
        """Where a snapshot's image and tail lie now, filling copies included.

        Raises:
            StaleHandle, ForeignHandle: the snapshot is gone, or another index's.
        """
        record = self._guard.snapshot("copies", snapshot)
        return SnapshotCopies(record.slot, record.tail_pages or (), record.slabs or ())

    def value(self, snapshot: SnapshotHandle) -> float:
        """H of a retained snapshot: the claim for a Host copy of it. -inf for a superseded one.

        Raises:
            StaleHandle, ForeignHandle: the snapshot is gone, or another index's.
        """
        record = self._guard.snapshot("value", snapshot)
        if record.superseded:
            return -math.inf
        self._valuation.flush()
        return record.value

    # ------------------------------------------------------------------ giving up

    def evict_device(
        self, num_blocks: int, protect: Iterable[SnapshotHandle] = (), *, backed_only: bool = False
    ) -> Freed:
        """Give up the device copies of `num_blocks` blocks or tails, a page per pool each; fewer if the rest is pinned.

        Leaves only; backed before unbacked, then the least recently released. Whatever loses its last copy is gone, and
        with it the snapshots that stood on it: their slots and slabs are returned too.

        Args:
            num_blocks: how many.
            protect: snapshots whose path and tail stay where they are.
            backed_only: stop before anything would lose its last copy, and give up fewer.

        Raises:
            InvalidArgument: the number is no int, or negative.
            StaleHandle, ForeignHandle: a protected snapshot is gone, or another index's.
            WrongThread: another thread is the mutator.
        """
        self._guard.enter("evict_device")
        shielded = [self._guard.snapshot("evict_device", handle) for handle in protect] if protect else ()
        return self._eviction.evict_device(count("evict_device", "num_blocks", num_blocks), shielded, backed_only)

    def evict_host(self, num_slabs: int, protect: Iterable[SnapshotHandle] = (), claim: float = math.inf) -> Freed:
        """Give up at least `num_slabs` slabs; fewer when what is left is pinned or worth more than `claim`.

        Dead blocks first, then the longest superseded snapshot, then the retained one worth least. What it gave up
        before it had to stop stays given up: compare `len(freed.slabs)`.

        Raises:
            InvalidArgument: the number is no int or negative, or the claim no number.
            StaleHandle, ForeignHandle: a protected snapshot is gone, or another index's.
            WrongThread: another thread is the mutator.
        """
        self._guard.enter("evict_host")
        shielded = [self._guard.snapshot("evict_host", handle) for handle in protect]
        return self._eviction.evict_host(count("evict_host", "num_slabs", num_slabs), shielded, claim)

    def claim_slot(self, claim: float = math.inf) -> Freed | None:
        """Free one snapshot slot for an image worth `claim`, or None when every owner is pinned or worth more.

        A snapshot without a Host copy is lost with its slot; the pages of its tail are returned too.

        Raises:
            InvalidArgument: the claim is no number.
            WrongThread: another thread is the mutator.
        """
        self._guard.enter("claim_slot")
        return self._eviction.claim_slot(claim)

    def clear(self, namespace: bytes | None = None) -> Freed:
        """Forget a namespace, or everything.

        Raises:
            WrongState: a lease or a fill pins some of it.
            InvalidArgument: the namespace is no bytes.
            WrongThread: another thread is the mutator.
        """
        self._guard.enter("clear")
        return self._eviction.clear(None if namespace is None else namespace_bytes("clear", namespace))

    # ------------------------------------------------------------------ the whole index as data

    def export(self) -> HostTables:
        """The Host-resident part as plain tables: retained snapshots whose path is on the Host, and those paths.

        Raises:
            WrongState: a copy to the Host is on its way.
        """
        in_flight = self._fills.in_flight
        if any(fill.tier is Tier.HOST for fill in in_flight):
            raise WrongState(f"export: Host fills must have landed, got {len(in_flight)} fills in flight")
        return export_tables(self._tree)

    def import_tables(self, tables: HostTables) -> None:
        """Take exported rows back, Host-only and without evicting anything. Into an empty index only.

        The rows' slabs are the caller's, filled with their bytes (see `HostTables.with_slabs`).

        Raises:
            WrongState: the index is not empty.
            InvalidArgument: the tables contradict themselves or this index.
            WrongThread: another thread is the mutator.
        """
        self._guard.enter("import_tables")
        import_tables(self._tree, self._feed, self._valuation, tables)

    def stats(self) -> Stats:
        """Gauges and counters. O(1)."""
        return gather(self._tree, self._valuation, self._eviction, self._leases, self._commits, self._fills)

    def dump(self) -> dict[str, object]:
        """The whole state as plain values, edge boundaries, epoch and statistics left out. O(tree)."""
        return dump(self._tree, self._valuation)

    def digest(self) -> str:
        """A hash of `dump`: equal exactly when two indexes hold the same and will evict in the same order."""
        return digest_of(self.dump())

    def check_invariants(self) -> None:
        """Re-derive every counter, order and value from scratch. O(tree).

        Raises:
            InvariantViolation: one of them is wrong: a bug of this package.
        """
        check(self._tree, self._queues, self._valuation)

    def subscribe(self, listener: Listener) -> Subscription:
        """Tell `listener` of every block stored or removed per tier, snapshot published or dropped, namespace cleared.

        Told inside the causing call, in order, with rising sequence numbers; late joiners begin with `state_events`.
        """
        return self._feed.add(listener)

    def state_events(self) -> tuple[Event, ...]:
        """What is there now as the events that lead to it, parents first. O(tree)."""
        return self._feed.state(self._tree.roots.values(), self._fills.filling_blocks())

    def hand_over(self) -> None:
        """Let another thread be the mutator from its next call on."""
        self._guard.leave()
