"""Prompts as the index sees them: int32 bytes, the hash of every full block, the extra key of every block.

Everything here is pure and may run on any thread: the part of a look-up that belongs off the worker thread.
"""

from __future__ import annotations

import bisect
import operator
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import xxhash

from prefix_index.errors import InvalidArgument

TOKEN_BYTES = 4
RUN_BLOCKS = 128  # the largest piece of tokens an edge keeps: appending or cutting copies up to one
_INTEGER_FORMATS = frozenset("bBhHiIlLqQ")

Hasher = Callable[[int, bytes, int], int]
"""(parent hash, token bytes, extra) -> hash of the block, 64 bits."""

TokenInput = Any
"""A sequence of ints, int32 little-endian `bytes`, or an integer buffer such as a numpy array or `array.array`."""


def xxh3_block_hash(parent: int, tokens: bytes, extra: int) -> int:
    """The hash of a block: xxh3_64 over its token bytes, seeded with its parent's hash.

    A nonzero extra key follows the tokens as eight little-endian bytes. Frozen: it is written into files and events.
    """
    if extra:
        tokens += extra.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(tokens, parent)


def namespace_hash(namespace: bytes) -> int:
    """The hash a namespace's first blocks are chained from."""
    return xxhash.xxh3_64_intdigest(namespace, 0x6E616D657370616E)


def token_bytes(op: str, tokens: TokenInput) -> bytes:
    """`tokens` as little-endian int32 bytes; `bytes` are taken as they are, without a copy.

    Raises:
        InvalidArgument: a token does not fit into an int32, or the byte length is no multiple of four.
    """
    if isinstance(tokens, bytes):
        data = tokens
    else:
        try:
            view = memoryview(tokens)
        except TypeError:
            return _from_ints(op, tokens)
        if view.ndim != 1:
            raise InvalidArgument(f"{op}: a token buffer must be one-dimensional, got {view.ndim} dimensions")
        if view.format == "B" or (
            view.itemsize == TOKEN_BYTES and view.format in ("i", "l") and sys.byteorder == "little"
        ):
            data = view.tobytes()
        elif view.format in _INTEGER_FORMATS:
            return _from_ints(op, view.tolist())
        else:
            raise InvalidArgument(f"{op}: a token buffer must hold integers, got {view.format!r}")
    if len(data) % TOKEN_BYTES:
        raise InvalidArgument(f"{op}: token bytes must come in groups of 4, got {len(data)} bytes")
    return data


def namespace_bytes(op: str, namespace: Any) -> bytes:
    """`namespace` as bytes.

    A namespace may come from a secret, so no error repeats its value.

    Raises:
        InvalidArgument: it is no buffer. An int would become that many zeros.
    """
    if isinstance(namespace, bytes):
        return namespace
    try:
        return bytes(memoryview(namespace))
    except TypeError:
        raise InvalidArgument(f"{op}: a namespace must be bytes, got {type(namespace).__name__}") from None


def _from_ints(op: str, tokens: Iterable[int]) -> bytes:
    try:
        values = array("i", tokens)
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(f"{op}: tokens must be ints within int32, got {error}") from None
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


