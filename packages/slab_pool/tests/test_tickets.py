"""Tickets and their parts, over a completion that a test moves by hand."""

import pytest

from slab_pool import CopyBatch, CopyFailed, Direction, Ticket
from slab_pool.cpu import HostCompletion
from slab_pool.tickets import without_frames


def make(num_parts=3):
    completion = HostCompletion()
    batch = CopyBatch.of(Direction.DEVICE_TO_HOST, [(f"part {index}", []) for index in range(num_parts)])
    return Ticket(8, batch, completion), completion


def test_parts_become_ready_in_order():
    ticket, completion = make()
    assert ticket.num_parts == 3
    for landed in range(4):
        assert [ticket.part(index).ready() for index in range(3)] == [index < landed for index in range(3)]
        assert not ticket.done()
        if landed < 3:
            completion.land_part()
    completion.finish(seconds=0.5)
    assert ticket.done()
    assert ticket.error is None
    assert ticket.result().seconds == 0.5
    assert ticket.result() is ticket.result()


@pytest.mark.parametrize("index", [-1, 3])
def test_a_part_beyond_the_batch_is_an_index_error(index):
    ticket, _ = make()
    with pytest.raises(IndexError, match=f"part: index must be between 0 and 2, got {index}"):
        ticket.part(index)


def test_the_error_names_batch_direction_and_part():
    ticket, completion = make()
    completion.land_part()
    completion.finish(error=OSError("bus"))
    assert ticket.done()
    with pytest.raises(CopyFailed) as caught:
        ticket.result()
    assert caught.value.ticket is ticket
    assert isinstance(caught.value.__cause__, OSError)
    for piece in ("copy batch 8", "device_to_host", "part 1", "'part 1'", "bus"):
        assert piece in str(caught.value)
    ticket.part(0).wait()
    for index in (1, 2):
        assert not ticket.part(index).ready()
        with pytest.raises(CopyFailed):
            ticket.part(index).wait()


def test_an_error_after_the_last_part_names_the_last_part():
    ticket, completion = make(1)
    completion.land_part()
    completion.finish(error=OSError("late"))
    with pytest.raises(CopyFailed, match="failed in part 1 \\('part 0'\\) of 1"):
        ticket.result()


def test_an_error_without_frames_says_where_it_was_raised():
    def deep():
        raise KeyError("inner")

    try:
        try:
            deep()
        except KeyError as inner:
            raise OSError("outer") from inner
    except OSError as error:
        kept = without_frames(error)
    assert isinstance(kept, OSError)
    for chained in (kept, kept.__cause__):
        assert chained.__traceback__ is None
    assert "in deep" in kept.__cause__.__notes__[0]
    assert "test_tickets.py" in kept.__notes__[0]


def test_an_error_that_is_its_own_cause_loses_its_frames_too():
    try:
        try:
            raise KeyError("first")
        except KeyError as first:
            try:
                raise OSError("second") from first
            except OSError:
                raise first  # noqa: B904 (its context is what it caused)
    except KeyError as error:
        kept = without_frames(error)
    assert kept.__context__.__cause__ is kept, "the chain is meant to be a ring"
    assert kept.__traceback__ is kept.__context__.__traceback__ is None
    assert len(kept.__notes__) == len(kept.__context__.__notes__) == 1
