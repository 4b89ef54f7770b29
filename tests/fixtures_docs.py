"""The fenced blocks of README.md, CONTRIBUTING.md, ARCHITECTURE.md and docs/*.md, and the commands in them."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from string import Template

from conftest import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of its first line
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str, page: Path | None = None) -> list[Block]:
    """Return the blocks of these languages, or all."""
    found = []
    for each in [page] if page else PAGES:
        text = each.read_text(encoding="utf-8")
        for fence in _FENCE.finditer(text):
            if not languages or fence[2] in languages:
                line = text[: fence.start(3)].count("\n") + 1
                found.append(Block(each, line, fence[2], textwrap.dedent(fence[3])))
    return found


def commands(block: Block) -> list[list[str]]:
    """Return the commands of a shell block as words; variables are replaced; comments and > are left out."""
    found, variables = [], dict[str, str]()
    for line in re.sub(r" > \S+", "", block.text.replace("\\\n", " ")).splitlines():
        words = list[str]()
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word not in ("&&", "|", ";"):
                words.append(word)
                continue
            while words and (assigned := re.fullmatch(r"(\w+)=(.*)", words[0])):
                variables[assigned[1]] = assigned[2]
                words.pop(0)
            if words:
                found.append([part for w in words for part in _substituted(w, variables)])
            words = []
    return found


def _substituted(word: str, variables: dict[str, str]) -> list[str]:
    return Template(word).substitute(variables).split() if re.match(r"\$\w", word) else [word]


def is_plugin(block: Block) -> bool:
    """Return True for a whole plugin file."""
    return "@registry.register_" in block.text and "from crosstrain import" in block.text
