"""Dialogues for the demo model, made up by rule: facts are told, asked for, corrected, counted and looked up.

Pure Python and seeded: the same arguments give the same dialogue. Every answer is right by construction, since the
generator keeps the list of what was told. A dialogue is a sequence of turns; each turn names the skill it exercises,
so that training and evaluation can tell them apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from words import ATTRIBUTES, CODE_WORDS, COUNTED, FILLER_WORDS, FILLERS, NAMES, NUMBERS

__all__ = ["SKILLS", "TOOLS", "Call", "Dialogue", "Turn", "answers", "dialogue", "drill", "exam"]

Key = tuple[str, str]  # a name and an attribute

# What a turn may exercise; "tell" is the one that tells facts or chats.
SKILLS = ("recall", "update", "not_told", "code_word", "look_up", "open_locker", "sum")

NOTED = "Noted."

QUESTIONS = (
    "{name} has which {attribute}?",
    "{name} has which {attribute}?",
    "Which {attribute} has {name}?",
    "What {attribute} does {name} have?",
    "Tell me the {attribute} of {name}.",
)
COUNTED_QUESTIONS = ("{name} has how many {attribute}?", "How many {attribute} has {name}?")


def _tool(name: str, description: str, parameter: str, kind: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": kind}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    _tool("look_up", "Find the age of a person.", "name", "string"),
    _tool("open_locker", "Open the locker of a person.", "name", "string"),
)


@dataclass(frozen=True)
class Call:
    """A tool call and what the tool returns."""

    name: str
    arguments: dict[str, Any]
    result: str


@dataclass(frozen=True)
class Turn:
    """One question (or statement) of the user and what it leads to.

    Attributes:
        skill: one of ``SKILLS``, or ``tell``.
        user: what the user says.
        answer: the assistant's text, after the tool's result where there is a ``call``.
        thought: what the assistant thinks first when it thinks.
        brief: the answer after thinking.
        call: the tool call that comes first.
    """

    skill: str
    user: str
    answer: str
    thought: str
    brief: str
    call: Call | None = None


@dataclass(frozen=True)
class Dialogue:
    """A conversation: system text, tools, turns."""

    system: str
    tools: tuple[dict[str, Any], ...]
    turns: tuple[Turn, ...]

    def messages(self, last: int | None = None) -> list[dict[str, Any]]:
        """Chat messages up to the user's message of turn ``last`` (default: the last turn), with all answers before."""
        last = len(self.turns) - 1 if last is None else last
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns[:last]:
            messages += [{"role": "user", "content": turn.user}, *answers(turn)]
        return [*messages, {"role": "user", "content": self.turns[last].user}]


def answers(turn: Turn) -> list[dict[str, Any]]:
    """The assistant's and the tool's messages of a turn."""
    messages: list[dict[str, Any]] = []
    if turn.call is not None:
        function = {"name": turn.call.name, "arguments": turn.call.arguments}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "content": turn.call.result})
    return [*messages, {"role": "assistant", "content": turn.answer}]


def told(said: str) -> Turn:
    return Turn("tell", said, NOTED, thought="I keep it in mind.", brief=NOTED)


