"""The server's settings: what may be set, the names by which it is set, and where each value came from.

A setting is one field of ``ServerSettings``, which adds the server's own to the engine's options. Its flag, its
variable, its key in a file, its help and its row in the README are made from that field. A flag counts more than a
variable, a variable more than the file, the file more than the default.

The three sources are read here, in a few lines: pydantic-settings merges them before it checks the values, so that a
complaint could not name the flag, variable or key at fault.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from qwen35_engine import EngineOptions, OptionError

from .errors import SettingsError

__all__ = ["OPTIONS", "Given", "Option", "ServerSettings", "command_line", "nearest"]

_PREFIX = "QWEN35_"
_CONFIG_VARIABLE = f"{_PREFIX}CONFIG"

# Options of the engine that the server calls otherwise.
_NAMES = {
    "max_pending": "max_pending_requests",
    "pending_timeout_seconds": "pending_timeout_ms",
    "max_new_taps": "cache_taps_per_request",
    "tap_ladder_tokens": "cache_tap_ladder",
    "tap_min_gap_tokens": "cache_tap_min_gap",
}
_MILLISECONDS = "pending_timeout_seconds"
_SHORT = {"float32": "fp32", "bfloat16": "bf16"}
_LONG = {short: long for long, short in _SHORT.items()}


class ServerSettings(EngineOptions):
    """The engine's options and the server's own. A field that holds a secret must say ``repr=False``: its value is then
    neither printed as in force nor repeated in a complaint."""

    model: str = Field(description="A model folder in the Hugging Face layout, or `demo`.")
    served_model_name: str | None = Field(default=None, description="The name clients use; by default the folder's.")
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8080, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    request_log_jsonl: Path | None = Field(
        default=None, description="Append a line of JSON to this file for each request that ends; by default none."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="What to log.")


@dataclass(frozen=True)
class Option:
    """How one field of the settings is spelled outside Python.

    Attributes:
        field: its name in ``ServerSettings``.
        name: its key in a file; flag and variable are made of it.
    """

    field: str
    name: str

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def off_flag(self) -> str:
        """The flag that switches it off, of a switch."""
        return f"--no-{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return _PREFIX + self.name.upper()

    @property
    def info(self) -> FieldInfo:
        """The field itself."""
        return ServerSettings.model_fields[self.field]

    @property
    def kind(self) -> Any:
        """The type of its values; the first of them where only some words are allowed."""
        annotation = self.info.annotation
        return next(kind for kind in (*get_args(annotation), annotation) if kind is not type(None))

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that are allowed, of an option that takes only some."""
        if not isinstance(self.kind, str):
            return ()
        return tuple(_SHORT.get(word, word) for word in get_args(self.info.annotation))

    @property
    def description(self) -> str:
        """What it does. Other options stand in it by their flags, between backquotes."""
        text = self.info.description or ""
        flags = {option.field: option.flag for option in OPTIONS}
        return re.sub(r"`(\w+)`", lambda found: f"`{flags.get(found[1], found[1])}`", text)

    @property
    def values(self) -> str:
        """The values it takes, in a few words."""
        if self.choices:
            return ", ".join(self.choices)
        text = ServerSettings.allowed(self.field)
        if self.field == _MILLISECONDS:
            return "1 to 86400000"
        found = re.fullmatch(r"between (\d+) and (\d+)", text)
        if found is None:
            return text
        return f"{found[1]} to {found[2]}" if len(found[2]) < 6 else f"{found[1]} or more"

    @property
    def default(self) -> str | None:
        """None where it is derived from something else, or must be given."""
        value = None if self.info.is_required() else self.info.get_default()
        if self.is_switch:
            return "on" if value else "off"
        return None if value is None else self.write(value)

    def parse(self, text: str) -> object:
        """The value that a flag or a variable says. What cannot be one is left as it is, for the settings to refuse."""
        if self.kind not in (int, float, bool):
            return self.take(text)
        try:
            return self.take(TypeAdapter(self.kind).validate_strings(text))
        except ValidationError:
            return text

    def take(self, value: object) -> object:
        """The field's value, for one in the units and words of a file."""
        if self.field == _MILLISECONDS and isinstance(value, int | float) and not isinstance(value, bool):
            return value / 1000
        if self.kind is Path and isinstance(value, str):
            return Path(value)
        return _LONG.get(value, value) if self.choices and isinstance(value, str) else value

    def write(self, value: Any) -> str:
        """The text that ``parse`` reads as ``value``."""
        if self.field == _MILLISECONDS:
            milliseconds = round(value * 1000, 6)
            return str(int(milliseconds) if milliseconds == int(milliseconds) else milliseconds)
        return _SHORT.get(value, str(value)) if self.choices else str(value)

    def words(self, value: Any) -> list[str]:
        """The words of a command line that set ``value``; none for None."""
        if value is None:
            return []
        return [self.flag if value else self.off_flag] if self.is_switch else [self.flag, self.write(value)]


