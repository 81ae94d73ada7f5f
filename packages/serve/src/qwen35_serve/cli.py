"""``qwen35-serve``: read the command line, load the model, serve until told to stop."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from qwen35_engine import CheckpointError, Engine, EngineOptions, OptionError, RequestLog
from qwen35_engine.demo import demo_folder

from .app import create_app
from .text import ChatText

__all__ = ["main"]

_USAGE_ERROR = 2
_GRACE_SECONDS = 5
_BACKLOG = 2048

# Flags whose values are the engine's own, with the option each one sets.
_OPTIONS = {
    "--device": "device",
    "--dtype": "dtype",
    "--threads": "threads",
    "--max-context": "max_context",
    "--max-concurrency": "max_concurrency",
    "--max-pending-requests": "max_pending",
    "--prefill-chunk": "prefill_chunk",
    "--kv-capacity": "kv_capacity",
    "--device-snapshot-slots": "device_snapshot_slots",
    "--host-cache-mib": "host_cache_mib",
    "--cache-taps-per-request": "max_new_taps",
    "--cache-tap-ladder": "tap_ladder_tokens",
    "--cache-tap-min-gap": "tap_min_gap_tokens",
}
_KV_DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp32": "float32"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server. Returns the exit code: 0 after an orderly stop, 2 when it cannot start as asked."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        return _serve(args)
    except (CheckpointError, OptionError, _CannotListen) as error:
        print(f"qwen35-serve: {error}", file=sys.stderr)
        return _USAGE_ERROR


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Appends defaults that are values; those that are derived are told in words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qwen35-serve",
        description="Serve a Qwen3.5 model over an OpenAI-compatible API, with exact prefix reuse.",
        formatter_class=_Help,
    )
    add = parser.add_argument
    add("--model", required=True, help="a model folder in the Hugging Face layout, or 'demo'")
    add("--served-model-name", default=None, help="the name clients use; by default the folder's")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8080, help="port to listen on, 0 for any free one")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to compute")
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="of weights and activations",
    )
    add("--kv-dtype", default="auto", choices=tuple(_KV_DTYPES), help="of keys and values; by default as --dtype")
    add("--threads", type=int, default=None, help="CPU threads of a forward pass; by default torch decides")
    add(
        "--max-context",
        type=int,
        default=None,
        help="tokens of the longest sequence; by default the model's, at most 32768 and at most --kv-capacity",
    )
    add(
        "--max-concurrency",
        type=int,
        default=EngineOptions.max_concurrency,
        help="sequences that run at once, 1 to 256",
    )
    add("--max-pending-requests", type=int, default=EngineOptions.max_pending, help="requests that may wait")
    add("--pending-timeout-ms", type=int, default=600_000, help="milliseconds a request may wait to start")
    add(
        "--prefill-chunk",
        type=int,
        default=EngineOptions.prefill_chunk,
        help="prompt tokens computed in one step",
    )
    add(
        "--kv-capacity",
        type=int,
        default=None,
        help="tokens of KV in all, at least --max-context; by default 1 GiB of it on a CPU, 85 %% of what is free, less"
        " the states, on CUDA",
    )
    add(
        "--device-snapshot-slots",
        type=int,
        default=None,
        help="states the cache keeps; by default --max-concurrency + 5, fewer with few taps",
    )
    add(
        "--host-cache-mib",
        type=int,
        default=None,
        help="MiB of Host memory for the cache, 0 for none; by default 1024 on a CPU, 8192 on CUDA",
    )
    add(
        "--cache-taps-per-request",
        type=int,
        default=None,
        help="snapshots a prompt may plan; by default 8, without Host memory 2",
    )
    add(
        "--cache-tap-ladder",
        type=int,
        default=None,
        help="tokens from the end to the ladder's first snapshot; by default 4096 or two chunks, whichever is more",
    )
    add(
        "--cache-tap-min-gap",
        type=int,
        default=None,
        help="tokens between the ladder's snapshots at least; by default 1024 or a chunk, whichever is more",
    )
    add("--no-prefix-reuse", action="store_true", help="compute every prompt from its first token")
    add(
        "--no-calibrate",
        action="store_true",
        help="do not time a few chunks at the first start; cached prefixes are then ranked as on a fast accelerator",
    )
    add(
        "--request-log-jsonl",
        default=None,
        metavar="PATH",
        help="append a line of JSON for each request that ends; by default none",
    )
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="what to log")
    return parser


def _serve(args: argparse.Namespace) -> int:
    folder = demo_folder() if args.model == "demo" else Path(args.model).absolute()
    name = args.served_model_name or (args.model if args.model == "demo" else folder.name)
    with contextlib.ExitStack() as stack:
        # The port and the log come before the model: what cannot be had should not cost a minute to find out.
        listener = stack.enter_context(_listen(args.host, args.port))
        log = stack.enter_context(RequestLog(args.request_log_jsonl)) if args.request_log_jsonl is not None else None
        engine = stack.enter_context(Engine.from_folder(folder, _options(args), on_request=log))
        text = ChatText(folder, vocab_size=engine.config.vocab_size)
        app = create_app(engine, text, model_name=name, created=int(time.time()), request_log=log)
        config = uvicorn.Config(
            app,
            log_level=args.log_level,
            access_log=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            lifespan="off",
        )
        server = uvicorn.Server(config)
        _stop_on_signals(server)
        _print_start(engine)
        _print_address(listener, args.host, name)
        server.run(sockets=[listener])
    return 0


def _stop_on_signals(server: uvicorn.Server) -> None:
    """Have the server stop also on a signal that comes before it listens for signals itself.

    It raises those that stopped it once more at its end: there is nothing left to interrupt by then, and the engine is
    still to be closed.
    """

    def stop(*_: object) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


class _CannotListen(Exception):
    pass


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise _CannotListen(f"--port must be between 0 and 65535, got {port}")
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
            raise _CannotListen(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
        on_failure.pop_all()
    return listener


def _print_start(engine: Engine) -> None:
    """Where the memory went, and every choice in force as the flags that would make it."""
    ledger = engine.ledger()
    for tier in ("device", "host"):
        for entry in ledger.entries:
            if entry.tier == tier:
                print(f"{entry.what:<12} {entry.num_bytes / 2**20:10.1f} MiB")
        print(f"{tier + ' in all':<12} {ledger.total_bytes(tier) / 2**20:10.1f} MiB\n")
    if ledger.free_bytes is not None:
        print(f"{'device left':<12} {ledger.free_bytes / 2**20:10.1f} MiB\n")
    print(f"In force: {shlex.join(_flags(engine.options.as_options()))}\n", flush=True)


def _options(args: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        **{option: getattr(args, flag.removeprefix("--").replace("-", "_")) for flag, option in _OPTIONS.items()},
        kv_dtype=_KV_DTYPES[args.kv_dtype],
        pending_timeout_seconds=args.pending_timeout_ms / 1000,
        prefix_reuse=not args.no_prefix_reuse,
        calibrate=not args.no_calibrate,
    )


def _flags(options: EngineOptions) -> list[str]:
    """The command line that leads to these options."""
    values = {flag: getattr(options, option) for flag, option in _OPTIONS.items()}
    values["--kv-dtype"] = next(flag for flag, name in _KV_DTYPES.items() if name == options.kv_dtype)
    values["--pending-timeout-ms"] = round(options.pending_timeout_seconds * 1000)
    words = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
    if not options.calibrate:
        words.append("--no-calibrate")
    return words if options.prefix_reuse else [*words, "--no-prefix-reuse"]


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
