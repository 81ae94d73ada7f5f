"""Each package declares what it needs of the others. Which modules may import which is import-linter's to check, see
``pyproject.toml``; the nox sessions show at run time that nothing else is needed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"

# folder -> (import name, distribution, distributions of ours that it needs)
LAYERS = {
    "prefix_index": ("prefix_index", "prefix-index", set()),
    "slab_pool": ("slab_pool", "slab-pool", set()),
    "qwen35_kernels": ("qwen35_kernels", "qwen35-kernels", set()),
    "engine": ("qwen35_engine", "qwen35-engine", {"prefix-index", "slab-pool", "qwen35-kernels"}),
    "serve": ("qwen35_serve", "qwen35-serve", {"qwen35-engine"}),
}


@pytest.mark.parametrize("folder", LAYERS)
def test_what_is_needed_of_ours_is_declared(folder: str) -> None:
    name, distribution, needed = LAYERS[folder]
    project = tomllib.loads((PACKAGES / folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == distribution
    declared = {dependency.split(">")[0].split("=")[0].strip() for dependency in project["dependencies"]}
    assert declared & {layer[1] for layer in LAYERS.values()} == needed
    if folder == "prefix_index":
        assert declared == {"xxhash"}
    assert (PACKAGES / folder / "src" / name / "py.typed").is_file()


def test_every_package_is_under_a_contract() -> None:
    linter = tomllib.loads((PACKAGES.parent / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert set(linter["root_packages"]) == {name for name, _, _ in LAYERS.values()}
    assert linter["exclude_type_checking_imports"] is False
    assert {path.name for path in PACKAGES.iterdir() if path.is_dir()} == set(LAYERS)
