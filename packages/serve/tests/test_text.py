"""Templates, tokenisation, decoding piece by piece, stop strings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from qwen35_engine import TapHints
from qwen35_engine.checkpoint.config import read_config
from qwen35_engine.demo import demo_folder
from qwen35_serve.errors import InvalidRequest, ModelFolderError
from qwen35_serve.text import ChatText, StopStrings, TokenDecoder

FOLDER = demo_folder()
VOCAB_SIZE = read_config(FOLDER).vocab_size
CHAT = ChatText(FOLDER, vocab_size=VOCAB_SIZE)
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
ASK = {"role": "user", "content": "Where does Ana live?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find a person.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}


def rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    prompt = CHAT.render(messages, tools=tools, template_arguments=arguments)
    return TOKENIZER.decode(prompt.tokens)


# ---- the demo's template ----------------------------------------------------------------------------------------


def test_a_conversation() -> None:
    assert rendered([SYSTEM, ASK]) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nWhere does Ana live?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


def test_thinking_off_leaves_an_empty_block() -> None:
    assert rendered([ASK], enable_thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_thinking_is_left_out_of_the_history_but_not_after_the_last_question() -> None:
    earlier = {"role": "assistant", "content": "In Oslo.", "reasoning_content": "She said Oslo."}
    inline = {"role": "assistant", "content": "<think>\nShe said Oslo.\n</think>\n\nIn Oslo."}
    for message in (earlier, inline):
        assert rendered([ASK, message, ASK]) == (
            "<|im_start|>user\nWhere does Ana live?<|im_end|>\n"
            "<|im_start|>assistant\nIn Oslo.<|im_end|>\n"
            "<|im_start|>user\nWhere does Ana live?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n"
        )
        assert "<think>\nShe said Oslo.\n</think>\n\nIn Oslo.<|im_end|>" in rendered([ASK, message])


def test_tools_calls_and_results() -> None:
    call = {
        "role": "assistant",
        "tool_calls": [
            {"function": {"name": "look_up", "arguments": {"name": "Ana", "limit": 3}}},
            {"function": {"name": "look_up", "arguments": {}}},
        ],
    }
    results = [{"role": "tool", "content": "Oslo"}, {"role": "tool", "content": "nothing"}]
    text = rendered([SYSTEM, ASK, call, *results], [TOOL])
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert json.dumps(TOOL) in text
    assert text.index("</tools>") < text.index("You are a helpful assistant.")
    assert (
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "<tool_call>\n<function=look_up>\n<parameter=name>\nAna\n</parameter>\n<parameter=limit>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=look_up>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nOslo\n</tool_response>\n<tool_response>\nnothing\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    ) in text


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([ASK, SYSTEM], "a system message must come first"),
        ([{"role": "poet", "content": "x"}], "role must be system, developer, user, assistant or tool, got poet"),
    ],
)
def test_what_the_template_refuses(messages: list[dict[str, Any]], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        rendered(messages)


# ---- rendering --------------------------------------------------------------------------------------------------


def test_the_opener_is_where_the_next_turn_may_differ() -> None:
    for arguments in ({}, {"enable_thinking": False}):
        prompt = CHAT.render([SYSTEM, ASK], tools=None, template_arguments=arguments)
        assert prompt.hints.opener is not None
        assert TOKENIZER.decode(prompt.tokens[prompt.hints.opener :]).startswith("<|im_start|>assistant\n")
        answered = [SYSTEM, ASK, {"role": "assistant", "content": "In Oslo."}, ASK]
        following = CHAT.render(answered, tools=None, template_arguments=arguments)
        assert following.tokens[: prompt.hints.opener] == prompt.tokens[: prompt.hints.opener]
        assert following.tokens[: len(prompt.tokens)] != prompt.tokens


def test_the_preamble_ends_where_other_conversations_may_begin() -> None:
    others = [{"role": "user", "content": "Is it raining?"}, {"role": "assistant", "content": "No."}, ASK]
    prompt, other = (
        CHAT.render([SYSTEM, *messages], tools=[TOOL], template_arguments={}) for messages in ([ASK], others)
    )
    tools_end, end = prompt.hints.structural
    assert TOKENIZER.decode(prompt.tokens[:end]).endswith("You are a helpful assistant.<|im_end|>\n")
    assert other.tokens[:end] == prompt.tokens[:end]
    assert prompt.hints.message_boundaries == (end, prompt.hints.opener)
    # Another system message shares the tools in front of it.
    strange = CHAT.render([{"role": "system", "content": "Be rude."}, ASK], tools=[TOOL], template_arguments={})
    assert strange.hints.structural[0] == tools_end
    assert strange.tokens[:tools_end] == prompt.tokens[:tools_end]
    assert "</tools>" in TOKENIZER.decode(prompt.tokens[:tools_end])
    assert TOKENIZER.decode(prompt.tokens[tools_end:]).strip().startswith("You are")


@pytest.mark.parametrize(
    ("messages", "tools", "places"),
    [([ASK], None, 0), ([ASK], [TOOL], 1), ([SYSTEM, ASK], None, 1), ([{**SYSTEM, "content": ""}, ASK], [TOOL], 1)],
)
def test_only_what_is_there_is_marked(messages: list[Any], tools: list[Any] | None, places: int) -> None:
    prompt = CHAT.render(messages, tools=tools, template_arguments={})
    assert len(prompt.hints.structural) == places
    for place in prompt.hints.structural:
        assert TOKENIZER.decode(prompt.tokens[:place]).endswith("<|im_end|>\n")
        assert TOKENIZER.decode(prompt.tokens[place:]).startswith("<|im_start|>user\n")


def test_a_prompt_that_the_client_has_rendered_gets_the_same_hints() -> None:
    prompt = CHAT.render([SYSTEM, ASK], tools=None, template_arguments={})
    assert CHAT.hints(list(prompt.tokens)) == prompt.hints
    closed = [*prompt.tokens, *CHAT.encode("In Oslo.<|im_end|>\n")]
    assert CHAT.hints(closed).opener is None
    assert CHAT.hints(CHAT.encode("plain text")) == CHAT.hints([]) == TapHints()


def test_tokens_are_those_of_the_whole_text() -> None:
    prompt = CHAT.render([SYSTEM, ASK], tools=None, template_arguments={})
    whole = TOKENIZER.apply_chat_template([SYSTEM, ASK], add_generation_prompt=True, tokenize=False)
    assert list(prompt.tokens) == TOKENIZER.encode(whole, add_special_tokens=False)
    assert prompt.thinking
    assert not CHAT.render([ASK], tools=None, template_arguments={"enable_thinking": False}).thinking


def test_a_template_without_a_marked_opener_still_renders(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %} answer:{% endif %}"
    )
    prompt = ChatText(folder, vocab_size=VOCAB_SIZE).render([ASK], tools=None, template_arguments={})
    assert prompt.hints.opener is None
    assert TOKENIZER.decode(prompt.tokens) == "Where does Ana live? answer:"


def test_folders_without_text_files_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    with pytest.raises(ModelFolderError, match=r"token ids must be below vocab_size 100, got \d+"):
        ChatText(folder, vocab_size=100)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelFolderError, match=r"no chat_template\.jinja"):
        ChatText(folder, vocab_size=VOCAB_SIZE)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFolderError, match="no usable tokenizer"):
        ChatText(folder, vocab_size=VOCAB_SIZE)


def test_the_template_may_lie_in_tokenizer_config(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    template = folder / "chat_template.jinja"
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template.read_text()}))
    template.unlink()
    moved = ChatText(folder, vocab_size=VOCAB_SIZE).render([ASK], tools=None, template_arguments={})
    assert moved == CHAT.render([ASK], tools=None, template_arguments={})


# ---- decoding ---------------------------------------------------------------------------------------------------


@given(st.text(max_size=60))
def test_pieces_add_up_to_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    decoder = CHAT.decoder()
    pieces = [decoder.feed([i]) for i in ids]
    assert "".join(pieces) + decoder.finish() == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30))
def test_any_ids_decode_as_the_tokenizer_decodes_them(ids: list[int]) -> None:
    """Also bytes that are no UTF-8: a model may write anything."""
    decoder = CHAT.decoder()
    pieces = "".join(decoder.feed([i]) for i in ids) + decoder.finish()
    assert pieces == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_a_character_appears_when_it_is_complete() -> None:
    ids = TOKENIZER.encode("\u20ac", add_special_tokens=False)
    assert len(ids) == 3
    decoder = CHAT.decoder()
    assert [decoder.feed([i]) for i in ids] == ["", "", "\u20ac"]


def test_control_tokens_are_left_out_and_tags_are_text() -> None:
    ids = TOKENIZER.encode("<think>a</think><|im_end|>", add_special_tokens=False)
    assert CHAT.decoder().feed(ids) == "<think>a</think>"


def test_ids_beyond_the_tokenizer_decode_to_nothing() -> None:
    assert TokenDecoder([b"a"]).feed([0, 1, 5, 0]) == "aa"


# ---- stop strings -----------------------------------------------------------------------------------------------


def shown(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    stopping = StopStrings(stops)
    text = "".join(stopping.feed(piece) for piece in pieces)
    return text + stopping.finish(), stopping.stopped


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    st.lists(st.text("ab", max_size=4), max_size=8),
)
def test_the_text_ends_where_a_stop_string_first_completes(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        assert shown(stops, pieces) == (text, False)
        return
    cut, stopped = shown(stops, pieces)
    assert stopped
    assert text.startswith(cut)
    assert not any(stop in cut for stop in stops)
    assert any(text.startswith(stop, len(cut)) for stop in stops)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stopping = StopStrings(["###", "END"])
    assert stopping.feed("one #") == "one "
    assert stopping.feed("# two E") == "## two "
    assert stopping.feed("N") == ""
    assert stopping.feed("D three") == ""
    assert stopping.stopped
    assert stopping.feed("four") == ""
    assert stopping.finish() == ""
