"""An exact, path-compressed prefix index for engines whose state cannot be rolled back."""

from prefix_index.errors import (
    AbortTooLate,
    ForeignHandle,
    InvalidArgument,
    InvariantViolation,
    PrefixIndexError,
    StaleHandle,
    StaleMatch,
    WrongState,
    WrongThread,
)
from prefix_index.events import (
    BlockRemoved,
    BlockStored,
    Cleared,
    Event,
    SnapshotDropped,
    SnapshotPublished,
    Subscription,
)
from prefix_index.index import PrefixIndex
from prefix_index.leases.commit import Publication
from prefix_index.leases.fills import Fill
from prefix_index.leases.lease import Lease
from prefix_index.match import Candidate, Match, Reason, SnapshotHandle
from prefix_index.planning.admission import (
    ROOT,
    Demand,
    PoolState,
    Quote,
    Readiness,
    plan_admission,
    rank_candidates,
    resume_seconds,
)
from prefix_index.planning.coalescing import Sibling, Wait, common_prefix, plan_coalescing, worth_landing
from prefix_index.planning.cost import CostModel
from prefix_index.planning.taps import Tap, TapHints, TapLimits, TapSource, plan_taps
from prefix_index.prompt import Prompt, xxh3_block_hash
from prefix_index.types import Extension, Freed, Pool, SnapshotCopies, SnapshotKind, Tier
from prefix_index.views.stats import Stats
from prefix_index.views.tables import BlockRow, HostRestorePlan, HostTables, SnapshotRow, plan_host_restore

__all__ = [
    "ROOT",
    "AbortTooLate",
    "BlockRemoved",
    "BlockRow",
    "BlockStored",
    "Candidate",
    "Cleared",
    "CostModel",
    "Demand",
    "Event",
    "Extension",
    "Fill",
    "ForeignHandle",
    "Freed",
    "HostRestorePlan",
    "HostTables",
    "InvalidArgument",
    "InvariantViolation",
    "Lease",
    "Match",
    "Pool",
    "PoolState",
    "PrefixIndex",
    "PrefixIndexError",
    "Prompt",
    "Publication",
    "Quote",
    "Readiness",
    "Reason",
    "Sibling",
    "SnapshotCopies",
    "SnapshotDropped",
    "SnapshotHandle",
    "SnapshotKind",
    "SnapshotPublished",
    "SnapshotRow",
    "StaleHandle",
    "StaleMatch",
    "Stats",
    "Subscription",
    "Tap",
    "TapHints",
    "TapLimits",
    "TapSource",
    "Tier",
    "Wait",
    "WrongState",
    "WrongThread",
    "common_prefix",
    "plan_admission",
    "plan_coalescing",
    "plan_host_restore",
    "plan_taps",
    "rank_candidates",
    "resume_seconds",
    "worth_landing",
    "xxh3_block_hash",
]
