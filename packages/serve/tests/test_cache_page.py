"""``GET /v1/cache`` and what the answers say: documented, reconciled at rest, equal to the sum of the usages."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from in_process import ask, send
from qwen35_engine import Engine, EngineOptions, MissReason, RequestLog
from qwen35_engine.demo import demo_folder
from qwen35_serve import ChatText, create_app

DOCS = Path(__file__).parents[3] / "docs" / "observability.md"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "Remember every locker and its owner. " * 20


def served(**options: Any) -> Engine:
    small = {"threads": 1, "calibrate": False, "max_context": 1024, "host_cache_mib": 16}
    return Engine.from_folder(demo_folder(), EngineOptions(**(small | options)))


def app_of(engine: Engine, request_log: RequestLog | None = None) -> Starlette:
    text = ChatText(demo_folder(), vocab_size=engine.config.vocab_size)
    return create_app(engine, text, model_name="demo", created=0, request_log=request_log)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with served() as engine:
        yield engine


@pytest.fixture
def app(engine: Engine) -> Starlette:
    return app_of(engine)


def body(route: str, text: str, **changes: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": text}]} if route == CHAT else {"prompt": text}
    return {"model": "demo", "max_tokens": 4, "temperature": 0, **prompt, **changes}


def page(app: Starlette) -> dict[str, Any]:
    shown: dict[str, Any] = send(app, "GET", "/v1/cache").json()
    return shown


def paths_of(value: Any, prefix: str = "") -> Iterator[str]:
    """Names of the leaves. Lists and what is named after reasons and options count as leaves."""
    if isinstance(value, dict) and prefix not in ("misses", "partial", "funnel.rejected", "options"):
        for name, inner in value.items():
            yield from paths_of(inner, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix


def documented() -> set[str]:
    """The first table of the page's section: rows of ``section: name, name``, or of a name alone."""
    text = DOCS.read_text(encoding="utf-8")
    text = text[text.index("## `GET /v1/cache`") : text.index("**The funnel.**")]
    rows = re.findall(r"^\| (?:`([\w.]+)`: )?((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
    return {".".join(filter(None, (section, name))) for section, names in rows for name in re.findall(r"\w+", names)}


def test_every_number_of_the_page_is_documented(app: Starlette, tmp_path: Path) -> None:
    ask(app, CHAT, body(CHAT, LONG))
    shown = page(app)
    shown["request_log"] = {"written": 0, "lost": 0}
    assert set(paths_of(shown)) == documented()
    assert set(shown["misses"]) == set(shown["partial"]) == {reason.value for reason in MissReason}


def assert_reconciled(shown: dict[str, Any]) -> None:
    """At rest every page, slot and slab is in one place, and every request in one bucket."""
    pages, slots = shown["device"]["pages"], shown["device"]["slots"]
    assert pages["total"] == pages["free"] + pages["lanes"] + pages["blocks"] + pages["tails"]
    assert slots["total"] == slots["free"] + slots["lanes"] + slots["snapshots"]
    assert pages["lanes"] == slots["lanes"] == shown["lanes"]["running"] == shown["queue"]["waiting"] == 0
    if shown["host"] is not None:
        slabs = shown["host"]["slabs"]
        assert slabs["total"] == slabs["free"] + slabs["blocks"] + slabs["snapshots"]
    assert sum(shown["hits"].values()) + sum(shown["misses"].values()) == shown["requests"]["ended"]
    assert shown["funnel"]["requests"] == shown["requests"]["ended"]
    rejected = shown["funnel"]["rejected"]
    assert shown["funnel"]["executed"] + sum(rejected.values()) == shown["funnel"]["requests"]


def test_the_page_tells_what_requests_did(engine: Engine, app: Starlette) -> None:
    before = page(app)
    assert_reconciled(before)
    assert before["requests"]["ended"] == before["device"]["pages"]["blocks"] == sum(before["snapshots"].values()) == 0
    ask(app, CHAT, body(CHAT, LONG))
    ask(app, CHAT, body(CHAT, LONG))
    ask(app, CHAT, body(CHAT, LONG, cache_prompt=False))
    after = page(app)
    assert_reconciled(after)
    assert after["device"]["pages"]["blocks"] >= 2
    assert after["device"]["slots"]["snapshots"] == sum(after["snapshots"].values()) >= 2
    assert after["counters"]["blocks_inserted"] >= after["device"]["pages"]["blocks"]
    assert after["hits"] == {"device": 1, "host": 0}
    assert (after["misses"]["not_cached"], after["misses"]["disabled"]) == (1, 1)
    funnel = after["funnel"]
    assert (funnel["requests"], funnel["eligible"], funnel["matched"], funnel["executed"]) == (3, 2, 1, 1)
    assert after["request_log"] is None
    assert after["options"]["max_context"] == 1024
    assert after["options"]["kv_capacity"] == 64 * after["device"]["pages"]["total"]
    parts = {entry["what"]: entry["num_bytes"] for entry in after["ledger"]}
    assert parts["Host slabs"] == after["host"]["slab_bytes"] * after["host"]["slabs"]["total"]


def test_an_engine_without_a_host_tier_has_no_host_section() -> None:
    with served(host_cache_mib=0) as engine:
        shown = page(app_of(engine))
        assert shown["host"] is None
        assert_reconciled(shown)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streaming", [False, True])
def test_cached_tokens_is_always_an_integer(app: Starlette, route: str, streaming: bool) -> None:
    """Scenario 42: cold, warm, and without the cache, on a stream and on none."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if streaming else {}
    usages = [
        ask(app, route, body(route, LONG, **options, **more))["usage"] for more in ({}, {}, {"cache_prompt": False})
    ]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert all(type(count) is int for count in cached)
    assert cached[0] == cached[2] == 0
    assert usages[1]["prompt_tokens"] > cached[1] >= usages[1]["prompt_tokens"] - 64
    reuse = [usage["reuse"] for usage in usages]
    assert [entry["reason"] for entry in reuse] == ["not_cached", None, "disabled"]
    assert [entry["device_tokens"] + entry["host_tokens"] for entry in reuse] == cached
    for usage in usages:
        timing = usage["timing"]
        assert 0 <= timing["queued_seconds"] <= timing["first_token_seconds"] <= timing["total_seconds"]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_request_may_leave_nothing_behind(engine: Engine, app: Starlette, route: str) -> None:
    before = engine.stats()
    usage = ask(app, route, body(route, LONG, cache_prompt=False))["usage"]
    after = engine.stats()
    assert (after.cache, after.index) == (before.cache, before.index)
    assert usage["reuse"]["reason"] == "disabled"
    # The same question for the first time again, whose answer is then the same as well.
    again = ask(app, route, body(route, LONG, cache_prompt=None))["usage"]
    assert again["reuse"]["reason"] == "not_cached"
    assert engine.stats().index.blocks > 0


def test_the_counters_equal_the_summed_usage(app: Starlette) -> None:
    """Scenario 53: of requests at once, with shared prefixes, of which the cache has room for a few only."""
    prompts = [LONG[: 120 * (1 + number % 4)] + f" Who has locker {number % 3}?" for number in range(12)]

    async def all_at_once() -> list[dict[str, Any]]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=120) as client:
            answers = await asyncio.gather(
                *(
                    client.post(CHAT, json=body(CHAT, prompt, cache_prompt=i % 5 != 4))
                    for i, prompt in enumerate(prompts)
                )
            )
        return [answer.json()["usage"] for answer in answers]

    usages = asyncio.run(all_at_once()) + asyncio.run(all_at_once())
    shown = page(app)
    assert_reconciled(shown)
    sums = shown["requests"]
    assert sums["ended"] == len(usages) == 24
    assert sums["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    assert sums["completion_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    assert sums["cached_tokens"] == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages) > 0
    assert sums["host_tokens"] == sum(usage["reuse"]["host_tokens"] for usage in usages)
    assert sums["restored_bytes"] == sum(usage["reuse"]["restored_bytes"] for usage in usages)
    hits = [usage for usage in usages if usage["prompt_tokens_details"]["cached_tokens"]]
    assert sum(shown["hits"].values()) == len(hits)
    assert shown["misses"]["disabled"] == 2 * 2


def test_a_full_queue_is_counted() -> None:
    """Scenario 27: what is turned away is not silent."""
    with served(max_concurrency=1, max_pending=0) as engine:
        app = app_of(engine)

        async def two() -> list[int]:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=120) as client:
                request = body(COMPLETIONS, LONG, max_tokens=200, ignore_eos=True)
                answers = await asyncio.gather(*(client.post(COMPLETIONS, json=request) for _ in range(2)))
            return sorted(answer.status_code for answer in answers)

        assert asyncio.run(two()) == [200, 429]
        assert page(app)["queue"] == {"limit": 0, "waiting": 0}
        assert page(app)["refused"] == {"queue_full": 1, "too_long": 0, "invalid": 0}


def test_an_answer_that_ends_at_a_stop_string_is_counted_as_complete(tmp_path: Path) -> None:
    options = EngineOptions(threads=1, calibrate=False, max_context=1024, host_cache_mib=0)
    with RequestLog(tmp_path / "log") as log, Engine.from_folder(demo_folder(), options, on_request=log) as engine:
        app = app_of(engine, log)
        endless = body(COMPLETIONS, LONG, max_tokens=500, ignore_eos=True)
        whole = send(app, "POST", COMPLETIONS, json=endless | {"max_tokens": 20}).json()["choices"][0]["text"]
        choice = send(app, "POST", COMPLETIONS, json=endless | {"stop": [whole[-4:]]}).json()["choices"][0]
        assert (choice["finish_reason"], choice["text"]) == ("stop", whole[: whole.index(whole[-4:])])
        shown = page(app)["requests"]
        assert (shown["stop"], shown["length"], shown["cancelled"]) == (1, 1, 0)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["outcome"] for line in lines if line["event"] == "request"] == ["length", "stop"]


def test_what_can_never_be_served_is_counted() -> None:
    with served(max_context=128) as engine:
        app = app_of(engine)
        for prompt, status in ([1] * 128, 400), ([1] * 127, 200), ([1, 10**6], 400):
            answer = send(app, "POST", COMPLETIONS, json={"model": "demo", "prompt": prompt, "max_tokens": 1})
            assert answer.status_code == status, answer.text
        shown = page(app)
        assert shown["refused"] == {"queue_full": 0, "too_long": 1, "invalid": 1}
        assert shown["requests"]["ended"] == 1


def test_every_answer_says_under_which_number_the_log_has_it(tmp_path: Path) -> None:
    options = EngineOptions(threads=1, calibrate=False, max_context=512, host_cache_mib=0)
    with RequestLog(tmp_path / "log") as log, Engine.from_folder(demo_folder(), options, on_request=log) as engine:
        app = app_of(engine, log)

        def told(route: str, text: str, *, stream: bool) -> int:
            return int(send(app, "POST", route, json=body(route, text, stream=stream)).headers["x-request-id"])

        numbers = [
            told(route, text, stream=stream)
            for route, text, stream in (
                (CHAT, "a", False),
                (CHAT, "bb", True),
                (COMPLETIONS, "ccc", True),
                (COMPLETIONS, "dddd", False),
            )
        ]
        assert "x-request-id" not in send(app, "POST", CHAT, json={"model": "demo"}).headers
    lines = [json.loads(line) for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()[1:]]
    assert [line["request_id"] for line in lines] == numbers
    assert [line["prompt_tokens"] for line in lines[2:]] == [3, 4]


def test_lines_of_the_request_log_are_counted(tmp_path: Path) -> None:
    with RequestLog(tmp_path / "log") as log:
        options = EngineOptions(threads=1, calibrate=False, max_context=512, host_cache_mib=0)
        with Engine.from_folder(demo_folder(), options, on_request=log) as engine:
            app = app_of(engine, log)
            ask(app, CHAT, body(CHAT, "hi"))
            log.flush()
            assert page(app)["request_log"] == {"written": 1, "lost": 0}
            assert len((tmp_path / "log").read_text().splitlines()) == 2
