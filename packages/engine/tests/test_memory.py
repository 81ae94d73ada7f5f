"""Free lists: lowest first, nothing twice, nothing lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen35_engine import OptionError
from qwen35_engine.memory import IdPool, _arena


def test_the_scratch_id_is_never_handed_out() -> None:
    pool = IdPool("pages", 5)
    assert pool.capacity == len(pool) == 4
    assert pool.take(4) == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="pages: 1 wanted, 0 free"):
        pool.take(1)
    with pytest.raises(RuntimeError, match="pages: id 0 was not taken"):
        pool.give_back([0])


@pytest.mark.parametrize("ids", [[2, 3], [1, 1], [5], [-1]])
def test_a_refused_return_returns_nothing(ids: list[int]) -> None:
    pool = IdPool("pages", 5)
    pool.take(2)
    pool.give_back([2])
    with pytest.raises(RuntimeError, match="pages: id"):
        pool.give_back(ids)
    assert len(pool) == 3
    assert pool.take(3) == [2, 3, 4]


def test_a_refused_take_takes_nothing() -> None:
    pool = IdPool("pages", 4)
    with pytest.raises(RuntimeError):
        pool.take(4)
    assert pool.take(3) == [1, 2, 3]


@given(st.lists(st.integers(min_value=0, max_value=6), max_size=40), st.randoms(use_true_random=False))
def test_takes_are_the_lowest_free_ids(counts: list[int], rng: object) -> None:
    pool = IdPool("pages", 12)
    free, taken = set(range(1, 12)), set()
    for count in counts:
        if count <= len(free) and count % 2:
            ids = pool.take(count)
            assert ids == sorted(free)[:count]
            free -= set(ids)
            taken |= set(ids)
        else:
            ids = rng.sample(sorted(taken), min(count, len(taken)))  # type: ignore[attr-defined]
            pool.give_back(ids)
            taken -= set(ids)
            free |= set(ids)
        assert len(pool) == len(free)


def test_memory_that_is_not_there_is_reported_with_its_size() -> None:
    with pytest.raises(OptionError, match=r"KV pages: 1000000000000 x 1048576 bytes \(\d+ MiB\) do not fit on cpu"):
        _arena("KV pages", 10**12, 2**20, torch.device("cpu"))