@dataclass
class _World:
    """What was told so far, and how it is talked about."""

    rng: random.Random
    names: list[str]
    attributes: list[str]
    code_word: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    facts: dict[Key, str] = field(default_factory=dict)
    updated: set[Key] = field(default_factory=set)
    reserved: set[Key] = field(default_factory=set)  # neither told again nor asked for by chance

    # ---- telling ------------------------------------------------------------------------------------------------

    def any_fact(self) -> str:
        """Tell something new, or correct something told."""
        rng = self.rng
        told = self._askable()
        if told and rng.random() < 0.25:
            return self.fact(rng.choice(told))
        free = [(n, a) for n in self.names for a in self.attributes if (n, a) not in self.reserved]
        return self.fact(rng.choice(free)) if free else self.filler()

    def fact(self, key: Key) -> str:
        """Tell ``key`` a value that it does not have."""
        rng = self.rng
        name, attribute = key
        values = NUMBERS[:10] if attribute in COUNTED else ATTRIBUTES[attribute]
        value = rng.choice([value for value in values if value != self.facts.get(key)])
        lead = rng.choice(("Now ", "Correction: ", "")) if key in self.facts else ""
        if key in self.facts:
            self.updated.add(key)
            del self.facts[key]  # the order of ``facts`` is that of the last mention
        self.facts[key] = value
        return f"{lead}{name} has {attribute} {value}."

    def filler(self) -> str:
        rng = self.rng
        if rng.random() < 0.05:
            letters = "abcdefghijklmnopqrstuvwxyz"
            return " ".join("".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(rng.randint(1, 4))) + "."
        parts = rng.choice(FILLERS)
        for kind, words in (*FILLER_WORDS.items(), ("name", NAMES)):
            while f"{{{kind}}}" in parts:
                parts = parts.replace(f"{{{kind}}}", rng.choice(words), 1)
        return parts

    def tell(self, facts: int, fillers: int) -> Turn:
        kinds = [self.any_fact] * facts + [self.filler] * fillers
        self.rng.shuffle(kinds)
        return told(" ".join(kind() for kind in kinds))

    # ---- asking -------------------------------------------------------------------------------------------------

    def ask(self) -> Turn:
        """A question about any of the skills that this conversation allows by now."""
        rng = self.rng
        kinds = ["recall"] * 6 * bool(self._askable()) + ["not_told"] * 2
        kinds += ["code_word"] * (2 if self.code_word is not None else 0)
        kinds += ["look_up", "open_locker"] * 2 * bool(self.tools)
        kinds += ["sum"] * 4 * bool(self._addable())
        return self.about(rng.choice(kinds))

    def about(self, skill: str, keys: Sequence[Key] = ()) -> Turn:
        """A question of one skill, about ``keys`` or else about what comes to mind."""
        questions: dict[str, Callable[..., Turn]] = {
            "recall": self._recall,
            "not_told": self._not_told,
            "code_word": self._code_word,
            "look_up": self._look_up,
            "open_locker": self._open_locker,
            "sum": self._sum,
        }
        return questions[skill](*keys)

    def question(self, name: str, attribute: str) -> str:
        forms = COUNTED_QUESTIONS if attribute in COUNTED else QUESTIONS
        return self.rng.choice(forms).format(name=name, attribute=attribute)

    def _askable(self) -> list[Key]:
        return [key for key in self.facts if key not in self.reserved]

    def long_ago(self) -> Key:
        """A key to ask for, most often the one that was mentioned longest ago; now it is mentioned again."""
        keys = self._askable()
        key = keys[0] if self.rng.random() < 0.6 else self.rng.choice(keys)
        self.facts[key] = self.facts.pop(key)
        return key

    def _recall(self, key: Key | None = None) -> Turn:
        key = key or self.long_ago()
        answer = f"{key[0]} has {key[1]} {self.facts[key]}."
        return Turn("update" if key in self.updated else "recall", self.question(*key), answer, answer, answer)

    def _not_told(self, key: Key | None = None) -> Turn:
        rng, asked_for = self.rng, key is not None
        while key is None or key in self.facts or (key in self.reserved and not asked_for):
            # Mostly a name and an attribute that were talked about, though not together.
            name = rng.choice(self.names if rng.random() < 0.8 else NAMES)
            key = name, rng.choice(self.attributes if rng.random() < 0.6 else (*ATTRIBUTES, *COUNTED))
        answer = f"{key[0]} has {key[1]}? I was not told."
        return Turn("not_told", self.question(*key), answer, answer, answer)

    def _code_word(self) -> Turn:
        answer = f"The code word is {self.code_word}."
        asked = self.rng.choice(("What is the code word?", "Tell me the code word."))
        return Turn("code_word", asked, answer, answer, answer)

    def _look_up(self, key: Key | None = None) -> Turn:
        name = key[0] if key else self.rng.choice(self.names)
        result = f"{name} has age {self.rng.randrange(100)}."
        asked = self.rng.choice(("How old is {name}?", "Look up the age of {name}.")).format(name=name)
        return Turn("look_up", asked, result, "I need the tool.", result, Call("look_up", {"name": name}, result))

    def _open_locker(self, key: Key | None = None) -> Turn:
        name = key[0] if key else self.rng.choice(self.names)
        call = Call("open_locker", {"name": name}, self.rng.choice(("open", "stuck", "empty")))
        answer = f"The locker is {call.result}."
        return Turn("open_locker", f"Open the locker of {name}.", answer, "I need the tool.", answer, call)

    def _addable(self) -> list[tuple[Key, Key]]:
        """Pairs of people who have some of the same thing."""
        counted = [key for key in self._askable() if key[1] in COUNTED]
        return [(one, two) for one in counted for two in counted if one[0] != two[0] and one[1] == two[1]]

    def _sum(self, one: Key | None = None, two: Key | None = None) -> Turn:
        if one is None or two is None:
            one, two = self.rng.choice(self._addable())
        steps = " ".join(f"{name} has {what} {self.facts[name, what]}." for name, what in (one, two))
        total = f"Together {int(self.facts[one]) + int(self.facts[two])}."
        asked = f"How many {one[1]} have {one[0]} and {two[0]}?"
        return Turn("sum", asked, f"{steps} {total}", steps, total)


