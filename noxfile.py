"""Everything that checks this repository. ``nox`` runs what every change must pass; ``nox -l`` lists the rest.

Each package is tested in an environment that holds what the package declares and nothing else, so that an import
against the direction (serve -> engine -> index, pool, kernels) fails there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import nox

nox.needs_version = ">=2024.4"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.stop_on_first_error = False

ROOT = Path(__file__).parent


@dataclass(frozen=True)
class Package:
    """A folder under packages/ and the packages of ours that it declares."""

    name: str
    needs: tuple[str, ...] = ()


PACKAGES = {
    package.name: package
    for package in (
        Package("prefix_index"),
        Package("slab_pool"),
        Package("qwen35_kernels"),
        Package("engine", ("prefix_index", "slab_pool", "qwen35_kernels")),
        Package("serve", ("prefix_index", "slab_pool", "qwen35_kernels", "engine")),
    )
}
STACK = "stack"

STATE_MACHINES = (
    "packages/prefix_index/tests/test_stateful.py",
    "packages/slab_pool/tests/test_pool.py",
    "packages/engine/tests/test_loop.py",
)

# What a change does not have to wait for; see the markers in pyproject.toml.
SLOW = ("soak", "compile", "readme")
QUICK = " and ".join(f"not {marker}" for marker in SLOW)


def install(session: nox.Session, *packages: str, tests_of: tuple[str, ...] = (), extra: tuple[str, ...] = ()) -> None:
    """Install packages from this checkout in one resolution, so that siblings come from here and not from an index."""
    paths = [f"./packages/{name}" + ("[test]" if name in tests_of else "") for name in packages]
    # Most of what torch and transformers bring is never imported here; compiling all of it takes a minute each time.
    session.install("--no-compile", "-c", "constraints.txt", *paths, *extra)


def pytest(session: nox.Session, *arguments: str) -> None:
    session.run("python", "-m", "pytest", *arguments, *session.posargs, env={"TOKENIZERS_PARALLELISM": "false"})


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and format. import-linter: the contracts between the packages and inside them."""
    session.install("-c", "constraints.txt", "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    sources = os.pathsep.join(str(ROOT / "packages" / name / "src") for name in PACKAGES)  # read, never imported
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})


@nox.session
def types(session: nox.Session) -> None:
    """mypy over every package's source and the benchmarks."""
    install(session, *PACKAGES, extra=("mypy", "nox"))
    session.run("mypy", *(f"packages/{name}/src" for name in PACKAGES), "benchmarks")


@nox.session
@nox.parametrize("part", [nox.param(name, id=name) for name in (*PACKAGES, STACK)])
def tests(session: nox.Session, part: str) -> None:
    """One package's own tests, or (stack) those across packages and of the benchmarks."""
    if part == STACK:
        install(session, *PACKAGES, tests_of=tuple(PACKAGES))
        # The index alone needs neither torch nor transformers; its example with both runs here.
        pytest(session, "-m", QUICK, "tests", "packages/prefix_index/tests/test_examples.py")
        return
    install(session, *PACKAGES[part].needs, part, tests_of=(part,))
    pytest(session, "-m", QUICK, f"packages/{part}/tests")


@nox.session(default=False)
@nox.parametrize("marker", [nox.param(marker, id=marker) for marker in SLOW])
def slow(session: nox.Session, marker: str) -> None:
    """One kind of test that takes long, in all packages; CI runs each kind."""
    install(session, *PACKAGES, tests_of=tuple(PACKAGES))
    pytest(session, "-m", marker, "packages", "tests")


@nox.session(default=False)
@nox.parametrize("profile", [nox.param(profile, id=profile) for profile in ("share", "long")])
def property(session: nox.Session, profile: str) -> None:
    """Property tests with more examples: of the state machines (``share``, in CI), or of everything (``long``)."""
    install(session, *PACKAGES, tests_of=tuple(PACKAGES))
    where = STATE_MACHINES if profile == "share" else [f"packages/{name}/tests" for name in PACKAGES]
    pytest(session, f"--hypothesis-profile={profile}", "-m", QUICK, *where)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Every benchmark; one JSON object each."""
    install(session, *PACKAGES)
    for name in ("prefix_index", "slab_pool", "kernels", "engine"):
        session.run("python", "-m", f"benchmarks.{name}", *session.posargs)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """What needs a CUDA device: the marked tests, then the kernels' tests and table at real shapes."""
    install(session, *PACKAGES, tests_of=tuple(PACKAGES))
    pytest(session, "-m", "gpu", *(f"packages/{name}/tests" for name in PACKAGES))
    session.run("python", "packages/qwen35_kernels/tools/gpu.py", *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Links of all pages, headings of the packages' READMEs."""
    install(session, *PACKAGES, tests_of=tuple(PACKAGES))
    pytest(session, "tests/test_docs.py")
