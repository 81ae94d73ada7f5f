"""Hypothesis profiles of the whole repository: the default one repeats itself, so that a run tells of the change it
tests and not of luck; ``--hypothesis-profile=long`` searches on."""

from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("long", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("default")
