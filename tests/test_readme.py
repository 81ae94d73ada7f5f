"""The README's first command, run as a newcomer would: a fresh environment, a clean copy, up to the first answer."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server_process import running_server

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL)


def test_the_first_screen_has_the_two_commands() -> None:
    assert COMMANDS[:2] == [
        "pip install -r requirements.txt && qwen35-serve --model demo",
        "pip install nox && nox",
    ]
    assert README[: README.index(COMMANDS[1])].count("\n") < 50


def test_ci_runs_the_second_command() -> None:
    assert COMMANDS[1] in (ROOT / ".ci" / "run").read_text()


def clean_copy(folder: Path) -> Path:
    """What a clone would hold: the files that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@contextmanager
def shell(command: str, folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command line in a process group of its own, ended whatever happens."""
    process = subprocess.Popen(
        command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)
        assert process.stdout is not None
        process.stdout.close()


def test_the_python_snippet_shows_reuse(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)\n```", README, re.DOTALL)
    with running_server() as server:
        here = snippet.replace("http://127.0.0.1:8080/v1", f"{server.url}/v1")
        assert here != snippet
        exec(compile(f"{here}\nclient.close()", "README.md", "exec"), {})
    first, second = [list(map(int, re.findall(r"\d+", line))) for line in capsys.readouterr().out.splitlines()]
    assert first[1] == 0
    assert second[0] > second[1] >= first[0] - 10


@pytest.mark.readme
def test_a_newcomer_gets_an_answer(tmp_path: Path) -> None:
    venv.create(tmp_path / "environment", with_pip=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {
        "PATH": f"{tmp_path / 'environment' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONUNBUFFERED": "1",
    }
    # Word for word, but for the port, which may be taken on the machine that runs the tests.
    with shell(f"{COMMANDS[0]} --port 0", clean_copy(tmp_path / "checkout"), environment) as process:
        printed = ""
        assert process.stdout is not None
        for line in process.stdout:
            printed += line
            if line.startswith("  -d "):
                break
        assert "curl http://127.0.0.1:" in printed, f"ended with {process.wait()}: {printed}"
        curl = shlex.split(printed[printed.index("curl") :].replace("\\\n", " "))
        answer = json.loads(first_answer(curl))
        assert answer["choices"][0]["message"]["content"] is not None
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def first_answer(curl: list[str]) -> str:
    """Paste the printed command; where there is no curl, send what it would."""
    if shutil.which("curl"):
        return subprocess.run([*curl, "-sS"], capture_output=True, text=True, check=True, timeout=60).stdout
    body = curl[curl.index("-d") + 1]
    code = (
        "import sys, urllib.request as r;"
        "request = r.Request(sys.argv[1], sys.argv[2].encode(), {'Content-Type': 'application/json'});"
        "print(r.urlopen(request).read().decode())"
    )
    return subprocess.run(
        [sys.executable, "-c", code, curl[1], body], capture_output=True, text=True, check=True, timeout=60
    ).stdout