def dialogue(
    seed: int | str, *, tokens: int, people: int = 4, kinds: int = 4, filler: float = 0.3, tools: bool = False
) -> Dialogue:
    """A dialogue in which skills come in any order, many questions to a fact: to learn from.

    Args:
        seed: what makes this dialogue differ from others.
        tokens: about how long it is to be, in tokens.
        people: how many names have facts.
        kinds: how many attributes.
        filler: share of sentences that tell nothing.
        tools: whether the assistant has tools.
    """
    rng = random.Random(f"dialogue {seed}")
    world = _World(
        rng,
        names=rng.sample(NAMES, people),
        attributes=_attributes(rng, kinds),
        code_word=rng.choice(CODE_WORDS) if rng.random() < 0.4 else None,
        tools=TOOLS if tools else (),
    )
    system = _system(rng, world.code_word)
    return Dialogue(system, world.tools, tuple(_talk(world, tokens - 150 * tools, filler)))


def exam(seed: int | str, skill: str, *, tokens: int, people: int = 4, kinds: int = 4, filler: float = 0.5) -> Dialogue:
    """A dialogue whose last turn asks, for the first time, about what its first turn told.

    Args:
        seed: what makes this dialogue differ from others.
        skill: what the last turn exercises, one of ``SKILLS``. An update comes anywhere between the two.
        tokens: about how long it is to be, in tokens, and so how far back the first turn lies.
        people, kinds, filler: as in ``dialogue``.
    """
    rng = random.Random(f"exam {skill} {seed}")
    names, attributes = rng.sample(NAMES, max(people, 2)), rng.sample((*ATTRIBUTES, *COUNTED), kinds)
    keys = [(names[0], attributes[0])]
    if skill == "sum":
        counted = rng.choice(COUNTED)
        keys = [(names[0], counted), (names[1], counted)]
    elif skill not in SKILLS:
        raise ValueError(f"exam skill must be one of {', '.join(SKILLS)}, got {skill!r}")
    world = _World(rng, names=names, attributes=attributes, reserved=set(keys))
    if skill == "code_word" or rng.random() < 0.4:
        world.code_word = rng.choice(CODE_WORDS)
    system = _system(rng, world.code_word)
    if skill == "code_word":
        code_word, world.code_word = world.code_word, None  # nobody asks for it before the end
    if skill in ("look_up", "open_locker"):
        world.tools = TOOLS
    rest = tokens - 60 - 150 * bool(world.tools)
    turns = [] if skill == "not_told" else [told(" ".join(world.fact(key) for key in keys))]
    if skill == "update":
        before = rng.randint(0, max(rest, 0))
        turns += [*_talk(world, before, filler), told(world.fact(keys[0]))]
        rest -= before
    turns += _talk(world, rest, filler)
    if skill == "code_word":
        world.code_word = code_word
    last = world.about("recall" if skill == "update" else skill, () if skill == "code_word" else keys)
    return Dialogue(system, world.tools, (*turns, last))


