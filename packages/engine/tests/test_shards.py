"""Where tensors lie, and reading them straight to their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qwen35_engine import CheckpointError
from qwen35_engine.checkpoint.shards import Shards

INDEX = "model.safetensors.index.json"


def two_shards(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0), "c": torch.full((2, 2), 7.0)}
    save_file({"a": tensors["a"], "b": tensors["b"]}, folder / "one.safetensors")
    save_file({"c": tensors["c"]}, folder / "two.safetensors")
    return tensors


def write_index(folder: Path, places: dict[str, object]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


PLACES: dict[str, object] = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}


@pytest.mark.parametrize("indexed", [False, True])
def test_tensors_reach_their_places(tmp_path: Path, indexed: bool) -> None:
    tensors = two_shards(tmp_path)
    if indexed:
        write_index(tmp_path, PLACES)
    shards = Shards.of_folder(tmp_path)
    assert set(shards.names()) == set(tensors)
    assert shards["a"].shape == (2, 3)
    # A part of a larger stack, and another dtype.
    stack = torch.full((4, 3), -1.0)
    half = torch.empty(2, 2, dtype=torch.bfloat16)
    shards.read_into({"a": stack[1:3], "c": half})
    assert torch.equal(stack[1:3], tensors["a"])
    assert (stack[[0, 3]] == -1).all()
    assert (half == 7).all()


def test_an_index_hides_other_files(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    write_index(tmp_path, PLACES)
    assert Shards.of_folder(tmp_path)["a"].shape == (2, 3)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        Shards.of_folder(tmp_path)


def test_a_missing_shard_is_named_with_a_tensor(tmp_path: Path) -> None:
    two_shards(tmp_path)
    write_index(tmp_path, PLACES)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors: missing shard, needed for tensor c"):
        Shards.of_folder(tmp_path)


def test_a_tensor_that_is_not_where_the_index_says(tmp_path: Path) -> None:
    two_shards(tmp_path)
    write_index(tmp_path, PLACES | {"d": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"two\.safetensors: tensor d is missing"):
        Shards.of_folder(tmp_path)
    write_index(tmp_path, PLACES | {"c": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor b is missing, though"):
        Shards.of_folder(tmp_path)


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"c": torch.zeros(1)}, tmp_path / "three.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors: tensor c lies in three\.safetensors too"):
        Shards.of_folder(tmp_path)


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", "sub/one.safetensors", 3])
def test_an_index_that_points_outside_the_folder(tmp_path: Path, place: object) -> None:
    two_shards(tmp_path)
    write_index(tmp_path, PLACES | {"c": place})
    with pytest.raises(CheckpointError, match="weight_map of tensor c must name a file of the folder"):
        Shards.of_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        Shards.of_folder(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    two_shards(tmp_path)
    path = tmp_path / "one.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"one\.safetensors: not readable as safetensors"):
        Shards.of_folder(tmp_path)
