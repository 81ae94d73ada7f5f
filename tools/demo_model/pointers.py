"""Where an answer stands: for every place at which a value is due, the places that hold it.

``Ana has locker`` is followed by what Ana's locker was last said to be, wherever that was. The generator's sentences
are regular enough to read this off the token ids, which is what ``teaching.py`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rendering import Encoder
from words import ATTRIBUTES, COUNTED, NAMES, VALUES

__all__ = ["NOWHERE", "Pointer", "Pointers"]

NOWHERE = 0
"""What was never told is looked for at the first token, which tells nothing."""


@dataclass(frozen=True)
class Pointer:
    """After the token at ``at`` comes what stands at each of ``sources``, or, at ``NOWHERE``, something new.

    ``key`` are the ids of who and what is asked for; a code word has none.
    """

    at: int
    sources: tuple[int, ...]
    key: tuple[int, int] | None


class Pointers:
    """Finds the pointers of a sequence. ``names`` and ``attributes`` are the token ids that keys are made of."""

    def __init__(self, encoder: Encoder) -> None:
        def first(texts: Sequence[str]) -> set[int]:
            return {encoder.encode(text)[0] for text in texts}

        self.names = first(NAMES)
        self.attributes = first([f" {word}" for word in (*ATTRIBUTES, *COUNTED, "age")])
        self._values = first([f" {value}" for value in VALUES])
        (self._has,), (self._word,), (self._is,) = map(encoder.encode, (" has", " word", " is"))

    def __call__(self, ids: Sequence[int]) -> list[Pointer]:
        """Of token ids of one sequence, in order."""
        # By key, the last value and where it has stood since.
        told: dict[tuple[int, int] | None, tuple[int, list[int]]] = {}
        found: list[Pointer] = []
        key: tuple[int, int] | None
        for at in range(2, len(ids) - 1):
            if ids[at - 1] == self._has and ids[at] in self.attributes and ids[at - 2] in self.names:
                key = ids[at - 2], ids[at]
            elif ids[at - 1] == self._word and ids[at] == self._is:
                key = None
            else:
                continue
            value, places = told.get(key, (None, [NOWHERE]))
            found.append(Pointer(at, tuple(places), key))
            following = ids[at + 1]
            if following == value:
                places.append(at + 1)
            elif following in self._values:
                told[key] = following, [at + 1]
        return found
