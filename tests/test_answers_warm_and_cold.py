"""Wrong reuse would be a wrong answer: four conversations about the same people, on the demo model.

Each conversation tells other facts about the same names and asks for them, so that a page, a state or a tail of another
conversation, or of an earlier moment of this one, gives a wrong value. What is told apart here by meaning is told apart
elsewhere by log-probabilities; this cannot be hidden by any tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from lanes import collect
from qwen35_engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from qwen35_engine.demo import demo_folder
from qwen35_serve.text import ChatPrompt, ChatText

NAMES = ("Ana", "Ben", "Carla", "David")
ATTRIBUTE = "locker"
NUM_CONVERSATIONS = 4


@dataclass(frozen=True)
class Question:
    """A prompt, the right value, and all values that only other conversations know."""

    messages: list[dict[str, str]]
    right: str
    foreign: frozenset[str]


def conversations(seed: int) -> list[list[Question]]:
    """For each conversation its questions in order: about what it told first, then about what it corrected."""
    rng = random.Random(seed)
    # For each conversation and name a value to tell first and one to correct it with, no value twice.
    count = 2 * len(NAMES)
    values = [str(number) for number in rng.sample(range(10, 100), count * NUM_CONVERSATIONS)]
    made = []
    for one in range(NUM_CONVERSATIONS):
        own = values[count * one : count * (one + 1)]
        told = dict(zip(NAMES, own[: len(NAMES)], strict=True))
        corrected = dict(zip(NAMES, own[len(NAMES) :], strict=True))
        foreign = frozenset(values) - frozenset(own)
        messages: list[dict[str, str]] = []

        def say(text: str, answer: str, messages: list[dict[str, str]] = messages) -> None:
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

        questions = []
        say(" ".join(f"{name} has {ATTRIBUTE} {told[name]}." for name in NAMES), "Noted.")
        for turn, name in enumerate([*rng.sample(NAMES, 4), *rng.sample(NAMES, 4)]):
            if turn >= len(NAMES):
                told[name] = corrected[name]
                say(f"Now {name} has {ATTRIBUTE} {told[name]}.", "Noted.")
            asked = f"{name} has which {ATTRIBUTE}?"
            questions.append(Question([*messages, {"role": "user", "content": asked}], told[name], foreign))
            say(asked, f"{name} has {ATTRIBUTE} {told[name]}.")
        made.append(questions)
    return made


class Talk:
    """An engine over the demo checkpoint that is asked in words."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.cached_tokens = 0
        self._text = ChatText(demo_folder(), vocab_size=engine.config.vocab_size)

    def render(self, question: Question) -> ChatPrompt:
        return self._text.render(question.messages, tools=None, template_arguments={"enable_thinking": False})

    def ask(self, *questions: Question, explicit: Sequence[int] = ()) -> list[str]:
        """Ask all at once, with snapshots wanted at the ``explicit`` positions; the answers."""
        prompts = [self.render(one) for one in questions]
        streams = [
            self.engine.submit(
                GenerationRequest(
                    tokens=prompt.tokens,
                    sampling=SamplingParams(temperature=0),
                    max_tokens=16,
                    stop_token_ids=self.engine.config.eos_token_ids,
                    hints=replace(prompt.hints, explicit=tuple(explicit)),
                )
            )
            for prompt in prompts
        ]
        answers = []
        for stream in streams:
            ids, usage = collect(stream)
            self.cached_tokens += usage.cached_tokens
            answers.append(self._text.decoder().feed(ids))
        return answers


@pytest.fixture(scope="module")
def asked() -> list[list[Question]]:
    return conversations(seed=5)


@pytest.fixture(scope="module")
def cold(asked: list[list[Question]]) -> Iterator[dict[int, str]]:
    """The answer to each question, by its identity, of an engine that reuses nothing."""
    with Engine.from_folder(
        demo_folder(), EngineOptions(threads=1, calibrate=False, host_cache_mib=0, prefix_reuse=False)
    ) as engine:
        talk = Talk(engine)
        yield {id(one): talk.ask(one)[0] for questions in asked for one in questions}
        assert talk.cached_tokens == 0


def wrong(cold: dict[int, str], questions: list[Question], answers: list[str]) -> list[str]:
    """What is not as it must be: answers that differ from cold's, or say what belongs elsewhere."""
    faults = []
    for one, answer in zip(questions, answers, strict=True):
        if answer != cold[id(one)]:
            faults.append(f"{answer!r} instead of {cold[id(one)]!r}")
        if any(value in answer for value in one.foreign):
            faults.append(f"{answer!r}, which only another conversation can know")
    return faults


