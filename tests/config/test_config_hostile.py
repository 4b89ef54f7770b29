"""Configurations that want too much: each is refused in one sentence, in little time and memory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crosstrain.config.sources import read_yaml
from crosstrain.utils.errors import UserError
from fixtures_config import PROJECT, configured_home, edit, load, mistake
from fixtures_plugins import write

QUICK = 5.0  # seconds of this process: each takes a tenth of one
LAUGHS = "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 10))
BOMB = "x0: &x0 [x]\n" + LAUGHS
DECIMAL = "expected a whole number or null, got the text"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    started = time.process_time()
    yield from configured_home(monkeypatch, tmp_path)
    assert time.process_time() - started < QUICK


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB + PROJECT, "more than 10,000 values after expanding aliases"),
        (BOMB, "more than 10,000 values after expanding aliases"),
        ("x0: &x0 {x: 1}\n" + LAUGHS.replace("[", "{<<: [").replace("]", "]}") + PROJECT, "more than 10,000 values"),
        ("x0: &x0 [x]\n" + LAUGHS.replace("[", "{? [").replace("]", "] : 1}") + PROJECT, "more than 10,000 values"),
        (f'x: &x "{"y" * 100_000}"\nz: [{"*x, " * 100}]\n' + PROJECT, "more than 10,000 values"),
        ("a: &a {b: [*a]}\n" + PROJECT, "an anchor contains itself"),
        ("a: &a {*a : 1}\n" + PROJECT, "an anchor contains itself"),
        ("a: &a\n  <<: *a\n" + PROJECT, "an anchor contains itself"),
        ("a: " + "[" * 100_000, "nested too deeply"),
        ("a: " + "[" * 60 + "]" * 60, "more than 50 levels"),
        ("- " * 100_000, "nested too deeply"),
        ("x0: &x0 [x]\n" + "".join(f"x{i}: &x{i} [*x{i - 1}]\n" for i in range(1, 60)), "more than 50 levels"),
        (f"a: {'9' * 5000}\n", f"'{'9' * 40}' is not a valid int"),
        (f"a: 0x{'f' * 5000}\n", "a number of more than 300 digits"),
        ("a: !!int x\n", "'x' is not a valid int"),
        ("a: !!bool x\n", "'x' is not a valid bool"),
        ("a: !!timestamp x\n", "could not determine a constructor"),
        ("a: !!binary eA==\n", "could not determine a constructor"),
        ("a: !!set {x}\n", "could not determine a constructor"),
        ("a: 'x\0'\n", "special characters are not allowed"),
        ("#" * 300_000, "its 300000 bytes exceed the limit of 262144"),
    ],
)  # fmt: skip
def test_a_file_that_asks_for_too_much_is_refused_at_once(home: Path, text: str, reason: str) -> None:
    write(home, {"p.yaml": text})
    assert reason in mistake()
    write(home, {"recipe.yaml": text})
    with pytest.raises(UserError, match=r"^recipe\.yaml:"):
        read_yaml(Path("recipe.yaml"))
    if "\0" not in text and len(text) < 100_000:  # what a command line holds
        write(home, {"p.yaml": PROJECT})
        one_line = "{" + ", ".join(line for line in text.removesuffix(PROJECT).splitlines() if line) + "}"
        said = mistake(f"datasets.webtext.tags={one_line}")
        assert said.startswith("--options: datasets.webtext.tags: cannot parse the value: ")


def interpolating(plan: str) -> str:
    return PROJECT.replace("  dropout: 0.1\n", f"  plan:\n{plan}")


@pytest.mark.parametrize("reference", ["${.x%d}", "${model.plan.x%d}", "${model[plan][x%d]}", "${.${.n%d}}"])
def test_interpolations_of_interpolations_are_bounded(home: Path, reference: str) -> None:
    lines = "    x0: y\n" + "".join(f"    n{i}: x{i}\n    x{i + 1}: '{reference % i * 10}'\n" for i in range(9))
    write(home, {"p.yaml": interpolating(lines)})
    assert re.search("MemoryError|resolving its interpolations (took more|crashed)", mistake())


def test_interpolations_are_bounded_in_depth(home: Path) -> None:
    chain = "".join(f"    x{i}: ${{.x{i + 1}}}\n" for i in range(990))
    write(home, {"p.yaml": interpolating(f"{chain}    x990: y\n")})
    assert "recursion" in mistake()


def test_a_configuration_is_a_regular_file(home: Path) -> None:
    os.mkfifo("fifo.yaml")
    for path in ("fifo.yaml", "/dev/zero", "/dev/null", "configs"):
        assert mistake(path=path) == f"{path}: cannot be read: not a regular file"
    for path in ("a\0b", "x" * 5000, "x" * 300 + ".yaml"):
        assert mistake(path=path)
    (home / "configs" / "runners" / "pipe.yaml").symlink_to("/dev/zero")
    assert "not a regular file" in mistake("run.runner=pipe")


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("1:30", f"{DECIMAL} '1:30'"), ("1:30.5", f"{DECIMAL} '1:30.5'"), ("010", f"{DECIMAL} '010'"),
        ("2020-01-02", f"{DECIMAL} '2020-01-02'"), ("1,000", f"{DECIMAL} '1,000'"), ("0o17", f"{DECIMAL} '0o17'"),
        ("yes", "got true"), ("off", "got false"), ("1e3", "got 1000.0"), ("=", f"{DECIMAL} '='"),
        ("1_000", 1000), ("0x10", 16), ("0b11", 3), ("+7", 7),
    ],
)  # fmt: skip
def test_numbers_are_read_as_people_write_them(home: Path, written: str, answer: str | int) -> None:
    edit(home, "320000", written)
    if isinstance(answer, int):
        assert load().run.max_iters == answer
        assert load(f"run.max_iters={written}").run.max_iters == answer
    else:
        assert mistake().endswith(answer)
        assert mistake(f"run.max_iters={written}").endswith(answer)


@pytest.mark.parametrize("written", ["1e-4", "1E-4", "1.e-4", ".0001", "+1e-4", "0.0001", "1e-0_4", "-.5"])
def test_rates_are_read_as_people_write_them(home: Path, written: str) -> None:
    edit(home, "1.5e-4", written)
    if "_" in written or written.startswith("-"):
        assert "run.init_lr: expected" in mistake()
    else:
        assert load().run.init_lr == 1e-4
