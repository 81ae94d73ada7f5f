"""How the demo model is made: dialogues whose answers are right, text as the template writes it, the true network."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from qwen35_engine.demo import demo_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "demo_model"))

import train
from dialogues import SKILLS, TOOLS, Dialogue, Turn, answers, dialogue, drill, exam
from evaluate import CALL, generated_calls, load_network, measure, question
from network import Network, Seen
from orthogonal import orthogonalised
from pointers import NOWHERE, Pointer, Pointers
from rendering import Encoder, pieces
from teaching import Teacher, shares
from words import ATTRIBUTES, COUNTED, NAMES

FACT = re.compile(r"(?:Now |Correction: )?([A-Z][a-z]+) has ([a-z]+) ([a-z0-9]+)\.")
LENGTHS = (60, 300, 1200)
THINGS = (*ATTRIBUTES, *COUNTED, "age")


def some_dialogues() -> list[Dialogue]:
    free = [dialogue(n, tokens=LENGTHS[n % 3], people=1 + n % 6, kinds=1 + n % 5, tools=n % 3 == 0) for n in range(60)]
    return free + [exam(n, skill, tokens=LENGTHS[n % 3]) for n in range(6) for skill in SKILLS]


def expected(turn: Turn, told: dict[tuple[str, str], str], system: str) -> str:
    """The answer by the words of the question and what the user said before, without the generator's own books."""
    names, words = re.findall(r"\b[A-Z][a-z]+\b", turn.user), re.findall(r"[a-z]+", turn.user)
    if turn.skill == "tell":
        return "Noted."
    if turn.skill == "code_word":
        found = re.search(r"The code word is [a-z]+\.", system)
        return found[0] if found else "?"
    if turn.call is not None:
        return turn.call.result if turn.skill == "look_up" else f"The locker is {turn.call.result}."
    people = [name for name in names if name not in ("Which", "What", "How", "Tell")]
    if turn.skill == "sum":
        values = [told[name, words[2]] for name in people]
        steps = "".join(f"{name} has {words[2]} {value}. " for name, value in zip(people, values, strict=True))
        return f"{steps}Together {sum(map(int, values))}."
    (name,) = people
    (attribute,) = set(words) & {*ATTRIBUTES, *COUNTED}
    value = told.get((name, attribute))
    return f"{name} has {attribute}? I was not told." if value is None else f"{name} has {attribute} {value}."


def test_every_answer_follows_from_what_was_said() -> None:
    seen = set()
    for made in some_dialogues():
        told: dict[tuple[str, str], str] = {}
        for turn in made.turns:
            seen.add(turn.skill)
            if turn.skill == "tell":
                told |= {(name, attribute): value for name, attribute, value in FACT.findall(turn.user)}
            assert turn.answer == expected(turn, told, made.system), turn
            if turn.skill == "open_locker":
                assert turn.call is not None
                (name,) = re.findall(r"of ([A-Z][a-z]+)", turn.user)
                assert turn.call.arguments == {"name": name}
    assert seen == {"tell", *SKILLS}


@pytest.mark.parametrize("skill", SKILLS)
def test_an_exam_asks_first_at_its_end(skill: str) -> None:
    """Nothing on the way gives the answer away again, so that the distance is the distance."""
    for n in range(20):
        made = exam(n, skill, tokens=400)
        *way, last = made.turns
        assert last.skill == skill
        if skill == "code_word":
            assert not any("code word" in turn.user + turn.answer for turn in way)
        if skill in ("recall", "sum"):
            facts = FACT.findall(way[0].user)
            assert all(value in f"{last.answer} {last.thought}" for _, _, value in facts)
            for name, attribute, _ in facts:
                assert not any(f"{name} has {attribute}" in turn.user + turn.answer for turn in way[1:])


def test_a_drill_asks_for_the_last_value_told() -> None:
    asked = {"value": 0, "code": 0, "not told": 0, "sum": 0}
    for seed in range(40):
        told: dict[str, str] = {}
        text = ""
        for part, learnt in drill(seed, tokens=300, people=3, kinds=3):
            key = text.rpartition(". ")[2]
            if learnt and key.startswith("Together"):
                *_, one, two = FACT.findall(text)
                assert int(part) == int(one[2]) + int(two[2])
            elif learnt:
                assert part.strip() == told.get(key, "?")
            if learnt:
                kinds = {"Together": "sum", "The code word is": "code"}
                asked[kinds.get(key, "value" if key in told else "not told")] += 1
            text += part
            told |= {f"{name} has {attribute}": value for name, attribute, value in FACT.findall(text)}
            told["The code word is"] = re.findall(r"The code word is (\w+)", text)[0]
    assert min(asked.values()) >= 20, asked


