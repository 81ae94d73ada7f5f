"""Tickets: what a submitted batch can be asked."""

from __future__ import annotations

import operator
import traceback
from dataclasses import dataclass
from typing import Any, Protocol

from slab_pool.batches import CopyBatch
from slab_pool.errors import SlabPoolError


class Completion(Protocol):
    """How far one batch has come: the part of a ticket that each kind of stream supplies.

    Parts land in order. `error` is set at most once, and then no further part lands. `finished` means that
    nothing of the batch reads or writes any more, which after an error may come later than the error.
    """

    @property
    def error(self) -> BaseException | None: ...

    def num_landed(self) -> int:
        """Parts that have landed."""

    def finished(self) -> bool:
        """Whether nothing of the batch reads or writes any more."""

    def wait(self, num_parts: int) -> None:
        """Block the calling thread until that many parts have landed, or until the batch has failed."""

    def wait_finished(self) -> None:
        """Block the calling thread until `finished()`."""

    def wait_on(self, part: int, compute: Any) -> None:
        """Order `compute` behind the part: work given to it later sees the part's bytes."""

    def seconds(self) -> float:
        """First copy to last landing; asked once, after the batch has finished without an error."""


def without_frames(error: BaseException) -> BaseException:
    """The error without the frames it came through, which would keep the batch's memory alive.

    Where it was raised stays readable, as a note.
    """
    chained: BaseException | None = error
    seen = set()  # a cause may have been raised again: then the chain is a ring
    while chained is not None and id(chained) not in seen:
        seen.add(id(chained))
        chained.add_note("".join(traceback.format_tb(chained.__traceback__)).rstrip())
        chained.__traceback__ = None
        chained = chained.__cause__ or chained.__context__
    return error


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A batch that landed."""

    num_bytes: int
    num_copies: int
    seconds: float


class Ticket:
    """One batch in flight. Made by `CopyStream.submit`; readable from any thread."""

    __slots__ = ("_parts", "_result", "batch_bytes", "batch_copies", "completion", "direction", "serial")

    def __init__(self, serial: int, batch: CopyBatch, completion: Completion) -> None:
        # The batch itself is not kept: a ticket that is held must not keep arenas alive.
        self.serial = serial
        self.direction = batch.direction
        self.batch_bytes = batch.num_bytes
        self.batch_copies = batch.num_copies
        self._parts = tuple(part.name for part in batch.parts)
        self.completion = completion
        self._result: CopyResult | None = None

    @property
    def num_parts(self) -> int:
        return len(self._parts)

    def part(self, index: int) -> PartEvent:
        """The event of part `index`, in the order of the batch.

        Raises:
            IndexError: the batch has no such part.
        """
        index = operator.index(index)
        if not 0 <= index < len(self._parts):
            raise IndexError(f"part: index must be between 0 and {len(self._parts) - 1}, got {index!r}")
        return PartEvent(self, index)

    def done(self) -> bool:
        """Whether nothing of the batch reads or writes any more: it landed, or it failed and is at rest."""
        return self.completion.finished()

    @property
    def error(self) -> CopyFailed | None:
        """Why the batch will not land, or None as far as is known now."""
        cause = self.completion.error
        if cause is None:
            return None
        landed = self.completion.num_landed()
        name = self._parts[landed] if landed < len(self._parts) else self._parts[-1]
        failure = CopyFailed(
            f"copy batch {self.serial} ({self.direction.value}, {self.batch_bytes} bytes) failed in part"
            f" {landed} ({name!r}) of {len(self._parts)}: {cause!r}",
            ticket=self,
        )
        failure.__cause__ = cause
        return failure

    def wait_on(self, compute: Any) -> None:
        """Order a compute stream behind the whole batch.

        Raises:
            CopyFailed: it is known to have failed.
        """
        self.part(len(self._parts) - 1).wait_on(compute)

    def result(self) -> CopyResult:
        """Block until the batch is at rest, then say what it moved.

        Raises:
            CopyFailed: it did not land.
        """
        self.completion.wait_finished()
        failure = self.error
        if failure is not None:
            raise failure
        if self._result is None:
            self._result = CopyResult(self.batch_bytes, self.batch_copies, self.completion.seconds())
        return self._result

    def __repr__(self) -> str:
        state = "failed" if self.completion.error is not None else f"{self.completion.num_landed()} landed"
        return f"<Ticket {self.serial} {self.direction.value} {self.batch_bytes} bytes, {state} of {len(self._parts)}>"


class CopyFailed(SlabPoolError):
    """A batch did not land. The first error is the `__cause__`.

    Attributes:
        ticket: of the batch.
    """

    def __init__(self, message: str, *, ticket: Ticket) -> None:
        super().__init__(message)
        self.ticket = ticket


class PartEvent:
    """One part of a ticket."""

    __slots__ = ("_index", "_ticket")

    def __init__(self, ticket: Ticket, index: int) -> None:
        self._ticket = ticket
        self._index = index

    def ready(self) -> bool:
        """Whether this part and all before it have landed; never for the part that failed or later ones."""
        return self._ticket.completion.num_landed() > self._index

    def wait(self) -> None:
        """Block the calling thread until the part has landed.

        Raises:
            CopyFailed: it will not land.
        """
        self._ticket.completion.wait(self._index + 1)
        self._raise_if_failed()

    def wait_on(self, compute: Any) -> None:
        """Order `compute`, a handle from the stream's `compute_stream()`, behind this part.

        On CUDA nothing blocks: kernels launched on `compute` later wait on the device. On a CPU the calling
        thread is the compute stream, so it waits.

        Raises:
            CopyFailed: the part is known not to land.
            TypeError: on a CPU, `compute` is another handle.
        """
        self._raise_if_failed()
        self._ticket.completion.wait_on(self._index, compute)
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if self._ticket.completion.error is not None and not self.ready():
            failure = self._ticket.error
            assert failure is not None
            raise failure
