"""Prompts: inputs, hashes, extras."""

from __future__ import annotations

import math
from array import array

import pytest
import xxhash

from prefix_index import InvalidArgument, PrefixIndex, PrefixIndexError, xxh3_block_hash

INDEX = PrefixIndex(block_tokens=4)
TOKENS = list(range(-3, 10))
FROZEN = (2606357649302680233, 4371151723527413237)


def test_every_kind_of_input_gives_the_same_prompt() -> None:
    expected = array("i", TOKENS).tobytes()
    views = (expected, bytearray(expected), memoryview(expected), array("i", TOKENS), array("q", TOKENS))
    for given in (TOKENS, tuple(TOKENS), *views):
        prompt = INDEX.prepare(given)
        assert prompt.tokens == expected
        assert prompt.num_tokens == 13
    assert INDEX.prepare(expected).tokens is expected


def test_the_hash_is_frozen() -> None:
    """Files and events carry it: xxh3_64 of the block's bytes, seeded with the parent's hash, the extra behind them."""
    prompt = INDEX.prepare(range(8), b"tenant", extras=((5, 9),))
    seed = xxhash.xxh3_64_intdigest(b"tenant", 0x6E616D657370616E)
    first = xxhash.xxh3_64_intdigest(array("i", range(4)).tobytes(), seed)
    second = xxhash.xxh3_64_intdigest(array("i", range(4, 8)).tobytes() + (9).to_bytes(8, "little"), first)
    assert prompt.hashes == (first, second) == FROZEN
    assert xxh3_block_hash(seed, array("i", range(4)).tobytes(), 0) == first


def test_a_change_shows_in_its_own_and_every_later_hash() -> None:
    plain = INDEX.prepare(range(16)).hashes
    edited = INDEX.prepare([*range(5), 99, *range(6, 16)]).hashes
    assert [a == b for a, b in zip(plain, edited, strict=True)] == [True, False, False, False]
    media = INDEX.prepare(range(16), extras=((9, 4),)).hashes
    assert [a == b for a, b in zip(plain, media, strict=True)] == [True, True, False, False]


def test_an_extra_counts_from_the_block_its_item_begins_in() -> None:
    prompt = INDEX.prepare(range(16), extras=((3, 4), (8, 5)))
    assert prompt._block_extras == (4, 4, 5, 5)
    assert [prompt._extras.at(frontier) for frontier in (0, 3, 4, 8, 9)] == [0, 0, 4, 4, 5]


def test_bad_prompts_are_refused() -> None:
    for extras in (((3, 1), (2, 1)), ((-1, 1),), ((3, 0),), ((3, 1 << 64),)):
        with pytest.raises(InvalidArgument, match="prepare"):
            INDEX.prepare(TOKENS, extras=extras)
    with pytest.raises(InvalidArgument, match="int32"):
        INDEX.prepare(["a"])
    with pytest.raises(InvalidArgument, match="buffer"):
        INDEX.prepare(array("d", [1.0]))
    for shape in ((2, 2), ()):
        whole = memoryview(bytes(16 if shape else 4))
        with pytest.raises(InvalidArgument, match=f"one-dimensional, got {len(shape)} dimensions"):
            INDEX.prepare(whole.cast("i", shape))
    for pairs in (((1.7, 2),), (("1", "2"),), ((1, math.nan),), ((1,),)):
        with pytest.raises(InvalidArgument, match="extras must be pairs of ints"):
            INDEX.prepare(TOKENS, extras=pairs)
    prompt = INDEX.prepare(TOKENS)
    with pytest.raises(InvalidArgument, match="spans must be pairs of ints"):
        INDEX.match(prompt, exclude=[(1, math.inf)])  # type: ignore[list-item]


@pytest.mark.parametrize("namespace", [0, 3, "tenant", None])
def test_a_namespace_that_is_no_bytes_is_refused_where_it_is_named(namespace: object) -> None:
    """A number would be as many zeros: 0 the namespace of all prompts that name none."""
    uses = [lambda name: INDEX.prepare(TOKENS, name), INDEX.holds, *([INDEX.clear] if namespace is not None else [])]
    for use in uses:
        with pytest.raises(InvalidArgument, match="a namespace must be bytes, got"):
            use(namespace)
    assert INDEX.prepare(TOKENS, bytearray(b"a")).namespace == b"a"


def test_a_namespace_is_not_repeated() -> None:
    """It may come from a tenant's secret."""
    index, secret = PrefixIndex(block_tokens=4), b"salted secret"
    prompt = index.prepare(TOKENS, secret)
    assert "secret" not in repr(prompt)
    index.acquire(index.match(prompt))
    for use in (lambda: index.clear(secret), lambda: index.holds("secret")):  # type: ignore[arg-type]
        with pytest.raises(PrefixIndexError) as caught:
            use()
        assert "secret" not in str(caught.value)
