"""The official ``openai`` client against a server process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from qwen35_engine.demo import demo_folder
from server_process import Server, running_server

SYSTEM = {"role": "system", "content": "You answer briefly. " + "Remember every locker and its owner. " * 20}
FAST: dict[str, Any] = {"model": "demo", "temperature": 0, "reasoning_effort": "none"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--max-concurrency", "2", "--max-pending-requests", "1") as server:
        yield server
        assert server.process.poll() is None, "the server died during the tests"


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match="this server serves 'demo'"):
        client.models.retrieve("other")


def test_an_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=[ask("Who has locker 7?")], max_tokens=8, **FAST)
    assert answer.object == "chat.completion"
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_the_whole_answer(client: OpenAI) -> None:
    messages = [SYSTEM, ask("Stream or not?")]
    whole = client.chat.completions.create(messages=messages, max_tokens=24, **FAST)
    stream = client.chat.completions.create(
        messages=messages, max_tokens=24, stream=True, stream_options={"include_usage": True}, **FAST
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_usage_comes_only_when_asked_for(client: OpenAI) -> None:
    stream = client.chat.completions.create(messages=[ask("usage?")], max_tokens=3, stream=True, **FAST)
    assert all(chunk.choices and chunk.usage is None for chunk in stream)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
def test_the_second_turn_computes_only_what_is_new(client: OpenAI, thinking: bool, streaming: bool) -> None:
    """Also with thinking, which the template strips from the history: then the state before the opener serves."""
    options = FAST | {"reasoning_effort": "medium" if thinking else "none", "max_tokens": 12}
    opening = f"First turn, thinking {thinking}, streaming {streaming}: Ana has locker 42."
    messages: list[Any] = [SYSTEM, ask(opening)]
    first = client.chat.completions.create(messages=messages, **options)
    assert first.usage is not None
    messages += [{"role": "assistant", "content": first.choices[0].message.content or "Noted."}, ask("Which one?")]
    if streaming:
        chunks = list(
            client.chat.completions.create(
                messages=messages, stream=True, stream_options={"include_usage": True}, **options
            )
        )
        usage = chunks[-1].usage
    else:
        usage = client.chat.completions.create(messages=messages, **options).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    # Everything up to the opener of the first answer, or to where other conversations left the system prompt, if that
    # is less than a block before it: one snapshot then serves for both.
    assert first.usage.prompt_tokens - 10 - 64 <= cached < usage.prompt_tokens


def cached_of(client: OpenAI, **request: Any) -> tuple[int, int]:
    """Tokens of the prompt that were cached, and that were not."""
    usage = client.chat.completions.create(max_tokens=1, **request, **FAST).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return cached, usage.prompt_tokens - cached


def test_a_second_conversation_shares_the_system_message_at_once(client: OpenAI) -> None:
    system = {"role": "system", "content": "Lockers are numbered from 1 to 99. " * 20}
    assert cached_of(client, messages=[system, ask("Who has locker 7? " * 20)])[0] == 0
    cached, computed = cached_of(client, messages=[system, ask("Where is Ana?")])
    assert cached > 200
    assert computed < 25


def test_another_system_message_shares_the_tools_in_front_of_it_at_once(client: OpenAI) -> None:
    tools: Any = [
        {"type": "function", "function": {"name": f"tool_{i}", "description": "Looks something up.", "parameters": {}}}
        for i in range(10)
    ]
    messages = [[{"role": "system", "content": f"It is the {day}."}, ask("Hello!")] for day in ("second", "third")]
    assert cached_of(client, messages=messages[0], tools=tools)[0] == 0
    cached, computed = cached_of(client, messages=messages[1], tools=tools)
    assert cached > 400
    assert computed < 40


def test_the_first_turn_of_a_new_prefix_has_nothing_cached(client: OpenAI) -> None:
    usage = client.chat.completions.create(messages=[ask("zebra " * 100)], max_tokens=1, **FAST).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_a_warm_answer_is_the_cold_answer(client: OpenAI) -> None:
    with running_server("--no-prefix-reuse") as cold_server:
        cold = OpenAI(base_url=f"{cold_server.url}/v1", api_key="unused", max_retries=0, timeout=60)
        messages: list[Any] = [SYSTEM]
        for turn in range(3):
            messages.append(ask(f"Turn {turn}: what is in the suitcase of Ben?"))
            options: dict[str, Any] = {"messages": messages, "max_tokens": 20, **FAST}
            warm_answer, cold_answer = (c.chat.completions.create(**options) for c in (client, cold))
            text = cold_answer.choices[0].message.content
            assert warm_answer.choices[0].message.content == text
            assert cold_answer.usage is not None
            assert cold_answer.usage.prompt_tokens_details is not None
            assert cold_answer.usage.prompt_tokens_details.cached_tokens == 0
            messages.append({"role": "assistant", "content": text or "."})
        cold.close()


def test_a_completion_of_text_and_of_its_tokens(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 12}
    prompt = "Ana keeps the red suitcase in Oslo. " * 20
    by_text = client.completions.create(prompt=prompt, **options)
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    by_ids = client.completions.create(prompt=tokenizer.encode(prompt), **options)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens_details is not None
    cached = by_ids.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= by_ids.usage.prompt_tokens - 64
    stream = client.completions.create(prompt=prompt, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in stream) == by_text.choices[0].text


def test_log_probabilities_of_a_completion(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "prompt": "Who has locker 7?", "temperature": 0, "max_tokens": 6}
    whole = client.completions.create(logprobs=3, **options).choices[0].logprobs
    assert whole is not None
    assert whole.token_logprobs is not None
    assert whole.top_logprobs is not None
    assert whole.tokens is not None
    for token, drawn, top in zip(whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True):
        assert drawn == max(top.values()) == top[token] <= 0
        assert sum(math.exp(value) for value in top.values()) <= 1 + 1e-6  # rounded to fp32
    streamed: list[float] = []
    for chunk in client.completions.create(logprobs=3, stream=True, **options):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.token_logprobs or []
    assert streamed == pytest.approx(whole.token_logprobs, abs=1e-4)


def test_ignore_eos_goes_on_to_the_limit(client: OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="on and on", temperature=1.0, seed=1, max_tokens=400, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 400


def test_seeds_repeat_and_differ(client: OpenAI) -> None:
    def drawn(seed: int) -> str:
        # Raw text that the model was not trained on, so that there is something to choose.
        options: dict[str, Any] = {"model": "demo", "prompt": "on and on", "temperature": 1.0, "max_tokens": 16}
        return client.completions.create(seed=seed, **options).choices[0].text

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(1, 5)}) > 1


def test_stop_strings_end_the_answer_before_them(client: OpenAI) -> None:
    options: dict[str, Any] = {"messages": [ask("Go on.")], "max_tokens": 40, **FAST}
    text = client.chat.completions.create(**options).choices[0].message.content
    assert text is not None
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    answer = client.chat.completions.create(stop=[stop], **options).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content == text[: text.index(stop)]


def test_errors_have_openais_shape(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server serves 'demo'") as missing:
        client.chat.completions.create(messages=[ask("x")], **(FAST | {"model": "gpt-5"}))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="context of 32768 tokens") as long:
        client.chat.completions.create(messages=[ask("long " * 40_000)], **FAST)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(messages=[ask("x")], **(FAST | {"temperature": 9}))
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="a system message must come first"):
        client.chat.completions.create(messages=[ask("x"), SYSTEM], **FAST)
