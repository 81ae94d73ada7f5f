"""Routes, body limits and error shapes, in process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from torch import Tensor

import qwen35_serve.app
from in_process import send
from qwen35_engine import Engine, EngineOptions, GenerationRequest
from qwen35_engine.checkpoint.config import read_config
from qwen35_engine.demo import demo_folder
from qwen35_engine.sampling import SamplingRow
from qwen35_serve import ChatText, create_app

BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_folder(
        demo_folder(), EngineOptions(threads=1, calibrate=False, max_context=512, host_cache_mib=16)
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine: Engine) -> Starlette:
    return create_app(
        engine, ChatText(demo_folder(), vocab_size=engine.config.vocab_size), model_name="demo", created=7
    )


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_health_and_models(app: Starlette) -> None:
    assert send(app, "GET", "/health").json() == {"status": "ok"}
    card = {"id": "demo", "object": "model", "created": 7, "owned_by": "qwen35-serve"}
    assert send(app, "GET", "/v1/models").json() == {"object": "list", "data": [card]}
    assert send(app, "GET", "/v1/models/demo").json() == card


@dataclass
class Script:
    """A sampler that writes a given text."""

    ids: list[int]

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        return [self.ids[row.step] for row in rows]


class Gate:
    """A sampler that waits until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        self.reached.set()
        assert self.open.wait(timeout=60)
        return [1 for _ in rows]


CALL = "<tool_call>\n<function=look>\n<parameter=name>\nAna\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("parallel", "calls"), [(None, 3), (True, 3), (False, 1)])
def test_an_answer_may_be_kept_to_one_tool_call(parallel: bool | None, calls: int, stream: bool) -> None:
    text = ChatText(demo_folder(), vocab_size=read_config(demo_folder()).vocab_size)
    script = Script(text.encode(f"{CALL}\n{CALL}\n{CALL}<|im_end|>"))
    options = EngineOptions(threads=1, calibrate=False, max_context=512, host_cache_mib=0)
    with Engine.from_folder(demo_folder(), options, sampler=script) as engine:
        app = create_app(engine, text, model_name="demo", created=7)
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        request = BODY | {"tools": tools, "parallel_tool_calls": parallel, "reasoning_effort": "none"}
        request |= {"max_tokens": len(script.ids), "stream": stream}
        response = send(app, "POST", "/v1/chat/completions", json=request)
        assert response.status_code == 200, response.text
        if stream:
            events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
            choices = [choice for event in events for choice in event["choices"]]
            made = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
            assert [call["index"] for call in made] == list(range(calls))
            reason = choices[-1]["finish_reason"]
        else:
            (choice,) = response.json()["choices"]
            made, reason = choice["message"]["tool_calls"], choice["finish_reason"]
        assert len(made) == calls
        assert reason == "tool_calls"
        totals = engine.stats().totals
        assert (totals.stopped, totals.cancelled) == (1, 0)


def test_a_stream_is_server_sent_events(app: Starlette) -> None:
    response = send(app, "POST", "/v1/chat/completions", json=BODY | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first, *_, last = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_wrong_routes_have_openais_shape(app: Starlette, method: str, path: str, status: int, code: str) -> None:
    response = send(app, method, path)
    assert response.status_code == status
    assert error_of(response)["code"] == code


def test_malformed_json_is_400(app: Starlette) -> None:
    response = send(app, "POST", "/v1/chat/completions", content=b"{")
    assert response.status_code == 400
    assert error_of(response) == {
        "message": "the request body must be JSON",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_json",
    }


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def called_with(arguments: object) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [nested(800)]},
        {"chat_template_kwargs": {"x": nested(800)}},
        {"messages": called_with(nested(800))},
        {"messages": called_with("[" * 100_000)},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": called_with({"a": "\ud800"})},
        {"messages": called_with('{"a": "\\ud800"}')},
        {"tools": [{"type": "function", "function": {"name": "\ud800"}}]},
    ],
)
def test_what_can_be_sent_and_not_be_rendered_is_400(app: Starlette, changes: dict[str, Any]) -> None:
    """Values nested deeper than they can be walked, and halves of surrogate pairs."""
    response = send(app, "POST", "/v1/chat/completions", content=json.dumps(BODY | changes).encode())
    assert response.status_code == 400, response.text
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(("module", "prompt"), [("chat", {}), ("completions", {"prompt": "hi"})])
def test_no_work_on_a_prompt_holds_up_other_streams(
    app: Starlette, monkeypatch: pytest.MonkeyPatch, module: str, prompt: dict[str, Any]
) -> None:
    """Checking what is known of a prompt takes time with its length; here it stands for all that does."""
    threads = []

    def checked(**fields: Any) -> GenerationRequest:
        threads.append(threading.current_thread())
        return GenerationRequest(**fields)

    monkeypatch.setattr(f"qwen35_serve.{module}.GenerationRequest", checked)
    route = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[module]
    assert send(app, "POST", route, json=BODY | prompt).status_code == 200
    assert threads
    assert threading.current_thread() not in threads  # it runs the event loop


