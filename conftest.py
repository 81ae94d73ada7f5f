"""What holds for every test of the repository.

Hypothesis: the default profile repeats itself, so that a run tells of the change it tests and not of luck;
``share`` does so with more examples, and ``--hypothesis-profile=long`` searches on. Files and
variables: what a user keeps between runs is neither read nor written.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("share", deadline=None, derandomize=True, max_examples=200, print_blob=True)
settings.register_profile("long", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("default")


@pytest.fixture(scope="session", autouse=True)
def _environment_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Also for the processes that tests start: a cache folder of their own, and no settings of the server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name in list(os.environ):
            if name.startswith("QWEN35_") and name != "QWEN35_KERNELS_BACKEND":
                patch.delenv(name)
        yield
