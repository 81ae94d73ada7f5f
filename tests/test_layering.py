"""Imports point one way: serve -> engine -> index, pool, kernels. The nox sessions enforce it at run time as well, each
in an environment that holds nothing else; here a wrong import fails at once and is named."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"

# folder -> (import name, distribution, packages of ours it may import)
LAYERS = {
    "prefix_index": ("prefix_index", "prefix-index", ()),
    "slab_pool": ("slab_pool", "slab-pool", ()),
    "qwen35_kernels": ("qwen35_kernels", "qwen35-kernels", ()),
    "engine": ("qwen35_engine", "qwen35-engine", ("prefix_index", "slab_pool", "qwen35_kernels")),
    "serve": ("qwen35_serve", "qwen35-serve", ("qwen35_engine",)),
}
OURS = {name for name, _, _ in LAYERS.values()}

# The index hands out integers and the server handles text: neither may see a tensor.
FORBIDDEN = {"prefix_index": {"torch", "numpy"}, "serve": {"torch", "numpy"}}


def imported(path: Path) -> Iterator[str]:
    """Top-level names a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def wrong_imports(path: Path, folder: str) -> set[str]:
    own, _, allowed = LAYERS[folder]
    names = set(imported(path))
    return ((names & OURS) - {own, *allowed}) | (names & FORBIDDEN.get(folder, set()))


@pytest.mark.parametrize("folder", LAYERS)
def test_imports_point_one_way(folder: str) -> None:
    files = list((PACKAGES / folder / "src").rglob("*.py"))
    assert files
    wrong = {str(path.relative_to(PACKAGES)): names for path in files if (names := wrong_imports(path, folder))}
    assert not wrong


def test_a_wrong_import_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    import torch.nn\n    from qwen35_engine.cache import PrefixCache\n")
    assert wrong_imports(path, "prefix_index") == {"torch", "qwen35_engine"}


@pytest.mark.parametrize("folder", LAYERS)
def test_what_is_imported_of_ours_is_declared(folder: str) -> None:
    name, distribution, allowed = LAYERS[folder]
    project = tomllib.loads((PACKAGES / folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == distribution
    declared = {dependency.split(">")[0].split("=")[0].strip() for dependency in project["dependencies"]}
    needed = {LAYERS[other][1] for other in LAYERS if LAYERS[other][0] in allowed and other != folder}
    assert needed <= declared
    assert declared & {layer[1] for layer in LAYERS.values()} == needed
    if folder == "prefix_index":
        assert declared == {"xxhash"}
    assert (PACKAGES / folder / "src" / name / "py.typed").is_file()
