"""Request bodies: what is taken, what is refused, and that a refusal never repeats what was sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qwen35_serve.errors import InvalidRequest
from qwen35_serve.schema import ChatRequest, CompletionRequest, parse_chat_request, parse_completion_request

MINIMAL: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def parse(**changes: Any) -> Any:
    return parse_chat_request(json.dumps(MINIMAL | changes).encode())


def test_a_minimal_request() -> None:
    request = parse()
    assert request.template_messages() == [{"role": "user", "content": "hi"}]
    assert request.template_arguments() == {}
    assert request.output_limit is None
    assert not request.include_usage


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompt": 5}, "prompt: must be text or a list of token ids, and not empty"),
        ({"prompt": [[1]]}, "prompt.0: Input should be a valid integer"),
        ({"prompt": []}, "prompt: must be text or a list of token ids, and not empty"),
        ({}, "prompt: Field required"),
    ],
)
def test_a_complaint_about_a_prompt_says_what_one_may_be(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion_request(json.dumps({"model": "m"} | changes).encode())
    assert caught.value.message == complaint


def test_a_complaint_of_the_servers_own_is_passed_on_as_it_is() -> None:
    body = {"model": "m", "messages": [{"role": "user"}]}
    with pytest.raises(InvalidRequest, match=r"^messages\.0: content must be text or a list of text parts$"):
        parse_chat_request(json.dumps(body).encode())


def test_unknown_fields_are_left_alone() -> None:
    assert parse(user="u", store=True, metadata={"a": "b"}, parallel_tool_calls=True).model == "demo"


def test_output_limit_has_two_names() -> None:
    assert parse(max_tokens=5).output_limit == 5
    assert parse(max_completion_tokens=6, max_tokens=5).output_limit == 6


def test_one_stop_string_or_a_list() -> None:
    assert parse(stop="x").stop == ["x"]
    assert parse(stop=["x", "y"]).stop == ["x", "y"]


def test_reasoning_effort_none_switches_thinking_off() -> None:
    assert parse(reasoning_effort="none").template_arguments() == {"enable_thinking": False}
    assert parse(reasoning_effort="high").template_arguments() == {"enable_thinking": True}
    both = parse(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert both.template_arguments() == {"enable_thinking": True}


def test_arguments_of_calls_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    request = parse(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert request.template_messages()[0]["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": [1]}}}]


def test_tools_are_hidden_on_request() -> None:
    assert parse(tools=[{"type": "function"}], tool_choice="none").template_tools() is None
    assert parse(tools=[{"type": "function"}]).template_tools() == [{"type": "function"}]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the request body must be") as caught:
        parse_chat_request(body)
    assert caught.value.code == "invalid_json"


SECRET = "hunter2"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, -1]}, "prompt.1"),
        ({"prompt": ["a", "b"]}, "prompt.0"),
        ({"logprobs": 65}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": SECRET}, "suffix"),
    ],
)
def test_completion_requests_out_of_range(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion_request(json.dumps({"model": "demo", "prompt": "x"} | changes).encode())
    assert caught.value.param == param
    assert SECRET not in caught.value.message


def test_what_may_be_left_out_may_be_null() -> None:
    """Clients serialise what they were not told as null."""
    required = {"model": "demo", "prompt": "x"}
    for kind in (CompletionRequest, ChatRequest):
        optional = {name: None for name, field in kind.model_fields.items() if not field.is_required()}
        given = MINIMAL | required | optional | {"stream_options": {"include_usage": None}}
        request = kind.model_validate(given)
        assert not request.stream
        assert not request.include_usage
    assert not parse_completion_request(json.dumps(required | {"ignore_eos": None}).encode()).ignore_eos


def test_a_completion_request() -> None:
    request = parse_completion_request(b'{"model": "demo", "prompt": [1, 2], "ignore_eos": true, "stop": "x"}')
    assert request.prompt == [1, 2]
    assert request.ignore_eos
    assert request.stop == ["x"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": SECRET}, "messages"),
        ({"messages": [{"role": SECRET, "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": SECRET}]}]},
            "messages.0.content.0.type",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": SECRET}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"temperature": -1}, "temperature"),
        ({"temperature": SECRET}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": SECRET}]}, "functions"),
        ({"chat_template_kwargs": {"chat_template": SECRET}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
def test_a_refusal_names_the_field_and_keeps_the_value_to_itself(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**changes)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert param.split(".")[0] in caught.value.message
    assert SECRET not in caught.value.message
