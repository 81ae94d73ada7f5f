"""What each package shows is what ``__all__`` says, and all of it is documented."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect

import pytest

PACKAGES = {
    "prefix_index": "prefix-index",
    "slab_pool": "slab-pool",
    "qwen35_kernels": "qwen35-kernels",
    "qwen35_engine": "qwen35-engine",
    "qwen35_serve": "qwen35-serve",
}


@pytest.mark.parametrize("name", PACKAGES)
def test_every_exported_name_exists_and_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__) > 0
    undocumented = [
        exported
        for exported in module.__all__
        if (inspect.isclass(value := getattr(module, exported)) or inspect.isfunction(value)) and not value.__doc__
    ]
    assert not undocumented


@pytest.mark.parametrize("name", PACKAGES)
def test_the_installed_distribution_has_a_version_and_types(name: str) -> None:
    distribution = importlib.metadata.distribution(PACKAGES[name])
    assert distribution.version
    assert any(str(file) == f"{name}/py.typed" for file in distribution.files or ())