@pytest.mark.parametrize(
    ("route", "body"),
    [("/v1/chat/completions", BODY), ("/v1/completions", {"prompt": "hi"}), ("/v1/completions", b"{")],
)
def test_a_full_queue_refuses_before_any_work_on_the_prompt(
    monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any] | bytes
) -> None:
    """Scenario 27: nothing is parsed, rendered, tokenised or hashed for an answer that is 429 anyway."""
    gate = Gate()
    options = EngineOptions(threads=1, calibrate=False, max_context=512, max_concurrency=1, max_pending=0)
    with Engine.from_folder(demo_folder(), options, sampler=gate) as engine:
        text = ChatText(demo_folder(), vocab_size=engine.config.vocab_size)
        app = create_app(engine, text, model_name="demo", created=7)
        busy = engine.submit(GenerationRequest(tokens=[1, 2, 3], max_tokens=1))
        assert gate.reached.wait(timeout=60)
        with monkeypatch.context() as patch:
            for module in ("chat.parse_chat_request", "completions.parse_completion_request"):
                patch.setattr(f"qwen35_serve.{module}", lambda *_: pytest.fail("the body was parsed"))
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = send(app, "POST", route, content=content)
        assert response.status_code == 429
        assert error_of(response)["code"] == "server_overloaded"
        assert error_of(response)["param"] is None
        assert engine.stats().refused == {"queue_full": 1, "too_long": 0, "invalid": 0}
        gate.open.set()
        list(busy)
        assert send(app, "POST", "/v1/chat/completions", json=BODY).status_code == 200
        assert engine.stats().refused["queue_full"] == 1


def test_a_queue_that_fills_while_a_prompt_is_rendered_refuses_it_once(
    app: Starlette, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.stats().refused["queue_full"]
    monkeypatch.setattr(engine, "require_room", lambda: None)
    monkeypatch.setattr(engine.parts.worker, "_max_open", 0)
    response = send(app, "POST", "/v1/chat/completions", json=BODY)
    assert response.status_code == 429
    assert engine.stats().refused["queue_full"] == before + 1


def test_a_client_that_leaves_before_the_first_event_cancels_its_request() -> None:
    gate = Gate()
    options = EngineOptions(threads=1, calibrate=False, max_context=512, max_concurrency=1, host_cache_mib=0)
    with Engine.from_folder(demo_folder(), options, sampler=gate) as engine:
        text = ChatText(demo_folder(), vocab_size=engine.config.vocab_size)
        app = create_app(engine, text, model_name="demo", created=7)
        body = json.dumps(BODY | {"stream": True, "max_tokens": 400}).encode()
        came = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])

        async def receive() -> dict[str, Any]:
            return next(came)

        async def send(message: Any) -> None:
            await asyncio.Event().wait()  # nothing is read any more

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
        asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
        gate.open.set()
        list(engine.submit(GenerationRequest(tokens=[1, 2, 3], max_tokens=1)))
        totals = engine.stats().totals
        assert (totals.requests, totals.cancelled) == (2, 1)


def test_a_prompt_as_long_as_the_context_is_400(app: Starlette) -> None:
    body = BODY | {"messages": [{"role": "user", "content": "a b " * 400}]}
    response = send(app, "POST", "/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    assert error_of(response)["param"] == "messages"


@pytest.mark.parametrize(
    ("prompt", "code"), [([1] * 512, "context_length_exceeded"), ([1_000_000], None), ([2**70], None)]
)
def test_a_complaint_about_token_ids_names_the_prompt(app: Starlette, prompt: list[int], code: str | None) -> None:
    response = send(app, "POST", "/v1/completions", json={"model": "demo", "prompt": prompt})
    assert response.status_code == 400
    assert error_of(response)["code"] == code
    assert error_of(response)["param"] == "prompt"


def test_a_body_over_the_limit_is_413(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen35_serve.app, "_MAX_BODY_BYTES", 100)
    response = send(app, "POST", "/v1/chat/completions", content=b" " * 101)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"


def test_a_fault_of_the_server_is_a_500_that_tells_nothing(
    app: Starlette, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(engine, "submit", broken)
    response = send(app, "POST", "/v1/chat/completions", json=BODY)
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
    assert "secret" not in "".join(record.getMessage() for record in caplog.records)


def test_a_closed_engine_is_503() -> None:
    engine = Engine.from_folder(
        demo_folder(), EngineOptions(threads=1, calibrate=False, max_context=512, host_cache_mib=16)
    )
    app = create_app(engine, ChatText(demo_folder(), vocab_size=engine.config.vocab_size), model_name="demo", created=0)
    engine.close()
    assert send(app, "GET", "/health").status_code == 503
    response = send(app, "POST", "/v1/chat/completions", json=BODY)
    assert response.status_code == 503
    assert error_of(response)["code"] == "engine_closed"
