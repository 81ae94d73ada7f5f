"""What the README and the package's docstring show is what happens."""

import doctest
from pathlib import Path

import slab_pool


def test_the_readme_s_tour_runs():
    readme = Path(__file__).parent.parent / "README.md"
    result = doctest.testfile(str(readme), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted >= 20
    assert result.failed == 0


def test_the_package_s_tour_runs():
    result = doctest.testmod(slab_pool)
    assert result.attempted >= 10
    assert result.failed == 0


def test_every_exported_name_exists_and_is_listed_once():
    assert len(slab_pool.__all__) == len(set(slab_pool.__all__))
    for name in slab_pool.__all__:
        assert hasattr(slab_pool, name), name
