"""Every flag of the engine changes what it says it changes."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from qwen35_engine import (
    ContextLengthExceeded,
    Engine,
    Failed,
    GenerationRequest,
    QueueFull,
    QueueTimeout,
    SamplingParams,
    TapHints,
    TokenStream,
    Usage,
)
from qwen35_engine.demo import demo_folder
from qwen35_serve import cli
from qwen35_serve.settings import ServerSettings, command_line

SMALL = ("--threads", "1", "--max-context", "2048", "--host-cache-mib", "0", "--no-calibrate")


def options_of(*flags: str) -> ServerSettings:
    return cli._read(["--model", "demo", *flags]).settings()


def engine_of(*flags: str) -> AbstractContextManager[Engine]:
    """The last of equal flags counts."""
    return Engine.from_folder(demo_folder(), options_of(*SMALL, *flags))


def tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(length)]


def submit(engine: Engine, prompt: Sequence[int], max_tokens: int = 2, **changes: Any) -> TokenStream:
    greedy = SamplingParams(temperature=0)
    return engine.submit(GenerationRequest(tokens=prompt, max_tokens=max_tokens, sampling=greedy, **changes))


def usage_of(engine: Engine, prompt: Sequence[int], max_tokens: int = 2, **changes: Any) -> Usage:
    return list(submit(engine, prompt, max_tokens, **changes))[-1].usage  # type: ignore[union-attr]


def passes_of(engine: Engine) -> list[dict[str, Any]]:
    """The arguments of every prefill pass from here on."""
    passes: list[dict[str, Any]] = []
    prefill = engine.parts.model.prefill

    def noted(**arguments: Any) -> Any:
        passes.append(arguments)
        return prefill(**arguments)

    engine.parts.model.prefill = noted  # type: ignore[method-assign]
    return passes


def test_max_context() -> None:
    with engine_of("--max-context", "100") as engine:
        with pytest.raises(ContextLengthExceeded, match="a context of 100 tokens, got 100"):
            submit(engine, tokens(100, 1))
        assert usage_of(engine, tokens(98, 1), 50).completion_tokens == 2


def test_max_concurrency() -> None:
    for limit, together in (("1", 1), ("3", 3)):
        with engine_of("--max-concurrency", limit) as engine:
            streams = [submit(engine, tokens(3, seed), 2000) for seed in range(3)]
            for stream in streams[:together]:
                next(iter(stream))  # started
            stats = engine.stats()
            assert (stats.running, stats.waiting) == (together, 3 - together)
            for stream in streams:
                stream.cancel()


def test_max_pending_requests() -> None:
    with engine_of("--max-concurrency", "1", "--max-pending-requests", "1") as engine:
        streams = [submit(engine, tokens(3, seed), 2000) for seed in range(2)]
        with pytest.raises(QueueFull, match="at most 1 requests may wait"):
            submit(engine, tokens(3, 3))
        for stream in streams:
            stream.cancel()


def test_pending_timeout_ms() -> None:
    with engine_of("--max-concurrency", "1", "--pending-timeout-ms", "1") as engine:
        first = submit(engine, tokens(3, 1), 2000)
        next(iter(first))
        end = list(submit(engine, tokens(3, 2)))[-1]
        assert isinstance(end, Failed)
        assert isinstance(end.error, QueueTimeout)
        assert "within 0.001 seconds" in str(end.error)
        first.cancel()


def test_prefill_chunk() -> None:
    lengths = {}
    for chunk in ("64", "1024"):
        with engine_of("--prefill-chunk", chunk) as engine:
            passes = passes_of(engine)
            usage_of(engine, tokens(200, 1))
            lengths[chunk] = [len(arguments["tokens"]) for arguments in passes]
    assert lengths == {"64": [64, 64, 64, 8], "1024": [200]}


def test_kv_capacity() -> None:
    with engine_of("--kv-capacity", "2100") as engine:
        assert engine.stats().cache.pages_total == 32
    with engine_of("--kv-capacity", "4096") as engine:
        assert engine.stats().cache.pages_total == 64


def test_host_cache_mib() -> None:
    """What the device has no room for comes back from the Host, or is computed again where there is none."""
    cached = {}
    for mib in ("0", "16"):
        with engine_of("--host-cache-mib", mib, "--max-context", "512", "--kv-capacity", "512") as engine:
            prompt = tokens(300, 1)
            usage_of(engine, prompt, hints=TapHints(explicit=(299,)))
            for seed in (2, 3):
                usage_of(engine, tokens(400, seed))
            cached[mib] = usage_of(engine, prompt)
    assert cached["0"].cached_tokens == 0
    assert (cached["16"].cached_tokens, cached["16"].reuse.host_tokens) == (299, 299)
    assert cached["16"].reuse.restored_bytes > 0


def test_device_snapshot_slots() -> None:
    kept = {}
    for slots in ("1", "8"):
        with engine_of("--device-snapshot-slots", slots) as engine:
            for seed in range(4):
                usage_of(engine, tokens(100, seed))
            kept[slots] = engine.stats().index.snapshots
    assert kept["1"] == 1
    assert kept["8"] > 1


@pytest.mark.parametrize(
    ("flags", "frontiers"),
    [
        # The last position, and the ladder: 4096 tokens from the end and more.
        ((), [1599]),
        (("--cache-taps-per-request", "0"), []),
        (("--cache-tap-ladder", "400", "--cache-tap-min-gap", "64"), [800, 1200, 1599]),
        (("--cache-tap-ladder", "400", "--cache-tap-min-gap", "500"), [800, 1599]),
        (("--cache-taps-per-request", "1", "--cache-tap-ladder", "400", "--cache-tap-min-gap", "64"), [1599]),
    ],
)
def test_taps(flags: tuple[str, ...], frontiers: list[int]) -> None:
    """--cache-taps-per-request, --cache-tap-ladder, --cache-tap-min-gap"""
    with engine_of("--cache-taps-per-request", "8", "--device-snapshot-slots", "20", *flags) as engine:
        passes = passes_of(engine)
        usage = usage_of(engine, tokens(1600, 1))
        assert sorted(position for arguments in passes for position, _ in arguments["taps"]) == frontiers
        assert (usage.taps_taken, usage.taps_skipped) == (len(frontiers), 0)


def test_no_prefix_reuse() -> None:
    with engine_of("--no-prefix-reuse") as engine:
        usages = [usage_of(engine, tokens(100, 1)) for _ in range(2)]
        assert [usage.cached_tokens for usage in usages] == [0, 0]
        assert [usage.reuse.reason for usage in usages] == ["disabled", "disabled"]
        assert engine.stats().index.blocks == 0


def test_kv_dtype() -> None:
    sizes = {}
    for kv_dtype in ("fp32", "bf16"):
        with engine_of("--kv-dtype", kv_dtype, "--kv-capacity", "4096") as engine:
            sizes[kv_dtype] = {entry.what: entry.num_bytes for entry in engine.ledger().entries}["KV pages"]
            warm = [usage_of(engine, tokens(200, 1)).cached_tokens for _ in range(2)]
            assert warm == [0, 199]
    assert sizes["fp32"] == 2 * sizes["bf16"]


def test_what_is_printed_as_in_force_starts_the_same_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing derived is left out, and each flag has an option of the engine."""
    flags = (*SMALL, "--cache-tap-ladder", "777", "--kv-dtype", "bf16", "--pending-timeout-ms", "1500", "--port", "0")
    settings = options_of(*flags, "--served-model-name", "a name", "--request-log-jsonl", "a file")
    with Engine.from_folder(demo_folder(), settings) as engine:
        cli._print_start(settings, engine)
        printed = capsys.readouterr().out
        (line,) = re.findall(r"^In force: (.*)$", printed, re.MULTILINE)
        program, *words = shlex.split(line)
        assert program == "qwen35-serve"
        again = cli._read(words).settings()
        assert again.model_dump() == settings.model_dump() | engine.options.model_dump()
        assert (again.model, again.served_model_name, again.port) == ("demo", "a name", 0)
        with Engine.from_folder(demo_folder(), again) as twin:
            assert twin.options == engine.options
        assert (again.tap_ladder_tokens, again.kv_dtype, again.pending_timeout_seconds) == (777, "bfloat16", 1.5)
        sizes = {what: float(mib) for what, mib in re.findall(r"^(\w[\w ]*?) +([\d.]+) MiB$", printed, re.MULTILINE)}
        for entry in engine.ledger().entries:
            assert sizes[entry.what] == pytest.approx(entry.num_bytes / 2**20, abs=0.06)
        assert sizes["device in all"] == pytest.approx(engine.ledger().total_bytes("device") / 2**20, abs=0.06)
    for flag in ("--no-prefix-reuse", "--no-calibrate"):
        assert cli._read(command_line(options_of(flag))[1:]).settings() == options_of(flag) != options_of()


