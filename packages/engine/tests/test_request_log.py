"""The request log: every line is what its page says, and no trouble with the file reaches the engine's worker."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_model import continuation
from loop_rig import Rig, tokens_of
from qwen35_engine import MissReason, OptionError, RequestLog, RequestReport, Reuse, TapHints, Timing, Usage

PAGE = Path(__file__).parents[3] / "docs" / "observability.md"

TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
}


def documented(event: str) -> dict[str, tuple[type, ...]]:
    """The page's table of one event's fields: name and types."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(f"Fields of `{event}`:") :].split("\n\n")[1]
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", table, re.MULTILINE)
    return {name: sum((TYPES[kind] for kind in kinds.split(" or ")), ()) for name, kinds in rows}


def documented_reasons() -> set[str]:
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("## Why not more") : text.index("## The request log")]
    return set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def validate(line: dict[str, Any]) -> None:
    """A line has exactly the fields of its event's table, each of a type that stands there."""
    fields = documented(line["event"])
    assert set(line) == set(fields)
    for name, value in line.items():
        # A boolean is an integer to Python, but not to a reader of the page.
        assert type(value) in fields[name], f"{name}: {value!r} is no {fields[name]}"
    if line["event"] == "request":
        assert line["outcome"] in ("stop", "length", "cancelled", "failed")
        assert (line["error"] is not None) == (line["outcome"] == "failed")
        assert line["cached_tokens"] == line["device_tokens"] + line["host_tokens"]
        assert line["reason"] is None or line["reason"] in documented_reasons()
        assert all(value >= 0 for name, value in line.items() if name.endswith("_seconds") and value is not None)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def a_report(number: int = 1, **changes: Any) -> RequestReport:
    usage = Usage(
        prompt_tokens=10,
        completion_tokens=2,
        reuse=Reuse(reason=MissReason.NOT_CACHED),
        timing=Timing(queued_seconds=0.25, first_token_seconds=1.0, token_seconds=0.1234567, total_seconds=2.0),
    )
    report = RequestReport(request_id=number, outcome="stop", error=None, executed=True, usage=usage)
    return replace(report, **changes)


def test_the_page_lists_every_reason() -> None:
    assert documented_reasons() == {reason.value for reason in MissReason}