def test_a_late_drill_comes_back_to_half_of_its_facts_only_at_its_end() -> None:
    distances = []
    for seed in range(20):
        text = "".join(part for part, _ in drill(seed, tokens=600, people=4, kinds=3, filler=0.2, late=True))
        mentions: dict[tuple[str, str], list[int]] = {}
        for found in re.finditer(r"([A-Z][a-z]+) has ([a-z]+) [a-z0-9]+\.", text):
            mentions.setdefault((found[1], found[2]), []).append(found.start())
        twice = [places for places in mentions.values() if len(places) == 2]
        assert len(twice) >= len(mentions) // 2
        last = max(places[-1] for places in mentions.values())
        assert any(places[-1] == last for places in twice)
        distances += [(places[1] - places[0]) / len(text) for places in twice]
    assert sum(distance > 0.6 for distance in distances) > 0.7 * len(distances)


def test_the_same_seed_makes_the_same_dialogue() -> None:
    assert dialogue(1, tokens=300) == dialogue(1, tokens=300) != dialogue(2, tokens=300)
    assert exam(1, "sum", tokens=300) == exam(1, "sum", tokens=300) != exam(2, "sum", tokens=300)


def test_an_unknown_skill_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exam skill must be one of recall, .*, got 'singing'"):
        exam(1, "singing", tokens=100)


@pytest.mark.parametrize("thinking", [False, True])
def test_pieces_are_what_the_template_writes(thinking: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    for made in some_dialogues():
        messages, (*calls, answer) = made.messages(), answers(made.turns[-1])
        if thinking:
            if calls:
                calls[0]["reasoning_content"] = made.turns[-1].thought
            answer |= {"content": made.turns[-1].brief}
            answer["reasoning_content"] = "I have the result." if calls else made.turns[-1].thought
        whole = tokenizer.apply_chat_template(
            [*messages, *calls, answer], tools=list(made.tools) or None, tokenize=False
        )
        assert "".join(text for text, _ in pieces(made, thinking=thinking)) == whole
        prompt = tokenizer.apply_chat_template(
            messages,
            tools=list(made.tools) or None,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )
        assert whole.startswith(prompt)
        ids, learnt = Encoder().training(pieces(made, thinking=thinking))
        assert ids == tokenizer.encode(whole, add_special_tokens=False)
        length = len(tokenizer.encode(prompt, add_special_tokens=False))
        assert learnt[length]
        assert not learnt[length - 1]


def test_a_call_is_recognised() -> None:
    made = exam(3, "open_locker", tokens=100)
    *_, text, _ = [text for text, own in pieces(made, thinking=False) if own]
    assert CALL.fullmatch(text)
    assert not CALL.search(text.replace("</function>", ""))
    assert {tool["function"]["name"] for tool in TOOLS} == {"look_up", "open_locker"}


def test_the_network_is_the_one_transformers_has() -> None:
    folder = demo_folder()
    oracle = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    network = load_network(folder)
    made = dialogue(5, tokens=500, tools=True)
    ids = torch.tensor([Encoder().training(pieces(made, thinking=True))[0]])
    with torch.inference_mode():
        ours, theirs = network(ids), oracle(ids).logits
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)


def test_pointers_lead_to_what_was_said_last() -> None:
    """By the text before them, without the generator's books; and no value that was told is without a pointer."""
    encoder = Encoder()
    pointers = Pointers(encoder)
    texts = [pieces(made, thinking=n % 2 == 0) for n, made in enumerate(some_dialogues())]
    texts += [iter(drill(n, tokens=400, people=3, kinds=3, filler=0.2)) for n in range(10)]
    told_again = new = 0
    for text in texts:
        ids, _ = encoder.training(text)
        found = pointers(ids)
        for pointer in found:
            before = encoder.decode(ids[: pointer.at + 1], skip_special_tokens=False)
            asked = re.search(r"(The code word is|[A-Z][a-z]+ has [a-z]+)$", before)
            assert asked is not None
            key = () if pointer.key is None else pointer.key
            assert encoder.decode(list(key)).split() == ([asked[1].split()[0], asked[1].split()[2]] if key else [])
            said = re.findall(rf"{asked[1]} ([a-z0-9]+)\b", before)
            sources = [encoder.decode([ids[place]]).strip() for place in pointer.sources]
            if said:
                assert sources == [said[-1]] * len(sources)
                assert len(sources) <= len(said)
                told_again += 1
            else:
                assert pointer.sources == (NOWHERE,)
                new += 1
        whole = encoder.decode(ids, skip_special_tokens=False)
        names = "|".join(NAMES)
        assert len(found) == len(re.findall(rf"The code word is|\b(?:{names}) has (?:{'|'.join(THINGS)})\b", whole))
    assert min(told_again, new) > 300


