"""The pages point at things that exist, and each package's README has the headings it must have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "packages/*/README.md", "packages/*/examples/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.strip()
    targets = [link.split("#")[0] for link in LINK.findall(text) if "://" not in link and not link.startswith("#")]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_every_package_readme_says_what_it_owns() -> None:
    for readme in ROOT.glob("packages/*/README.md"):
        text = readme.read_text(encoding="utf-8")
        for heading in ("## Install", "## Owns", "## Does not own", "## Invariants", "## Where to make changes"):
            assert f"\n{heading}\n" in text, f"{readme.parent.name}: {heading}"


def test_the_modules_that_a_package_readme_names_exist() -> None:
    named = 0
    for readme in ROOT.glob("packages/*/README.md"):
        table = readme.read_text(encoding="utf-8").split("\n## Where to make changes\n")[1].split("\n## ")[0]
        modules = re.findall(r"`([\w/]+\.py)`", table)
        missing = [module for module in modules if not list(ROOT.glob(f"packages/*/src/*/**/{module}"))]
        assert not missing, f"{readme.parent.name}: {missing}"
        named += len(modules)
    assert named > 50
