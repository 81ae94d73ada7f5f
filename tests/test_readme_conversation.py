"""The README's first conversation: the second answer needs the first turn, and the usage says what was not computed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx

from server_process import running_server

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_conversation_goes_as_the_readme_says() -> None:
    (commands,) = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)
    bodies = [json.loads(body) for body in re.findall(r"-d '(.*?)'", commands, re.DOTALL)]
    after = README[README.index(commands) + len(commands) :]
    promised = re.findall(r"`([A-Z][^`]*\.)`", after)[:2]
    assert [message["content"] for message in bodies[1]["messages"]][1] == promised[0]
    usage = dict(re.findall(r'`"(\w+)": (\d+)`', after)[:2])
    with running_server() as server:
        answers = [httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json() for body in bodies]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == promised
    last = answers[1]["usage"]
    assert str(last["prompt_tokens"]) == usage["prompt_tokens"]
    assert str(last["prompt_tokens_details"]["cached_tokens"]) == usage["cached_tokens"]
    assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
