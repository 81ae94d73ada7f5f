"""The safetensors files of a model folder: which tensor lies where, and reading one straight to its place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError

__all__ = ["Shards", "StoredTensor"]

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a folder: the file it lies in and its shape there."""

    name: str
    path: Path
    shape: tuple[int, ...]


class Shards:
    """All tensors of a folder's ``*.safetensors`` files, by name. Opens files one at a time and keeps none open."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = dict(tensors)

    @classmethod
    def of_folder(cls, folder: Path) -> Shards:
        """Read the headers. With an index file, exactly the shards it names; without, every ``*.safetensors``.

        Raises:
            CheckpointError: no file, a shard named by the index is missing or unreadable, a tensor that the index
                places in a shard is not there, or one tensor lies in two files.
        """
        index_path = folder / _INDEX
        expected: dict[str, str] = {}
        if index_path.is_file():
            expected = _read_index(index_path)
            paths = [folder / name for name in sorted(set(expected.values()))]
        else:
            paths = sorted(folder.glob("*.safetensors"))
            if not paths:
                raise CheckpointError(f"{folder}: no *.safetensors file")
        tensors: dict[str, StoredTensor] = {}
        for path in paths:
            if not path.is_file():
                missing = next(name for name, shard in expected.items() if shard == path.name)
                raise CheckpointError(f"{path}: missing shard, needed for tensor {missing}")
            for stored in _read_header(path):
                if stored.name in tensors:
                    raise CheckpointError(f"{path}: tensor {stored.name} lies in {tensors[stored.name].path.name} too")
                tensors[stored.name] = stored
        for name, shard in expected.items():
            if name not in tensors or tensors[name].path.name != shard:
                raise CheckpointError(f"{folder / shard}: tensor {name} is missing, though {_INDEX} places it there")
        return cls(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def read_into(self, destinations: Mapping[str, torch.Tensor]) -> None:
        """Copy each named tensor into its destination (same shape; the dtype is converted in the copy).

        One file is open at a time and its tensors are memory-mapped views, so that no second copy of the model exists.

        Raises:
            CheckpointError: a file cannot be read.
        """
        by_file: dict[Path, list[str]] = {}
        for name in destinations:
            by_file.setdefault(self._tensors[name].path, []).append(name)
        for path, names in by_file.items():
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for name in names:
                        destinations[name].copy_(file.get_tensor(name))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: not readable as safetensors: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not readable as an index with a weight_map: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be a non-empty object")
    for name, shard in weight_map.items():
        # A shard lies in the folder itself; anything else could read outside it.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path}: weight_map of tensor {name} must name a file of the folder, got {shard!r}")
    return weight_map


def _read_header(path: Path) -> Iterator[StoredTensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open has keys() but is no mapping
                yield StoredTensor(name, path, tuple(file.get_slice(name).get_shape()))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors: {error}") from error