def test_the_teacher_sees_where_attention_lies() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 70, 8), torch.randn(2, 2, 70, 8)
    pointers = [[Pointer(9, (3, 5), (1, 2)), Pointer(60, (NOWHERE,), None)], [Pointer(69, (69,), (3, 4))]]
    wanted = []
    for row in range(2):
        for head in range(2):
            for pointer in pointers[row]:
                scores = q[row, 2 * head, pointer.at] @ k[row, head].T / 8**0.5
                wanted.append(scores[: pointer.at + 1].softmax(-1)[list(pointer.sources)].sum().log())
    torch.testing.assert_close(shares(Seen(torch.empty(0), q, k), pointers), torch.stack(wanted))


def test_what_is_taught_is_learnt() -> None:
    """A few steps on one batch: attention comes to lie on what was said, and its input to tell whose it is."""
    torch.manual_seed(0)
    encoder, network = Encoder(), Network(train.CONFIG)
    teacher = Teacher(network, encoder)
    optimizers = train.optimizers_of(network, teacher)
    stage = train.Stage(steps=1, goal=1.0, rows=4, length=96, people=3, kinds=3, drills=1.0)
    ids, _ = train.batch(0, stage, encoder)
    losses, pointed = [], []
    for _ in range(30):
        logits = network(ids)
        loss = teacher.loss(ids) + 0 * logits.sum()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        pointed.append(teacher.pointed)
    assert losses[-1] < 0.6 * losses[0]
    assert pointed[-1] > 2 * pointed[0]


def test_evaluation_counts_greedy_answers() -> None:
    """A conversation whose expected answer is changed is not right; a call with another number is still a call."""
    network, encoder = load_network(demo_folder()), Encoder()
    questions = [question(exam(n, "look_up", tokens=60), encoder, thinking=False) for n in range(4)]
    assert measure(network, encoder, questions) == [[True, True]] * 4
    wrong = [encoder.encode("Ana")[0], encoder.encode("Ben")[0]]
    for one in questions:
        name = next(at for at in one.own[0] if encoder.decode([one.ids[at]]) not in ("", "\n") and at > one.own[0][6])
        one.ids[name] = wrong[one.ids[name] == wrong[0]]
    assert not any(call for call, _ in measure(network, encoder, questions))
    assert all(CALL.search(text) for text in generated_calls(demo_folder(), encoder, questions))


def test_a_resumed_training_is_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(folder: str, *until: int) -> dict[str, torch.Tensor]:
        for steps in until:
            stage = train.Stage(steps=2, goal=2.0, rows=2, length=48, people=2, kinds=2, tools=0.5, exams=0.5)
            monkeypatch.setattr(train, "STAGES", (stage,) * (steps // 2))
            monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tmp_path / folder), "--threads", "1"])
            train.main()
        state = torch.load(tmp_path / folder / "state.pt")
        assert state["step"] == until[-1]
        network: dict[str, torch.Tensor] = state["network"]
        return network

    whole, resumed, shorter = trained("a", 4), trained("b", 2, 4), trained("c", 2)
    name = "model.layers.0.linear_attn.in_proj_qkv.weight"
    torch.testing.assert_close(whole, resumed, atol=1e-6, rtol=1e-5)
    assert (whole[name] - shorter[name]).abs().max() > 1e-4


def test_orthogonalised_makes_singular_values_alike() -> None:
    torch.manual_seed(0)
    for shape in ((64, 128), (128, 64), (96, 96)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
        assert values.max() < 1.3
        assert values.median() > 0.6


def test_the_shipped_shape_is_the_trained_one() -> None:
    shipped = json.loads((demo_folder() / "config.json").read_text(encoding="utf-8"))
    assert shipped == train.CONFIG
    assert Encoder().padding < train.CONFIG["vocab_size"]
    assert sum(p.numel() for p in Network(train.CONFIG).parameters()) < 2_000_000
