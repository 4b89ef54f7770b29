"""Rows of the small tasks; they are the same on every machine, and nothing is downloaded."""

import random
import string
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROWS = 200
Row = dict[str, Any]
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gwen", "Hugo", "Iris", "Jack", "Kim", "Leo", "Mia", "Ned", "Ola",
          "Pia", "Quinn", "Rob", "Sue", "Tom")  # fmt: skip
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def _choice(rng: random.Random, text: str, right: str, wrong: list[str]) -> Row:
    choices = [right, *wrong]
    rng.shuffle(choices)
    return {"text": text, "choices": choices, "answer": choices.index(right)}


def _split(make: Any, seed: int) -> dict[str, Any]:
    """Return the split that the harness reads."""
    from datasets import Dataset  # a package that the harness needs

    rng = random.Random(seed)
    return {"test": Dataset.from_list([make(rng) for _ in range(ROWS)])}


def arithmetic(**_: Any) -> dict[str, Any]:
    """Sums of two numbers below 100; the wrong sums are near the right one."""

    def make(rng: random.Random) -> Row:
        a, b = rng.randrange(100), rng.randrange(100)
        near = [n for n in range(a + b - 11, a + b + 12) if n >= 0 and n != a + b]
        shown = [(c, d) for c, d in ((rng.randrange(100), rng.randrange(100)) for _ in range(4))]
        examples = "".join(f"{c} + {d} = {c + d}\n" for c, d in shown)
        return _choice(rng, f"{examples}{a} + {b} =", str(a + b), [str(n) for n in rng.sample(near, 3)])

    return _split(make, 1)


def copying(**_: Any) -> dict[str, Any]:
    """Six letters that were shown before, against the same letters in other orders."""

    def make(rng: random.Random) -> Row:
        def letters() -> list[str]:
            return rng.sample(string.ascii_lowercase, 6)

        shown = [" ".join(letters()) for _ in range(2)]
        word = letters()
        wrong = set[str]()
        while len(wrong) < 3:
            other = " ".join(rng.sample(word, 6))
            wrong |= {other} - {" ".join(word)}
        examples = "".join(f"in: {text}\nout: {text}\n" for text in shown)
        return _choice(rng, f"{examples}in: {' '.join(word)}\nout:", " ".join(word), sorted(wrong))

    return _split(make, 2)


def brackets(**_: Any) -> dict[str, Any]:
    """The bracket that closes the innermost open one."""

    def make(rng: random.Random) -> Row:
        stack = [rng.choice("([{")]
        text = stack[0]
        while len(text) < 24 or not stack:
            if stack and rng.random() < 0.45:
                text += _PAIRS[stack.pop()]
            else:
                stack.append(rng.choice("([{"))
                text += stack[-1]
        right = _PAIRS[stack[-1]]
        return _choice(rng, " ".join(text), right, [close for close in ")]}" if close != right])

    return _split(make, 3)


def recall(facts: int = 4, **_: Any) -> dict[str, Any]:
    """The number of a name that was told `facts` facts ago; the wrong numbers belong to other names."""

    def make(rng: random.Random) -> Row:
        names = rng.sample(_NAMES, facts)
        codes = [str(code) for code in rng.sample(range(100, 1000), facts + 3)]
        told = "".join(f"The code of {name} is {code}.\n" for name, code in zip(names, codes, strict=False))
        wrong = rng.sample(codes[1:], 3)
        return _choice(rng, f"{told}The code of {names[0]} is", codes[0], wrong)

    return _split(make, 4 + facts)


def cloze(**_: Any) -> dict[str, Any]:
    """The line of Python's standard library that follows eight others, against lines of other files."""
    lines = [list(_long_lines(path)) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    files = [found for found in lines if len(found) > 40]

    def make(rng: random.Random) -> Row:
        file, *others = rng.sample(files, 4)
        at = rng.randrange(8, len(file))
        wrong = [rng.choice(other).strip() for other in others]
        right = file[at].strip()
        return _choice(rng, "\n".join(file[at - 8 : at]) + "\n", right, [w if w != right else f"# {w}" for w in wrong])

    return _split(make, 30)


def _long_lines(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if 15 < len(line.strip()) < 80:
            yield line