def test_a_request_log_that_cannot_be_written_stops_the_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it writes is seen in test_cli, of a process of its own."""
    code = cli.main(["--model", "/no/such/folder", "--port", "0", "--request-log-jsonl", str(tmp_path)])
    assert code == 2
    assert capfd.readouterr().err == (
        f"qwen35-serve: the request log {tmp_path} must be writable, got: Is a directory\n"
    )


@pytest.mark.parametrize("flag", ["--kv-dtype", "--device", "--dtype"])
def test_a_word_that_is_no_choice_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--model", "demo", flag, "float8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"qwen35-serve: {flag} must be one of auto, ")
    assert line.endswith(", got 'float8'")


def test_flags_that_contradict_each_other_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--model", "demo", "--port", "0", "--no-prefix-reuse", "--host-cache-mib", "5"]) == 2
    assert "--host-cache-mib must be left out where prefix_reuse is False, got 5" in capfd.readouterr().err


def test_the_help_names_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    """As a value or, where it is derived, in words that hold."""
    with pytest.raises(SystemExit):
        options_of("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "None" not in text
    assert "(default: False)" not in text
    with Engine.from_folder(
        demo_folder(), options_of("--device", "cpu", "--threads", "1", "--max-concurrency", "7", "--no-calibrate")
    ) as engine:
        options = engine.options
    assert options.device_snapshot_slots == 7 + 5
    assert (options.host_cache_mib, options.max_new_taps) == (1024, 8)
    assert (options.tap_ladder_tokens, options.tap_min_gap_tokens) == (4096, 1024)
