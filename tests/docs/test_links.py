"""Every link between the pages of this repository leads somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md"] + [
    page for folder in ("docs", "examples", "benchmarks") for page in (ROOT / folder).rglob("*.md")
]


def anchors(page):
    """What headings of a page are called in links, as GitHub has it."""
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.M):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