def test_a_line(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with RequestLog(path, clock=lambda: 1_700_000_000.12345) as log:
        log(a_report())
    start, line = lines_of(path)
    assert (start["event"], start["schema"], start["time"]) == ("start", 1, 1_700_000_000.123)
    assert line == {
        "time": 1_700_000_000.123,
        "event": "request",
        "request_id": 1,
        "outcome": "stop",
        "error": None,
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "device_tokens": 0,
        "host_tokens": 0,
        "matched_tokens": 0,
        "restored_bytes": 0,
        "reason": "not_cached",
        "executed": True,
        "taps_taken": 0,
        "taps_skipped": 0,
        "queued_seconds": 0.25,
        "staged_seconds": 0.0,
        "first_token_seconds": 1.0,
        "token_seconds": 0.123457,
        "total_seconds": 2.0,
    }


def test_every_line_of_a_busy_engine_is_as_documented_and_adds_up_to_the_totals(tmp_path: Path) -> None:
    """Hits of both tiers, misses, opt-outs, cancels, failures, requests that were never admitted."""
    path = tmp_path / "requests.jsonl"
    rng = random.Random(5)
    with RequestLog(path) as log:
        rig = Rig(slabs=80, lanes=2, pages=16)
        rig.listener = log
        histories = [tokens_of(1, 130)]
        for _ in range(40):
            prompt = [*rng.choice(histories), *tokens_of(rng.randrange(2, 9), 20)][:700]
            request_id = rig.submit(prompt, 3, hints=TapHints(explicit=(100,)), reuse=rng.random() < 0.9)
            histories.append([*prompt, *continuation(prompt, 3)])
            rig.now += 0.125
            if rng.random() < 0.2:
                rig.loop.end({request_id: "cancelled"})
                rig.read()
            elif rng.random() < 0.3:
                rig.turn()
                for lane in list(rig.loop.running)[:1]:
                    rig.spoil(rig.model.nan_slots, lane)
            elif rng.random() < 0.3:
                rig.run_dry()
                rig.bench.leave_to_host()
        rig.run_dry()
        totals = rig.loop.accounts.totals
    start, *requests = lines_of(path)
    for line in (start, *requests):
        validate(line)
    assert log.written == len(requests) == totals.requests
    assert sum(line["prompt_tokens"] for line in requests) == totals.prompt_tokens
    assert sum(line["host_tokens"] for line in requests) == totals.host_tokens > 0
    assert sum(line["device_tokens"] for line in requests) == totals.device_tokens > 0
    assert sum(line["outcome"] == "failed" for line in requests) == totals.failed > 0
    assert {"disabled", "not_admitted", None} <= {line["reason"] for line in requests}


def test_no_token_and_no_namespace_is_written(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    secret, token = b"salt-of-a-tenant", 91
    with RequestLog(path) as log:
        rig = Rig(slabs=0)
        rig.listener = log
        rig.submit([token] * 90, 2, namespace=secret)
        rig.run_dry()
    text = path.read_text(encoding="utf-8")
    assert secret.decode() not in text
    assert str(token) not in re.sub(r'"(time|[a-z_]+_seconds)":[^,}]+', "", text)


def test_runs_follow_each_other_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    for _ in range(2):
        with RequestLog(path) as log:
            log(a_report())
            log.close()
    assert [line["event"] for line in lines_of(path)] == ["start", "request"] * 2
    assert not stat.S_IMODE(path.stat().st_mode) & 0o022


@pytest.mark.parametrize("kind", ["folder", "missing folder", "full disk", "pipe without a reader"])
def test_what_cannot_be_written_is_refused_at_start(tmp_path: Path, kind: str) -> None:
    path = tmp_path
    if kind == "missing folder":
        path = tmp_path / "no" / "requests.jsonl"
    elif kind == "full disk":
        path = Path("/dev/full")
    elif kind == "pipe without a reader":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with pytest.raises(OptionError, match=f"the request log {path} must be writable, got: "):
        RequestLog(path)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """What a full disk does: writes go up to the limit and no further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_costs_lines_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "requests.jsonl"
    with RequestLog(path) as log:
        log(a_report(1))
        log.flush()
        with largest_file(path.stat().st_size + 100):  # room for a part of the next line
            log(a_report(2))
            log(a_report(3))
            log.flush()
        log(a_report(4))
    assert [line.get("request_id") for line in lines_of(path)] == [None, 1, 4]
    assert (log.written, log.lost) == (2, 2)
    assert len(caplog.records) == 1


def test_a_reader_that_stops_does_not_stop_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with RequestLog(path) as log:
        for number in range(1000):  # far more than a pipe holds
            log(a_report(number))
    assert log.written > 10
    assert log.lost > 10
    text = b""
    while piece := os.read(reader, 1 << 16):
        text += piece
    os.close(reader)
    assert len([json.loads(line) for line in text.splitlines()]) == 1 + log.written


class Disk:
    """What writes lines, and waits for each until the disk is told to answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.answers = threading.Event()
        self.threads: set[threading.Thread] = set()
        self._write = os.write
        monkeypatch.setattr("qwen35_engine.request_log.os.write", self.write)

    def write(self, file: int, line: bytes) -> int:
        self.threads.add(threading.current_thread())
        self.reached.set()
        assert self.answers.wait(timeout=60)
        return self._write(file, line)


def test_a_slow_disk_holds_up_no_request_and_keeps_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "requests.jsonl"
    with RequestLog(path, clock=iter(range(100)).__next__) as log:
        disk = Disk(monkeypatch)
        for number in range(1, 21):
            log(a_report(number))
        assert disk.reached.wait(timeout=60)
        assert (log.written, log.lost) == (0, 0)
        disk.answers.set()
        log.flush()
        assert log.written == 20
        assert threading.current_thread() not in disk.threads
        log(a_report(21))
    lines = lines_of(path)[1:]
    assert [line["request_id"] for line in lines] == list(range(1, 22)), "closing writes what waits"
    assert [line["time"] for line in lines] == list(range(1, 22)), "the time is that of the request's end"


def test_what_the_queue_has_no_room_for_is_counted_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "requests.jsonl"
    monkeypatch.setattr("qwen35_engine.request_log._MOST_WAITING", 3)
    with RequestLog(path) as log:
        disk = Disk(monkeypatch)
        log(a_report(1))
        assert disk.reached.wait(timeout=60)
        for number in range(2, 8):
            log(a_report(number))
        assert (log.written, log.lost) == (0, 3)
        disk.answers.set()
    assert [line["request_id"] for line in lines_of(path)[1:]] == [1, 2, 3, 4]
    assert (log.written, log.lost) == (4, 3)
    log(a_report(8))
    assert log.lost == 4, "it is closed"
    assert len(caplog.records) == 1


def test_a_disk_that_never_answers_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "requests.jsonl"
    monkeypatch.setattr("qwen35_engine.request_log._SECONDS_TO_FLUSH", 0.0)
    log = RequestLog(path)
    disk = Disk(monkeypatch)
    log(a_report(1))
    assert disk.reached.wait(timeout=60)
    log(a_report(2))
    log.close()
    assert (log.written, log.lost) == (0, 1)
    disk.answers.set()
    log._writer.join(timeout=60)
    log.close()
    assert [line["request_id"] for line in lines_of(path)[1:]] == [1]
    assert (log.written, log.lost) == (1, 1)


def test_a_fault_of_the_writer_costs_one_line(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with RequestLog(path) as log:
        log(a_report(1, executed=object()))
        log(a_report(2))
    assert [line["request_id"] for line in lines_of(path)[1:]] == [2]
    assert (log.written, log.lost) == (1, 1)
