"""Project files with mistakes: values, keys, structure and text of a good one changed, from a seed."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import yaml

from conftest import Workspace
from crosstrain.config.load import load_config

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, -7, 10**6, 10**12 + 1, 2**31, 2**62, 2**63, -(2**63), 10**30, 10**400,
    0.0, 0.5, 1.5, -0.5, 1e-300, 1e308, -1e308, math.inf, -math.inf, math.nan,
    "", " ", "x", "none", "1", "1e-4", "yes", "\0", "a\0b", "x" * 300, "x/" * 3000, "y" * 70_000,
    "naïve ☃ 雪", "\u202e",
    "\ud800", "${run.seed}", "${nope}", "???", "${", "ddp", "gpt2", "fp16", "/dev/zero", "/", "..", "~", "*", "{a,b}",
    [], {}, [[]], [None], [1, 2, 3], ["x"], {"name": "x"}, {"a": 1}, {"name": []}, [{}], b"x",
]  # fmt: skip
WRITTEN = [
    "1:30", "010", "0x10", "1_000", "2020-01-01", "yes", "off", "!!int x", "!!binary eA==", "9" * 5000,
    "0x" + "f" * 5000,
    "1e400", "=", "<<", "*nowhere", "&a [*a]", "[" * 500, "[" * 40 + "]" * 40, "{a: {b: {c: d}}}", "'", '"', "|", ">",
    "- x",
    "&b {<<: *b}", "!!python/object/apply:os.system [ls]", "@x", "`x`", "%x", "? x", "\t", "#", "[1, 2", "{a",
    "a: b: c",
]  # fmt: skip
DAMAGE = [
    "\t", "\ufeff", "\0", "\x07", "\r", "\u2028", ": ", "- ", "---\n", "...\n", "#", "'", '"', "{", "]", "&a ",
    "*a ", "!!set ",
]  # fmt: skip
NAMES = ["x", 3, None, True, 1.5, "name", "path", "y" * 300, "a.b", "\u202e"]

Key = tuple[str | int, ...]


def spelled_out(workspace: Workspace, *options: str) -> dict[str, Any]:
    """The workspace's project with every default written down, and with what is null by default."""
    tree = load_config(workspace.project, options).plain
    tree["run"] |= {"curriculum": {"start": 8, "steps": 4}, "profile": {"steps": [1, 2], "ranks": [0]}, "freeze": []}
    tree["run"]["on_bad_step"] |= {"spike": 4.0}
    del tree["model"]["pretrained"]  # absent folders are another test's
    return tree


def bases(workspace: Workspace) -> list[dict[str, Any]]:
    zero = spelled_out(workspace, "run.runner=zero2", "run.optimizer={name: sgd, momentum: 0.9}", "run.amp=bf16")
    plain = spelled_out(workspace, "run.eval_interval=5", "run.save_interval=5", "run.warmup_fraction=0.1")
    return [plain, plain, zero, copy.deepcopy(workspace.config)]


def keys(tree: Any, at: Key = ()) -> list[Key]:
    """Every place in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for name, value in items for found in ((*at, name), *keys(value, (*at, name)))]


def parent(tree: Any, key: Key) -> Any:
    for name in key[:-1]:
        tree = tree[name]
    return tree


def _misspelt(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word))
    return rng.choice([word[:at] + word[at + 1 :], word[:at] + "x" + word[at:], word.upper(), word + " "])


def mutate(good: dict[str, Any], rng: random.Random) -> bytes:
    """A project file with one to three mistakes, which some values are by luck not."""
    tree = copy.deepcopy(good)
    written: dict[str, str] = {}
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        key = rng.choice(keys(tree))
        place, name = parent(tree, key), key[-1]
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                place[name] = copy.deepcopy(rng.choice(VALUES))
            case 4:
                mark = f"MARK{len(written)}"
                place[name], written[mark] = mark, rng.choice(WRITTEN)
            case 5 if isinstance(name, str):
                place[_misspelt(name, rng)] = place.pop(name)
            case 6:
                place.pop(name)
            case 7:  # another place's value
                other = rng.choice(keys(tree))
                place[name] = copy.deepcopy(parent(tree, other)[other[-1]])
            case 8 if type(place[name]) in (int, float) and abs(place[name]) < 1e300:
                place[name] = rng.choice([-place[name], place[name] * 1e9, place[name] / 1e9, place[name] + 0.5])
            case _ if isinstance(place, dict):
                place[rng.choice(NAMES)] = rng.choice(VALUES)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=rng.random() < 0.5)
    for mark, value in written.items():
        text = text.replace(mark, value)
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        at = rng.randrange(len(data))
        damage = rng.choice(DAMAGE).encode()
        flipped = bytes([data[at] ^ (1 << rng.randrange(8))])
        front, back = data[:at], data[at:]
        data = rng.choice([front, front + damage + back, front + flipped + back[1:], data + back])
    return data
