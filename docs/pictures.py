"""Make pictures for these pages from real runs: `python docs/pictures.py [NAME ...]`.

Each command runs in its own terminal, in the current folder, as a reader of the pages would run it. Its output becomes
docs/images/NAME.svg. Needs rich and pyte. The training run takes a few minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pyte
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, LINES = 150, 1000
TERMINALS = {  # picture -> (command, number of lines before the gap, beginning of the first line after it)
    "run": ("python train.py --cfg-path projects/quickstart.yaml", 9, "step 400/400"),
    "samples": ("crosstrain samples --cfg-path projects/gpt2_chat_sft.yaml --number 0", LINES, ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(TERMINALS)} (default: all)")
    for name in parser.parse_args().names or TERMINALS:
        command, first, last = TERMINALS[name]
        lines = in_a_terminal(command)
        if first < len(lines):
            at = next(i for i, line in enumerate(lines) if line.plain.startswith(last))
            lines[first:at] = [Text(), Text("[...]"), Text()]
        draw([Text(f"$ {command}"), *lines], ROOT / "docs" / "images" / f"{name}.svg", title=command)


def in_a_terminal(command: str) -> list[Text]:
    """Run a command in a terminal, and return the lines that it prints, with colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(shlex.split(command), stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = bytearray()
    with contextlib.suppress(OSError):  # the other end is closed
        while True:
            shown += os.read(ours, 4096)
    screen = pyte.Screen(COLUMNS, LINES)
    pyte.ByteStream(screen).feed(shown.replace(sys.base_prefix.encode(), b"/usr"))
    if process.wait():
        sys.exit("\n".join(line.rstrip() for line in screen.display))
    lines = [Text.assemble(*(styled(row[x]) for x in range(COLUMNS))) for _, row in sorted(screen.buffer.items())]
    for line in lines:
        line.rstrip()
    while not lines[-1]:
        lines.pop()
    return lines


def styled(character: pyte.screens.Char) -> tuple[str, str]:
    colour = "" if character.fg == "default" else character.fg.replace("brown", "yellow")
    return character.data, f"bold {colour}".strip() if character.bold else colour


def draw(lines: list[Text], path: Path, title: str) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(line)
    picture = console.export_svg(title=title, theme=MONOKAI)
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
