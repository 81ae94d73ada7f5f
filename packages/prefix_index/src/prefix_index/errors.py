"""The errors of this package.

PrefixIndexError
├── InvalidArgument (ValueError)    a value out of its range or of the wrong length
├── StaleMatch                      the index lost or renumbered something since the match: match again
├── StaleHandle                     the thing behind the handle is gone
├── ForeignHandle                   the handle belongs to another index
├── WrongState                      the call is right, but not now (released lease, unpinned path, landed fill)
│   └── AbortTooLate                something was committed or filled below the fill since it began
├── WrongThread                     a second thread tried to change the index
└── InvariantViolation              `check_invariants` found the index inconsistent: a bug of this package

Every message names the operation, the constraint and the value. A call that raises has changed nothing.
"""


class PrefixIndexError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidArgument(PrefixIndexError, ValueError):
    """An argument is out of its range, of the wrong length or of the wrong kind."""


class StaleMatch(PrefixIndexError):
    """The index lost or renumbered something a match can name since it was made; match again."""


class StaleHandle(PrefixIndexError):
    """The snapshot, lease or fill behind a handle no longer exists."""


class ForeignHandle(PrefixIndexError):
    """A handle made by another index."""


class WrongState(PrefixIndexError):
    """The operation does not fit the state of its object."""


class AbortTooLate(WrongState):
    """A fill cannot be undone: something below it was committed or filled since."""


class WrongThread(PrefixIndexError):
    """The index has one mutator; another thread called a mutating operation."""


class InvariantViolation(PrefixIndexError, AssertionError):
    """`check_invariants` found a contradiction."""
