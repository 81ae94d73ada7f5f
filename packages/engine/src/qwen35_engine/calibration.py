"""What computing and copying take on this machine, measured; used to rank one way against another, never to decide
what is possible.

Prefill is measured at start with a few timed chunks and remembered in the user's cache folder; the rate of copies from
the Host comes from the restores themselves, as they land.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from prefix_index import CostModel
from qwen35_kernels import BLOCK_TOKENS

from .checkpoint.config import ModelConfig
from .memory import DeviceMemory
from .options import EffectiveOptions
from .user_files import cache_folder

__all__ = [
    "Calibration",
    "CopyRate",
    "RankingCost",
    "calibrate",
    "calibrate_model",
    "calibration_file",
    "measure_prefill",
    "remember",
]

logger = logging.getLogger(__name__)

RunChunk = Callable[[int, int], None]
"""Compute so many tokens (the second number) after a history (the first), and return when it is done."""

_FORMAT = 1
_REPEATS = 2
_LONG_SECONDS = 2.0
_HISTORY_CHUNKS = 4


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What of a ``CostModel`` depends on the machine; ``bytes_per_second`` is None until a restore has landed."""

    chunk_tokens: int
    chunk_seconds: float
    token_seconds: float
    pair_seconds: float
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        numbers = [self.chunk_seconds, self.token_seconds, self.pair_seconds]
        if self.bytes_per_second is not None:
            numbers.append(self.bytes_per_second)
        if self.chunk_tokens < 1 or not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(f"Calibration: every number must be finite and none negative, got {self!r}")
        if not any((self.chunk_seconds, self.token_seconds, self.pair_seconds)):
            raise ValueError(f"Calibration: prefill must take some time, got {self!r}")

    def cost_model(self) -> CostModel:
        default = CostModel()
        return CostModel(
            chunk_tokens=self.chunk_tokens,
            chunk_seconds=self.chunk_seconds,
            token_seconds=self.token_seconds,
            pair_seconds=self.pair_seconds,
            bytes_per_second=self.bytes_per_second or default.bytes_per_second,
        )


