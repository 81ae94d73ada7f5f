"""Answers that would go on for minutes: clients that leave, and a queue that fills up.

The model never ends a turn by itself, so that only what the server does can end an answer in time.
"""

from __future__ import annotations

import concurrent.futures
import json
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from qwen35_engine.demo import demo_folder
from server_process import running_server

OPTIONS: dict[str, Any] = {"model": "endless", "temperature": 0, "reasoning_effort": "none"}
ENDLESS: dict[str, Any] = OPTIONS | {"max_tokens": 30_000, "stream": True}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = shutil.copytree(demo_folder(), tmp_path_factory.mktemp("model") / "endless")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with (
        running_server("--max-concurrency", "2", "--max-pending-requests", "1", model=str(folder)) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30) as client,
    ):
        yield client
        assert server.process.poll() is None, "the server died during the tests"


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_closing_a_stream_frees_the_lane(client: OpenAI) -> None:
    """Two endless answers hold both lanes; a third request can only be answered because their clients left."""
    streams = [client.chat.completions.create(messages=[ask(f"endless {i}")], **ENDLESS) for i in range(2)]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()
    answer = client.chat.completions.create(messages=[ask("and now?")], max_tokens=2, **OPTIONS)
    assert answer.usage is not None


def test_a_client_that_hangs_up_on_a_whole_answer_frees_the_lane(client: OpenAI) -> None:
    impatient = client.with_options(timeout=2)
    for i in range(2):
        with pytest.raises(openai.APITimeoutError):
            impatient.chat.completions.create(messages=[ask(f"too long {i}")], max_tokens=30_000, **OPTIONS)
    answer = client.chat.completions.create(messages=[ask("still there?")], max_tokens=2, **OPTIONS)
    assert answer.usage is not None


def test_a_full_queue_is_429(client: OpenAI) -> None:
    streams = [client.chat.completions.create(messages=[ask(f"busy {i}")], **ENDLESS) for i in range(2)]
    for stream in streams:  # both run
        next(stream)
        next(stream)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        third = client.chat.completions.create(messages=[ask("waiting")], **(ENDLESS | {"max_tokens": 2}))
        waiting = pool.submit(list, third)  # waits: there is room for one
        with pytest.raises(openai.RateLimitError, match="at most 1 requests may wait") as caught:
            client.chat.completions.create(messages=[ask("one too many")], max_tokens=1, **OPTIONS)
        assert caught.value.code == "server_overloaded"
        for stream in streams:
            stream.close()
        assert waiting.result(timeout=60)
