"""The documentation: README.md and docs/*.md, as pages of the site and as files to read."""

from __future__ import annotations

from typing import Any

import yaml

from conftest import ROOT


def entries(tree: Any) -> list[str]:
    """Every file and pattern in a part of docs/navigation.yml."""
    if isinstance(tree, list):
        return [name for item in tree for name in entries(item)]
    own = [tree[key] for key in ("root", "file", "glob") if key in tree]
    return own + entries(tree.get("subtrees", [])) + entries(tree.get("entries", []))


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    named = entries(yaml.safe_load((ROOT / "docs" / "navigation.yml").read_text()))
    written = [name for name in named if not name.startswith("docs/reference/")]  # the rest is made with the site
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    assert sorted(written) == sorted(str(page.relative_to(ROOT).with_suffix("")) for page in pages)