def test_cold_answers_are_right(asked: list[list[Question]], cold: dict[int, str]) -> None:
    """Without this the rest would prove nothing."""
    right = [one.right in cold[id(one)] for questions in asked for one in questions]
    assert sum(right) >= 0.95 * len(right)


def test_interleaved_and_warm(asked: list[list[Question]], cold: dict[int, str]) -> None:
    """One turn of each conversation at the same time, then the next of each."""
    with Engine.from_folder(demo_folder(), EngineOptions(threads=1, calibrate=False, host_cache_mib=0)) as engine:
        talk = Talk(engine)
        for turn in zip(*asked, strict=True):
            assert not wrong(cold, list(turn), talk.ask(*turn))
        assert talk.cached_tokens > 0


def test_resumed_in_the_middle(asked: list[list[Question]], cold: dict[int, str]) -> None:
    """The conversations go on to their ends; then each is asked again from the middle, last question first."""
    with Engine.from_folder(demo_folder(), EngineOptions(threads=1, calibrate=False, host_cache_mib=0)) as engine:
        talk = Talk(engine)
        for questions in asked:
            for one in questions:
                talk.ask(one)
        before = talk.cached_tokens
        for turn in reversed(list(zip(*asked, strict=True))):
            assert not wrong(cold, list(turn), talk.ask(*turn))
        assert talk.cached_tokens > before


def test_restored_from_the_host(asked: list[list[Question]], cold: dict[int, str]) -> None:
    """A device too small for two conversations, so that each turn finds its history on the Host."""
    options = EngineOptions(
        threads=1,
        calibrate=False,
        max_context=384,
        kv_capacity=384,
        max_concurrency=1,
        device_snapshot_slots=1,
        host_cache_mib=64,
    )
    with Engine.from_folder(demo_folder(), options) as engine:
        talk = Talk(engine)
        for turn in zip(*asked, strict=True):
            for one in turn:
                assert not wrong(cold, [one], talk.ask(one))
        host = engine.stats().cache.host
        assert host is not None
        assert host.restored_bytes > 0
        assert talk.cached_tokens > 0


def test_pages_of_another_conversation_are_noticed(asked: list[list[Question]], cold: dict[int, str]) -> None:
    """The comparison can fail: between two turns every cached page becomes another one's, and with it what was told."""
    with Engine.from_folder(demo_folder(), EngineOptions(threads=1, calibrate=False, host_cache_mib=0)) as engine:
        talk = Talk(engine)
        first, second = list(zip(*asked, strict=True))[2:4]
        assert not wrong(cold, list(first), talk.ask(*first))
        shuffle(engine.parts.memory.pages)
        before = talk.cached_tokens
        answers = talk.ask(*second)
        assert talk.cached_tokens > before
        assert sum(bool(wrong(cold, [one], [answer])) for one, answer in zip(second, answers, strict=True)) >= 3


@pytest.mark.parametrize("damaged", [False, True])
def test_states_of_another_conversation_are_noticed(
    asked: list[list[Question]], cold: dict[int, str], damaged: bool
) -> None:
    """Resumed between whom a question is about and what it asks for, the state alone knows the name."""
    with Engine.from_folder(demo_folder(), EngineOptions(threads=1, calibrate=False, host_cache_mib=0)) as engine:
        talk = Talk(engine)
        questions = [one[0] for one in asked]
        places = []
        for one in questions:
            *before, last = one.messages
            other = Question(
                [*before, last | {"content": last["content"].replace(ATTRIBUTE, "pet")}], one.right, one.foreign
            )
            tokens, others = talk.render(one).tokens, talk.render(other).tokens
            places.append(next(n for n, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b))
            talk.ask(other, explicit=places[-1:])
        if damaged:
            shuffle(engine.parts.memory.states)
        before_them = talk.cached_tokens
        faults = [wrong(cold, [one], talk.ask(one)) for one in questions]
        assert talk.cached_tokens - before_them == sum(places)
        assert sum(map(bool, faults)) >= 3 if damaged else not any(faults)


def shuffle(arena: torch.Tensor) -> None:
    """Give every row that holds anything the content of another one."""
    used = arena.any(dim=1).nonzero().squeeze(1)
    arena[used] = arena[used.roll(1)]
