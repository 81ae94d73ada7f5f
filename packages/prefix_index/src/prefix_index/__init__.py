"""An exact, path-compressed prefix index for engines whose state cannot be rolled back."""

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
from prefix_index.fills import Ticket
from prefix_index.index import PrefixIndex, Publication
from prefix_index.lease import Lease
from prefix_index.match import Candidate, Candidates, Match, SnapshotHandle
from prefix_index.prompt import Prompt, xxh3_block_hash
from prefix_index.stats import Stats
from prefix_index.values import Extension, Freed, Pool, Reason, SnapshotKind, Tier

__all__ = [
    "AbortTooLate",
    "Candidate",
    "Candidates",
    "CostModel",
    "Extension",
    "ForeignHandle",
    "Freed",
    "InvalidArgument",
    "InvariantViolation",
    "Lease",
    "Match",
    "Pool",
    "PrefixIndex",
    "PrefixIndexError",
    "Prompt",
    "Publication",
    "Reason",
    "SnapshotHandle",
    "SnapshotKind",
    "StaleHandle",
    "StaleMatch",
    "Stats",
    "Ticket",
    "Tier",
    "WrongState",
    "WrongThread",
    "xxh3_block_hash",
]
