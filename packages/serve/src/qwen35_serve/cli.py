"""``qwen35-serve``: read the command line, load the model, serve until told to stop."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import uvicorn

from qwen35_engine import CheckpointError, Engine, EngineOptions, OptionError, RequestLog
from qwen35_engine.demo import demo_folder

from .app import create_app
from .errors import SettingsError
from .settings import OPTIONS, Given, Option, ServerSettings, command_line, nearest
from .text import ChatText

__all__ = ["main"]

_USAGE_ERROR = 2
_GRACE_SECONDS = 5
_BACKLOG = 2048


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until a signal stops it.

    Args:
        arguments: the words after the program's name; None takes those of the process.

    Returns:
        The exit code: 0 after an orderly stop, 2 where it cannot start as asked, which one line says.
    """
    try:
        given = _read(sys.argv[1:] if arguments is None else arguments)
        try:
            settings = given.settings()
            level = settings.log_level.upper()
            logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
            _serve(settings)
        except OptionError as error:
            raise SettingsError(given.complaint(error)) from error
    except (CheckpointError, SettingsError) as error:
        print(f"qwen35-serve: {error}", file=sys.stderr)
        return _USAGE_ERROR
    return 0


class _Parser(argparse.ArgumentParser):
    """Complains in one line, as everything else here does."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _parser() -> argparse.ArgumentParser:
    """A flag for each option. All values stay as they were typed: the settings know what they may be."""
    parser = _Parser(
        prog="qwen35-serve",
        usage="%(prog)s --model MODEL [options]",
        description="Serve a Qwen3.5 model over an OpenAI-compatible API, with exact prefix reuse.",
        epilog="Each option may also come from the environment (QWEN35_MAX_CONTEXT=4096) or from a TOML file"
        " (max_context = 4096). A flag counts more than a variable, a variable more than the file.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with further options; also QWEN35_CONFIG")
    server, engine = parser.add_argument_group("server"), parser.add_argument_group("engine")
    for option in OPTIONS:
        add = (engine if option.field in EngineOptions.model_fields else server).add_argument
        if option.is_switch:
            add(option.flag, dest=option.field, action=argparse.BooleanOptionalAction, help=_help(option))
        else:
            add(option.flag, dest=option.field, metavar=_placeholder(option), help=_help(option))
    return parser


def _placeholder(option: Option) -> str:
    if option.choices:
        return f"{{{','.join(option.choices)}}}"
    if option.kind in (int, float):
        return "N"
    return "PATH" if option.kind is Path else option.name.split("_")[-1].upper()


def _help(option: Option) -> str:
    """The description, with a range that has two ends and a default that is not derived."""
    notes = [option.values] if " to " in option.values else []
    if option.default is not None:
        notes.append(f"default: {option.default}")
    text = option.description.replace("`", "")
    return (f"{text[:-1]} ({'; '.join(notes)})." if notes else text).replace("%", "%%")


def _read(arguments: Sequence[str]) -> Given:
    parser = _parser()
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].split("=")[0]
        known = [flag for option in OPTIONS for flag in (option.flag, option.off_flag)]
        raise SettingsError(f"{name} is not an option{nearest(name, known)}")
    values = vars(flags)
    config = values.pop("config", None)
    return Given.read(values, os.environ, config)


def _serve(settings: ServerSettings) -> None:
    is_demo = settings.model == "demo"
    folder = demo_folder() if is_demo else Path(settings.model).absolute()
    name = settings.served_model_name or ("demo" if is_demo else folder.name)
    with contextlib.ExitStack() as stack:
        # The port and the log come before the model: what cannot be had should not cost a minute to find out.
        listener = stack.enter_context(_listen(settings.host, settings.port))
        path = settings.request_log_jsonl
        log = None if path is None else stack.enter_context(RequestLog(path))
        engine = stack.enter_context(Engine.from_folder(folder, settings, on_request=log))
        text = ChatText(folder, vocab_size=engine.config.vocab_size)
        app = create_app(engine, text, model_name=name, created=int(time.time()), request_log=log)
        config = uvicorn.Config(
            app,
            log_level=settings.log_level,
            access_log=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            lifespan="off",
        )
        server = uvicorn.Server(config)
        _stop_on_signals(server)
        _print_start(settings, engine)
        _print_address(listener, settings.host, name)
        server.run(sockets=[listener])


def _stop_on_signals(server: uvicorn.Server) -> None:
    """Have the server stop also on a signal that comes before it listens for signals itself.

    At its end it raises the signals that stopped it once more: there is nothing left to interrupt by then, and the
    engine is still to be closed.
    """

    def stop(*_: object) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _listen(host: str, port: int) -> socket.socket:
    with contextlib.ExitStack() as on_failure:
        try:
            family, kind, proto, _name, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = on_failure.enter_context(socket.socket(family, kind, proto))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise SettingsError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
        on_failure.pop_all()
    return listener


def _print_start(settings: ServerSettings, engine: Engine) -> None:
    """Where the memory went, and every choice in force as a command line that starts the same server."""
    ledger = engine.ledger()
    for tier in ("device", "host"):
        for entry in ledger.entries:
            if entry.tier == tier:
                print(f"{entry.what:<12} {entry.num_bytes / 2**20:10.1f} MiB")
        print(f"{tier + ' in all':<12} {ledger.total_bytes(tier) / 2**20:10.1f} MiB\n")
    if ledger.free_bytes is not None:
        print(f"{'device left':<12} {ledger.free_bytes / 2**20:10.1f} MiB\n")
    in_force = settings.model_copy(update=engine.options.model_dump())
    print(f"In force: {shlex.join(command_line(in_force))}\n", flush=True)


def _print_address(listener: socket.socket, host: str, name: str) -> None:
    port = listener.getsockname()[1]
    at = f"[{host}]" if ":" in host else host
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 32,
        "reasoning_effort": "none",
    }
    print(f"Serving {name} at http://{at}:{port}/v1 - try:\n", flush=True)
    print(
        f"curl http://{at}:{port}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"  -d '{json.dumps(body)}'\n",
        flush=True,
    )