def measure_prefill(
    run: RunChunk,
    *,
    chunk_tokens: int,
    max_history: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Time a quarter of a chunk, a chunk, and a chunk after a history, and solve for the three coefficients.

    Each is run twice and the quicker time counts, so that neither a first call nor a neighbour does. Where the quarter
    alone takes seconds, the rest is not run: tokens are then all that is charged.

    Args:
        run: the forward pass.
        chunk_tokens: tokens of a whole chunk.
        max_history: tokens of history that ``run`` can do with; 0 leaves out what attention to a history costs.
        clock: gives seconds.
    """

    def seconds(base: int, num_tokens: int) -> float:
        times = []
        for _ in range(_REPEATS):
            begin = clock()
            run(base, num_tokens)
            times.append(clock() - begin)
            if times[-1] > _LONG_SECONDS:
                break
        return min(times)

    quarter = max(1, chunk_tokens // 4)
    short = seconds(0, quarter)
    if short > _LONG_SECONDS or quarter == chunk_tokens:
        return Calibration(
            chunk_tokens=chunk_tokens, chunk_seconds=0.0, token_seconds=short / quarter, pair_seconds=0.0
        )
    whole = seconds(0, chunk_tokens)
    history = min(max_history, _HISTORY_CHUNKS * chunk_tokens)
    per_pair = 0.0
    if history > 0:
        # After a history each token meets all of it; nothing else differs.
        per_pair = max(0.0, seconds(history, chunk_tokens) - whole) / (history * chunk_tokens)
    own_pairs = [length * (length + 1) // 2 for length in (quarter, chunk_tokens)]
    alone = [time_ - pairs * per_pair for time_, pairs in zip((short, whole), own_pairs, strict=True)]
    per_token = max(0.0, alone[1] - alone[0]) / (chunk_tokens - quarter)
    if not per_token:  # noise, or a machine that a whole chunk does not fill
        per_token, per_pair, alone = whole / chunk_tokens, 0.0, [short, whole]
    return Calibration(
        chunk_tokens=chunk_tokens,
        chunk_seconds=max(0.0, alone[0] - quarter * per_token),
        token_seconds=per_token,
        pair_seconds=per_pair,
    )


class CopyRate:
    """A running estimate of bytes per second, from copies that have landed; a byte counts half as much as one that was
    copied a gibibyte later. Batches below a mebibyte say nothing of the rate and do not count."""

    _SMALLEST = 1 << 20
    _HALF = 1 << 30

    def __init__(self, bytes_per_second: float | None = None) -> None:
        """``bytes_per_second`` is believed as if a gibibyte had just been copied at that rate."""
        self._weight = 0.0
        self._seconds = 0.0  # a byte's, times the weight
        if bytes_per_second is not None:
            self._count(self._HALF, self._HALF / bytes_per_second)

    def add(self, num_bytes: int, seconds: float) -> None:
        """A batch has landed. One that took no measurable time does not count."""
        if num_bytes >= self._SMALLEST and seconds > 0:
            self._count(num_bytes, seconds)

    def _count(self, num_bytes: int, seconds: float) -> None:
        old: float = 0.5 ** (num_bytes / self._HALF)
        self._weight = old * self._weight + (1 - old)
        self._seconds = old * self._seconds + (1 - old) * seconds / num_bytes

    @property
    def bytes_per_second(self) -> float | None:
        """None while nothing is known."""
        return self._weight / self._seconds if self._weight else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingCost(CostModel):
    """A cost model whose rate of copies follows ``copies``. For choices made on the spot; what keeps a value that it
    has worked out, as the index does, takes a plain ``CostModel``, which stays as it is."""

    copies: CopyRate

    @classmethod
    def of(cls, model: CostModel, copies: CopyRate) -> RankingCost:
        return cls(**asdict(model), copies=copies)

    def restore_seconds(self, num_bytes: int) -> float:
        rate = self.copies.bytes_per_second or self.bytes_per_second
        return self.batch_seconds + num_bytes / rate if num_bytes else 0.0


def calibration_file(folder: Path, *what: object) -> Path:
    """Where the calibration of exactly this is kept: ``what`` is all it depends on, each with a telling ``repr``."""
    digest = hashlib.sha256(repr((_FORMAT, *what)).encode()).hexdigest()[:16]
    return folder / f"calibration-{digest}.json"


def calibrate(path: Path, measure: Callable[[], Calibration]) -> Calibration:
    """What ``path`` remembers, or else what ``measure`` says, which is then remembered. A file that cannot be read, or
    does not make sense, is measured anew."""
    try:
        return Calibration(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        measured = measure()
    logger.info("calibrated: %s", measured)
    remember(path, measured)
    return measured


def remember(path: Path, calibration: Calibration, copies: CopyRate | None = None) -> None:
    """Keep it for the next start, with the rate of ``copies`` if it is known. Written beside and renamed; a folder that
    cannot be written costs a measurement, nothing else."""
    rate = copies.bytes_per_second if copies is not None else None
    if rate is not None:
        calibration = replace(calibration, bytes_per_second=rate)
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(calibration), file)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


class ChunkModel(Protocol):
    """What calibrating needs of a model; see ``model.qwen35.Qwen35Model.prefill``."""

    def prefill(self, *, tokens: Tensor, base: int, block_table: Tensor, slot: int) -> Tensor: ...


def calibrate_model(
    model: ChunkModel, memory: DeviceMemory, config: ModelConfig, options: EffectiveOptions
) -> tuple[Path, Calibration]:
    """Calibrate a model whose pages and slots are not in use yet; what they hold afterwards is arbitrary.

    Returns:
        Where it is remembered, and what.
    """
    device = memory.pages.device
    longest = min(options.max_context, (memory.pages.shape[0] - 1) * BLOCK_TOKENS)
    chunk = min(options.prefill_chunk, longest)
    history = min(longest - chunk, _HISTORY_CHUNKS * chunk)
    table = torch.arange(1, 1 - (-(history + chunk) // BLOCK_TOKENS), device=device)

    def run(base: int, num_tokens: int) -> None:
        memory.clear_state(1)
        tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        model.prefill(tokens=tokens, base=base, block_table=table, slot=1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def measure() -> Calibration:
        threads = torch.get_num_threads()
        torch.set_num_threads(options.threads)
        memory.pages[1 : 1 + len(table)].zero_()  # a history of numbers, whatever lay there
        try:
            return measure_prefill(run, chunk_tokens=chunk, max_history=history)
        finally:
            torch.set_num_threads(threads)

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else (platform.machine(), os.cpu_count())
    how = (torch.__version__, options.threads, options.dtype, options.kv_dtype, chunk, history)
    path = calibration_file(cache_folder(), config, where, *how)
    return path, calibrate(path, measure)