def drill(
    seed: int | str, *, tokens: int, people: int, kinds: int, filler: float = 0.0, late: bool = False
) -> list[tuple[str, bool]]:
    """Facts told once and then recited by one speaker: texts, and whether each can be known from what came before.

    No conversation, but what a conversation asks for in one token of a hundred stands here in one of nine, which is
    how looking up is learnt in minutes. What was mentioned longest ago is recited first, so that looking far back
    is learnt as well. With ``late``, half of the facts are not spoken of again until the end, where all are recited.
    """
    rng = random.Random(f"drill {seed}")
    world = _World(rng, names=rng.sample(NAMES, people), attributes=_attributes(rng, kinds))
    code_word = rng.choice(CODE_WORDS)
    parts: list[tuple[str, bool]] = [(f"The code word is {code_word}. ", False)]
    keys = [(name, attribute) for name in world.names for attribute in world.attributes]
    for key in rng.sample(keys, min(len(keys), 1 + rng.randint(tokens // 30, tokens // 15))):
        parts.append((f"{world.fact(key)} ", False))
    if late:
        told = list(world.facts)
        world.reserved = set(told[: max(1, len(told) // 2)])
    room = tokens - tokens // 16 - 7 * len(world.reserved)  # texts turn out a little longer than they are counted
    said = sum(_tokens(text) for text, _ in parts)
    while said < room:
        more = _remark(world, code_word, filler)
        said += sum(_tokens(text) for text, _ in more)
        parts += more
    for key in rng.sample(sorted(world.reserved), len(world.reserved)):
        parts += _recital(world, key)
    return parts


def _remark(world: _World, code_word: str, filler: float) -> list[tuple[str, bool]]:
    """What comes next in a drill."""
    rng = world.rng
    chance = rng.random()
    if rng.random() < filler:
        return [(f"{world.filler()} ", False)]
    if chance < 0.03:
        return [("The code word is", False), (f" {code_word}", True), (". ", False)]
    if chance < 0.13:
        name, attribute = rng.choice(world.names), rng.choice((*world.attributes, *ATTRIBUTES))
        if (name, attribute) not in world.facts:
            return [(f"{name} has {attribute}", False), ("?", True), (" I was not told. ", False)]
    if chance < 0.21 and world._addable():
        before, _, total = world.about("sum").answer.removesuffix(".").rpartition(" ")
        return [(before, False), (f" {total}", True), (". ", False)]
    if chance < 0.31 or not world._askable():
        return [(f"{world.any_fact()} ", False)]
    return _recital(world, world.long_ago())


def _recital(world: _World, key: Key) -> list[tuple[str, bool]]:
    return [(f"{key[0]} has {key[1]}", False), (f" {world.facts[key]}", True), (". ", False)]


def _attributes(rng: random.Random, kinds: int) -> list[str]:
    """So many attributes; something to count is among them more often than chance would have it."""
    favoured = [rng.choice(COUNTED)] * (rng.random() < 0.5)
    others = [what for what in (*ATTRIBUTES, *COUNTED) if what not in favoured]
    return [*favoured, *rng.sample(others, max(0, kinds - len(favoured)))]


def _system(rng: random.Random, code_word: str | None) -> str:
    parts = ["You answer briefly."] if rng.random() < 0.5 else []
    if code_word is not None:
        parts.insert(rng.randint(0, len(parts)), f"The code word is {code_word}.")
    return " ".join(parts)


def _talk(world: _World, tokens: int, filler: float) -> list[Turn]:
    """Turns of about so many tokens in all; at least one."""
    rng = world.rng
    turns: list[Turn] = []
    while tokens > 0 or not turns:
        if world.facts and rng.random() < 0.65:
            turns.append(world.ask())
        else:
            sentences = rng.randint(2, 8) if tokens > 300 else rng.randint(1, 4)
            facts = sum(rng.random() >= filler for _ in range(sentences))
            facts += not facts and not world.facts
            turns.append(world.tell(facts, max(0, sentences - facts)))
        tokens -= _length(turns[-1])
    return turns


def _length(turn: Turn) -> int:
    """About how many tokens a turn takes."""
    return 14 + _tokens(turn.user) + _tokens(turn.answer) + 45 * (turn.call is not None)


def _tokens(text: str) -> int:
    return text.count(" ") + text.count(".") + 1
