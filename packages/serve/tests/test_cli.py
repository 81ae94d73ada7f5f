"""The command line: what it prints, how it ends, and one line for what cannot start."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from qwen35_engine.demo import demo_folder
from qwen35_serve.cli import main
from server_process import SECONDS_TO_START, running_server


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, stdout and the lines of stderr that are no progress, without the seconds a process takes to start."""
    code = main(arguments)
    out, err = capfd.readouterr()
    return code, out, [line for line in err.splitlines() if not line.startswith("INFO")]


def test_the_printed_curl_works_and_sigterm_ends_in_order() -> None:
    with running_server() as server:
        assert f"Serving demo at {server.url}/v1" in server.banner
        words = shlex.split(server.banner[server.banner.index("curl") :].replace("\\\n", " "))
        assert words[:2] == ["curl", f"{server.url}/v1/chat/completions"]
        body = json.loads(words[words.index("-d") + 1])
        answer = httpx.post(words[1], json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["role"] == "assistant"
        assert answer["usage"]["completion_tokens"] > 0
        assert server.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_with_the_banner_ends_in_order(number: int) -> None:
    """The address is told, and uvicorn does not listen for signals yet."""
    script = f"""
import os, sys, uvicorn
from qwen35_serve import cli
run = uvicorn.Server.run
def interrupted(*args, **kwargs):
    os.kill(os.getpid(), {int(number)})
    run(*args, **kwargs)
uvicorn.Server.run = interrupted
sys.exit(cli.main(["--model", "demo", "--port", "0", "--no-calibrate"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.DEVNULL, timeout=SECONDS_TO_START, check=False
    )
    assert done.returncode == 0


def test_a_process_with_every_flag_writes_its_log_and_shows_its_choices(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    flags = {
        "--max-context": "2000",
        "--max-concurrency": "3",
        "--max-pending-requests": "5",
        "--pending-timeout-ms": "2500",
        "--prefill-chunk": "128",
        "--kv-capacity": "6400",
        "--host-cache-mib": "8",
        "--device-snapshot-slots": "6",
        "--cache-taps-per-request": "4",
        "--cache-tap-ladder": "512",
        "--cache-tap-min-gap": "100",
        "--kv-dtype": "bf16",
    }
    words = [word for pair in flags.items() for word in pair]
    with running_server(*words, "--request-log-jsonl", str(log)) as server:
        in_force = next(line for line in server.banner.splitlines() if line.startswith("In force: "))
        assert not [flag for flag, value in flags.items() if f"{flag} {value}" not in in_force]
        body = {"model": "demo", "messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 2}
        usages = [
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["usage"] for _ in range(2)
        ]
        shown: dict[str, Any] = {"request_log": {"written": 0}}
        while shown["request_log"]["written"] < 2:  # the log has a thread of its own
            shown = httpx.get(f"{server.url}/v1/cache", timeout=60).json()
            assert shown["request_log"]["lost"] == 0
        assert server.stop() == 0
    start, *requests = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert start["event"] == "start"
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert [line["cached_tokens"] for line in requests] == cached
    assert cached[1] > 0
    assert shown["requests"]["cached_tokens"] == sum(cached)
    assert shown["request_log"] == {"written": 2, "lost": 0}
    assert shown["options"]["tap_min_gap_tokens"] == 100
    assert (shown["device"]["pages"]["total"], shown["lanes"]["limit"]) == (100, 3)


def test_sigint_ends_in_order_while_an_answer_runs() -> None:
    with running_server() as server:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 30_000,
            "stream": True,
            "temperature": 0,
        }
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
            next(response.iter_lines())
            assert server.stop(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "/no/such/folder", "--port", "0"], "/no/such/folder: not a folder"),
        (["--model", "demo", "--max-concurrency", "0"], "--max-concurrency must be between 1 and 256, got 0"),
        (
            ["--model", "demo", "--port", "0", "--max-context", "99999"],
            "--max-context must be at most the model's 32768 positions",
        ),
        (["--model", "demo", "--port", "99999"], "--port must be between 0 and 65535, got 99999"),
        (["--model", "demo", "--host", "203.0.113.1"], "cannot listen on 203.0.113.1 port 8080"),
    ],
)
def test_one_line_and_exit_code_2(capfd: pytest.CaptureFixture[str], arguments: list[str], complaint: str) -> None:
    code, out, lines = run(capfd, *arguments)
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"qwen35-serve: {complaint}")
    assert out == ""


def test_a_process_that_cannot_start_says_so_without_a_traceback() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "qwen35_serve", "--model", "/no/such/folder", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == "qwen35-serve: /no/such/folder: not a folder\n"
    assert result.stdout == ""


def test_a_busy_port_is_found_before_the_model_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, lines = run(capfd, "--model", "/no/such/folder", "--port", str(port))
    assert code == 2
    assert lines[0].startswith(f"qwen35-serve: cannot listen on 127.0.0.1 port {port}")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("config.json", "config.json: no such file"),
        ("model.safetensors", "no *.safetensors file"),
        ("tokenizer.json", "no usable tokenizer"),
        ("chat_template.jinja", "no chat_template.jinja"),
    ],
)
def test_an_incomplete_folder_is_one_line(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str, complaint: str
) -> None:
    folder = shutil.copytree(demo_folder(), tmp_path / "model")
    (folder / name).unlink()
    code, _, lines = run(capfd, "--model", str(folder), "--port", "0")
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("qwen35-serve: ")
    assert complaint in lines[0]


def test_a_folder_is_served_under_its_name_or_a_given_one(tmp_path: Path) -> None:
    folder = shutil.copytree(demo_folder(), tmp_path / "my-model")
    with running_server(model=str(folder)) as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "my-model"
    with running_server("--served-model-name", "other", model=str(folder)) as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "other"