# The server's own first.
OPTIONS = tuple(
    Option(field, _NAMES.get(field, field))
    for field in sorted(ServerSettings.model_fields, key=lambda field: field in EngineOptions.model_fields)
)
_BY_NAME = {option.name: option for option in OPTIONS}
_BY_FIELD = {option.field: option for option in OPTIONS}


class Given:
    """What flags, variables and a file say, and which of them said it."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}
        self._said_by: dict[str, str] = {}

    @classmethod
    def read(cls, flags: Mapping[str, str | bool], environment: Mapping[str, str], config: str | None) -> Given:
        """Collect the values; a later source replaces what an earlier one said.

        Args:
            flags: values by field, as they were typed; a switch is True or False.
            environment: the process's variables. Empty ones and those of nothing here are passed over.
            config: a TOML file; None takes the one that the environment names, if it names one.

        Raises:
            SettingsError: the file cannot be read, or has a key that is no setting.
        """
        given = cls()
        config = config or environment.get(_CONFIG_VARIABLE)
        if config:
            for name, value in _read_file(config).items():
                option = _BY_NAME[name]
                given._set(option, option.take(value), said_by=f"{config}: {name}")
        for option in OPTIONS:
            if text := environment.get(option.variable):
                given._set(option, option.parse(text), said_by=option.variable)
        for field, typed in flags.items():
            option = _BY_FIELD[field]
            if isinstance(typed, bool):
                given._set(option, typed, said_by=option.flag if typed else option.off_flag)
            else:
                given._set(option, option.parse(typed), said_by=option.flag)
        return given

    def settings(self) -> ServerSettings:
        """Check the values.

        Raises:
            OptionError: the first that cannot hold; see ``complaint``.
        """
        return ServerSettings(**self._values)  # type: ignore[arg-type]

    def complaint(self, error: OptionError) -> str:
        """What is wrong, under the name by which the option was set."""
        option = _BY_FIELD.get(error.option or "")
        if option is None:
            return str(error)
        unit = ", in seconds," if option.field == _MILLISECONDS else ""
        return f"{self._said_by.get(option.field, option.flag)}{unit} {error.complaint}"

    def _set(self, option: Option, value: object, *, said_by: str) -> None:
        self._values[option.field] = value
        self._said_by[option.field] = said_by


def command_line(settings: ServerSettings) -> list[str]:
    """The words that start a server with these settings, secrets apart."""
    shown = [option for option in OPTIONS if type(settings).model_fields[option.field].repr]
    return ["qwen35-serve", *(word for option in shown for word in option.words(getattr(settings, option.field)))]


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a complaint about an unknown name."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _read_file(path: str) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            table: dict[str, object] = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"{path}: {os.strerror(error.errno or 0)}") from None
    except ValueError as error:
        raise SettingsError(f"{path}: not TOML: {error}") from None
    for name in table:
        if name not in _BY_NAME:
            raise SettingsError(f"{path}: {name} is not an option{nearest(name, _BY_NAME)}")
    return table
