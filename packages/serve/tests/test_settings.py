"""Settings from the command line, the environment and a file: one model, one line for what cannot hold."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from qwen35_engine import EngineOptions, OptionError
from qwen35_serve import cli, settings
from qwen35_serve.errors import SettingsError
from qwen35_serve.settings import OPTIONS, Given, ServerSettings, command_line

ROOT = Path(__file__).parents[3]


def given(
    flags: dict[str, str | bool] | None = None, environment: dict[str, str] | None = None, config: Path | None = None
) -> Given:
    return Given.read({"model": "demo"} | (flags or {}), environment or {}, None if config is None else str(config))


def refusal(values: Given) -> str:
    with pytest.raises(OptionError) as caught:
        values.settings()
    return values.complaint(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.toml"


def test_a_flag_counts_more_than_a_variable_and_that_more_than_the_file(file: Path) -> None:
    file.write_text("max_context = 1000\nthreads = 3\nprefill_chunk = 10\nprefix_reuse = false\n")
    environment = {"QWEN35_MAX_CONTEXT": "2000", "QWEN35_THREADS": "2", "QWEN35_HOST": ""}
    found = given({"max_context": "3000", "prefix_reuse": True}, environment, file).settings()
    assert (found.max_context, found.threads, found.prefill_chunk, found.max_concurrency) == (3000, 2, 10, 4)
    assert found.prefix_reuse
    assert found.host == "127.0.0.1"
    assert given(environment={"QWEN35_CONFIG": str(file)}).settings().threads == 3


# A value for every option, as text, in a file, and in Python.
VALUES: dict[str, tuple[str, str, Any]] = {
    "model": ("demo", '"demo"', "demo"),
    "served_model_name": ("a", '"a"', "a"),
    "host": ("::1", '"::1"', "::1"),
    "port": ("0", "0", 0),
    "request_log_jsonl": ("a/b", '"a/b"', Path("a/b")),
    "log_level": ("debug", '"debug"', "debug"),
    "device": ("cpu", '"cpu"', "cpu"),
    "dtype": ("bf16", '"bfloat16"', "bfloat16"),
    "kv_dtype": ("float32", '"fp32"', "float32"),
    "pending_timeout_seconds": ("1001", "1001", 1.001),
    "prefix_reuse": ("on", "true", True),
    "calibrate": ("false", "false", False),
}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_source_says_the_same_and_what_is_printed_is_read_again(option: settings.Option, file: Path) -> None:
    text, toml, value = VALUES.get(option.field, ("64", "64", 64))
    file.write_text(f"{option.name} = {toml}\n")
    flag: str | bool = value if option.is_switch else text
    found = [
        given({option.field: flag}),
        given(environment={"QWEN35_" + option.name.upper(): text}),
        Given.read({} if option.field == "model" else {"model": "demo"}, {}, str(file)),
    ]
    for one in found:
        assert getattr(one.settings(), option.field) == value
        assert cli._read(command_line(one.settings())[1:]).settings() == one.settings()


@pytest.mark.parametrize(
    ("flags", "environment", "line", "complaint"),
    [
        ({"max_concurrency": "0"}, {}, "", "--max-concurrency must be between 1 and 256, got 0"),
        ({"max_pending": "x"}, {}, "", "--max-pending-requests must be between 0 and 1000000, got 'x'"),
        ({"threads": "1.5"}, {}, "", "--threads must be between 1 and 1024, got '1.5'"),
        (
            {"pending_timeout_seconds": "90000000"},
            {},
            "",
            "--pending-timeout-ms, in seconds, must be above 0 and at most 86400, got 90000.0",
        ),
        ({}, {"QWEN35_PORT": "99999"}, "", "QWEN35_PORT must be between 0 and 65535, got 99999"),
        ({}, {"QWEN35_CALIBRATE": "maybe"}, "", "QWEN35_CALIBRATE must be true or false, got 'maybe'"),
        ({}, {"QWEN35_KV_DTYPE": "int8"}, "", "QWEN35_KV_DTYPE must be one of auto, float32, bfloat16, got 'int8'"),
        ({}, {}, "max_context = true", "FILE: max_context must be between 2 and 100000000, got True"),
        ({}, {}, 'max_context = "4096"', "FILE: max_context must be between 2 and 100000000, got '4096'"),
        ({}, {}, "max_context = 4096.0", "FILE: max_context must be between 2 and 100000000, got 4096.0"),
        ({}, {}, "host = 7", "FILE: host must be text, got 7"),
        ({}, {}, "threads = [1]", "FILE: threads must be between 1 and 1024, got [1]"),
        (
            {"prefix_reuse": False},
            {"QWEN35_CACHE_TAP_LADDER": "400"},
            "",
            "QWEN35_CACHE_TAP_LADDER must be left out where prefix_reuse is False, got 400",
        ),
    ],
)
def test_a_complaint_names_what_was_written(
    flags: dict[str, str | bool], environment: dict[str, str], line: str, complaint: str, file: Path
) -> None:
    file.write_text(line)
    assert refusal(given(flags, environment, file)) == complaint.replace("FILE", str(file))


def test_a_model_must_be_given() -> None:
    assert refusal(Given.read({}, {}, None)) == "--model must be given"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max-context = 5", "max-context is not an option; did you mean max_context?"),
        ("max_pending = 5", "max_pending is not an option; did you mean max_pending_requests?"),
        ("no_prefix_reuse = true", "no_prefix_reuse is not an option; did you mean prefix_reuse?"),
        ("[server]\nport = 1", "server is not an option"),
        ("password = 'hunter2'", "password is not an option"),
        ("model", "not TOML: Expected '=' after a key"),
        ("model = 'hunter2", "not TOML: "),
    ],
)
def test_a_file_that_cannot_be_used(file: Path, text: str, complaint: str) -> None:
    file.write_text(text)
    with pytest.raises(SettingsError, match=f"^{re.escape(f'{file}: {complaint}')}") as caught:
        given(config=file)
    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "no.toml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(SettingsError, match=f"^{path}: {reason}$"):
            given(config=path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="not TOML: "):
        given(config=tmp_path / "binary")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--max-contxt", "5"], "--max-contxt is not an option; did you mean --max-context?"),
        (["--no-calibrated"], "--no-calibrated is not an option; did you mean --no-calibrate?"),
        (["demo"], "demo is not an option"),
        (["--max-context"], "argument --max-context: expected one argument"),
        (["--config", "/no/such.toml"], "/no/such.toml: No such file or directory"),
        ([], "--model must be given"),
        (["--model", "demo", "--max-con", "5"], "ambiguous option: --max-con could match"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"qwen35-serve: {complaint}")


def test_the_environment_reaches_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QWEN35_MODEL", "/no/such/folder")
    monkeypatch.setenv("QWEN35_PORT", "0")
    assert cli.main([]) == 2
    assert capsys.readouterr().err == "qwen35-serve: /no/such/folder: not a folder\n"


def test_the_same_text_may_be_shortened_and_joined() -> None:
    assert cli._read(["--model=demo", "--max-conc", "7"]).settings().max_concurrency == 7


class WithSecret(ServerSettings):
    api_key: str = Field(default="", repr=False, description="Of clients.")


def test_a_secret_is_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    options = (*OPTIONS, settings.Option("api_key", "api_key"))
    monkeypatch.setattr(settings, "OPTIONS", options)
    assert "hunter2" not in " ".join(command_line(WithSecret(model="demo", api_key="hunter2")))
    with pytest.raises(OptionError, match=r"^api_key must be text$"):
        WithSecret(model="demo", api_key=["hunter2"])  # type: ignore[arg-type]


def test_each_default_has_one_place() -> None:
    for name, info in EngineOptions.model_fields.items():
        assert ServerSettings.model_fields[name].default == info.default, name
        assert ServerSettings.model_fields[name].description == info.description, name


def test_the_table_and_the_example_of_the_readme_are_current() -> None:
    """``python tools/options_table.py`` writes the table."""
    assert runpy.run_path(str(ROOT / "tools" / "options_table.py"))["main"](["--check"]) == 0
    text = (ROOT / "packages" / "serve" / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert set(tomllib.loads(example)) <= {option.name for option in OPTIONS}
    assert all(f"| `{option.flag}`" in text for option in OPTIONS)
