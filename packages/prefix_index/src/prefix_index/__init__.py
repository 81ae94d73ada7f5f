"""An exact, path-compressed prefix index for engines whose state cannot be rolled back."""

from prefix_index.capacity import ROOT, Demand, PoolState, Quote, Readiness, plan_admission
from prefix_index.choice import rank_candidates, resume_seconds
from prefix_index.coalesce import Sibling, Wait, common_prefix, plan_coalescing
from prefix_index.cost import CostModel
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
from prefix_index.fills import Ticket
from prefix_index.index import PrefixIndex
from prefix_index.lease import Lease
from prefix_index.match import Candidate, Candidates, Match, SnapshotHandle
from prefix_index.prompt import Prompt, xxh3_block_hash
from prefix_index.publish import Publication
from prefix_index.stats import Stats
from prefix_index.tables import BlockRow, HostRestorePlan, HostTables, SnapshotRow, plan_host_restore
from prefix_index.taps import Tap, TapHints, TapLimits, TapSource, plan_taps
from prefix_index.values import Extension, Freed, Pool, Reason, SnapshotCopies, SnapshotKind, Tier

__all__ = [
    "ROOT",
    "AbortTooLate",
    "BlockRemoved",
    "BlockRow",
    "BlockStored",
    "Candidate",
    "Candidates",
    "Cleared",
    "CostModel",
    "Demand",
    "Event",
    "Extension",
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
    "Ticket",
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
    "xxh3_block_hash",
]
