"""The words of the demo's world: who, what they have, and what else is talked about.

Names begin with a capital letter and are one token each; attributes and values are one token each with the space in
front of them (``build_tokenizer.py`` sees to it), so that a fact is a handful of adjacent tokens.
"""

from __future__ import annotations

__all__ = [
    "ATTRIBUTES",
    "CODE_WORDS",
    "COUNTED",
    "FILLERS",
    "FILLER_WORDS",
    "NAMES",
    "NUMBERS",
    "VALUES",
]

NAMES = tuple(
    "Ana Ben Carla David Elena Felix Grace Hugo Ines Jonas Karin Leo Maria Nils Olga Pablo Quinn Rosa Samir"
    " Tara".split()
)

NUMBERS = tuple(str(number) for number in range(100))

# What a person may have one of, with the values it takes.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys("locker room seat desk ticket bus table gate".split(), NUMBERS),
    "colour": tuple("red blue green yellow white black orange purple brown grey".split()),
    "pet": tuple("cat dog horse rabbit parrot turtle hamster goldfish pony lizard".split()),
    "drink": tuple("tea coffee milk water juice cocoa lemonade soda cider syrup".split()),
    "fruit": tuple("apple pear plum cherry peach melon grape lemon banana fig".split()),
}

# What a person may have a few of, 0 to 9, so that two people's can be added.
COUNTED = tuple("coins books pens cards".split())

CODE_WORDS = tuple(
    "falcon maple copper lantern anchor meadow pepper saturn velvet walnut harbour compass glacier marble comet"
    " willow ember canyon tulip beacon".split()
)

# Whatever only the conversation itself can tell.
VALUES = frozenset((*CODE_WORDS, *(value for values in ATTRIBUTES.values() for value in values)))

# Talk that tells nothing; {} takes a word of the list of that name.
FILLERS = (
    "The {noun} near the {noun} was {mood} today.",
    "{name} walked to the {noun} and came back {mood}.",
    "Later the {noun} looked {mood}, and nobody knew why.",
    "There is a {mood} {noun} behind the {noun}.",
    "{name} and {name} talked about the {noun}.",
    "It rained on the {noun} again.",
    "We painted the {noun} and the {noun}.",
    "Please remember what I say about the {noun}.",
    "Perhaps {name} will visit the {noun} with us.",
    "A {mood} {noun} is better than a {mood} {noun}.",
)
FILLER_WORDS: dict[str, tuple[str, ...]] = {
    "noun": tuple(
        "river bridge garden market station library mountain window kitchen letter camera violin engine school"
        " village tower forest island valley museum".split()
    ),
    "mood": tuple("quiet busy new small large cold warm bright dark strange".split()),
}