class Extras:
    """Sorted (first token, cumulative key) pairs. The extra of a prefix is the last key that starts before its end."""

    __slots__ = ("_firsts", "pairs")

    pairs: tuple[tuple[int, int], ...]

    def __init__(self, op: str, pairs: Iterable[tuple[int, int]]) -> None:
        try:
            self.pairs = tuple((operator.index(first), operator.index(key)) for first, key in pairs)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{op}: extras must be pairs of ints, got {error}") from None
        self._firsts = [first for first, _ in self.pairs]
        previous = -1
        for first, key in self.pairs:
            if first <= previous:
                raise InvalidArgument(f"{op}: extras must be sorted by first token, got {first} after {previous}")
            if not 0 < key < 1 << 64:
                raise InvalidArgument(f"{op}: an extra key must be between 1 and 2**64 - 1, got {key}")
            previous = first

    def at(self, frontier: int) -> int:
        """The extra of the prefix of `frontier` tokens; 0 before the first item."""
        count = bisect.bisect_left(self._firsts, frontier)
        return self.pairs[count - 1][1] if count else 0

    def of_blocks(self, start: int, end: int, block_tokens: int) -> tuple[int, ...] | None:
        """The extras of the blocks [start, end), or None when all of them are 0."""
        pairs = self.pairs
        if not pairs or pairs[0][0] >= end * block_tokens:
            return None
        found = []
        position = 0
        extra = 0
        for block in range(start, end):
            limit = (block + 1) * block_tokens
            while position < len(pairs) and pairs[position][0] < limit:
                extra = pairs[position][1]
                position += 1
            found.append(extra)
        return tuple(found) if any(found) else None


NO_EXTRAS = Extras("prepare", ())


class Prompt:
    """A prepared prompt. Immutable; made by `PrefixIndex.prepare`.

    It can be used with every index of the same block size and hash.
    """

    __slots__ = ("_block_extras", "_extras", "_hashes", "_namespace", "_num_tokens", "_scheme", "_tokens")

    def __init__(self, scheme: BlockScheme, tokens: bytes, namespace: bytes, extras: Extras) -> None:
        self._scheme = scheme
        self._tokens = tokens
        self._num_tokens = len(tokens) // TOKEN_BYTES
        self._namespace = namespace
        self._extras = extras
        num_blocks = self._num_tokens // scheme.block_tokens
        self._block_extras = extras.of_blocks(0, num_blocks, scheme.block_tokens)
        self._hashes = tuple(
            scheme.chain(namespace_hash(namespace), tokens[: num_blocks * scheme.block_bytes], self._block_extras)
        )

    @property
    def tokens(self) -> bytes:
        """The prompt as little-endian int32 bytes."""
        return self._tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._num_tokens

    @property
    def namespace(self) -> bytes:
        """The isolation domain."""
        return self._namespace

    @property
    def extras(self) -> tuple[tuple[int, int], ...]:
        """The (first token, cumulative key) pairs."""
        return self._extras.pairs

    @property
    def hashes(self) -> tuple[int, ...]:
        """One chained hash per full block, the namespace and the extras included."""
        return self._hashes

    def __repr__(self) -> str:
        namespace = namespace_hash(self._namespace)
        return f"Prompt({self._num_tokens} tokens, namespace {namespace:016x}, extras={self._extras.pairs!r})"


class BlockScheme:
    """Block size and hash: what prompts and indexes must agree on."""

    __slots__ = ("block_bytes", "block_tokens", "hasher", "run_bytes", "split")

    def __init__(self, block_tokens: int, hasher: Hasher) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_tokens * TOKEN_BYTES
        self.run_bytes = RUN_BLOCKS * self.block_bytes
        self.hasher = hasher
        self.split = struct.Struct(f"{self.block_bytes}s").iter_unpack

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockScheme) and (self.block_tokens, self.hasher) == (other.block_tokens, other.hasher)

    __hash__ = None  # type: ignore[assignment]

    def chain(self, parent: int, tokens: bytes, extras: Sequence[int] | None) -> list[int]:
        """The hashes of consecutive blocks below the block hashed `parent`. `tokens` are whole blocks."""
        hashed = parent
        if extras is None and self.hasher is xxh3_block_hash:
            digest = xxhash.xxh3_64_intdigest
            return [hashed := digest(block, hashed) for (block,) in self.split(tokens)]
        hasher = self.hasher
        if extras is None:
            return [hashed := hasher(hashed, block, 0) for (block,) in self.split(tokens)]
        return [
            hashed := hasher(hashed, block, extra) for (block,), extra in zip(self.split(tokens), extras, strict=True)
        ]
